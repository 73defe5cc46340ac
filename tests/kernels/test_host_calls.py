"""The host's share of a launch: an eager prefill step is bound by it, so Python calls per GEMM are bounded.

Times depend on the machine; the number of Python functions that a launch enters does not. The library is
replaced by functions that do nothing.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch

from tridecode.kernels import gpu as gpu_module
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.gemm import cublas
from tridecode.kernels.gemm.call import Call
from tridecode.kernels.gemm.cublas import LibraryProducts
from tridecode.kernels.gemm.gemms import Gemms
from tridecode.kernels.gemm.packed_table import choose_packed
from tridecode.kernels.gemm.plan import Device
from tridecode.kernels.gemm.table import choose
from tridecode.kernels.gpu import Gpu
from tridecode.kernels.operands import Linear, Norm

INPUTS, OUTPUTS = 512, 1024


class IdleLibrary:
    """Counts the launches of each function, and does nothing."""

    def __init__(self) -> None:
        self.launched: Counter[str] = Counter()
        self.operands = {name: 1 for name in ("int8", "fp8", "two_parts", "two_parts_int4")}

    def __getattr__(self, name: str) -> Callable[..., None]:
        def launch(*arguments: Any, **fields: Any) -> None:
            self.launched[name] += 1
            if name == "library_algorithms":
                ctypes.c_int.from_address(fields["count"]).value = 1

        setattr(self, name, launch)
        return launch


class IdleGpu(Gpu):
    """An H100 whose library is idle."""

    def __init__(self) -> None:
        self.device, self.capability = torch.device("cpu"), 90
        self.gemm_device = Device(90, 132, 232448, (132, 66, 44))
        self.choose_gemm = lru_cache(partial(choose, device=self.gemm_device))  # type: ignore[assignment]
        self.choose_packed = lru_cache(partial(choose_packed, device=self.gemm_device))  # type: ignore[assignment]
        self.library = IdleLibrary()  # type: ignore[assignment]
        self.library_products = LibraryProducts(self.library, 256)
        self.scratch_fields, self.arenas = {"partials": 1}, {}


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> Gemms:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublas, "addresses", lambda: (ctypes.c_void_p * len(cublas.FUNCTIONS))())
    monkeypatch.setattr(gpu_module, "current_stream", lambda device: 0)
    return Gemms(IdleGpu())


def calls_of(run: Callable[[], object]) -> int:
    """Python functions that `run` enters."""
    count = 0

    def watch(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # finalizers of other objects would count
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count - 1


@pytest.mark.parametrize(
    ("weights", "activations", "tokens", "kernel", "most"),
    [
        ("", "", 16, "gemm_sm90", 38),
        ("", "", 512, "gemm_library", 59),
        ("int8", "int8", 512, "gemm_sm90", 39),
        ("int8", "", 16, "gemm_sm90", 46),
        ("int4", "", 16, "gemm_int4", 43),
        ("int4", "", 512, "gemm_expanded", 80),
    ],
)
def test_a_gemm_enters_few_python_functions(
    gemms: Gemms, weights: str, activations: str, tokens: int, kernel: str, most: int
) -> None:
    dense = torch.zeros(OUTPUTS, INPUTS, dtype=torch.bfloat16)
    group = 128 if weights == "int4" else 0
    weight = round_to_nearest(dense, weights, group, activations) if weights else dense
    linear = gemms.pack(Linear(weight), torch.bfloat16, False)
    x, out = (
        torch.zeros(tokens, INPUTS, dtype=torch.bfloat16),
        torch.empty(tokens, OUTPUTS, dtype=torch.bfloat16),
    )
    norm, library = Norm(torch.ones(INPUTS, dtype=torch.bfloat16), None, 1e-5), gemms._gpu.library

    def run() -> None:
        gemms.linear(Call(x, linear, out, norm, None, None))

    run()  # plans and buffers are made once
    before = Counter(library.launched)
    found = calls_of(run)
    assert any(name.startswith(kernel) for name in library.launched - before), library.launched
    assert found <= most
