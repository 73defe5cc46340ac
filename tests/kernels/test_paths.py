"""An engine's log about its GPU while loading agrees with the kernel tables."""

from __future__ import annotations

import pytest

from tridecode.kernels.explain import DEVICES
from tridecode.kernels.gemm.packed_table import choose_packed
from tridecode.kernels.gemm.plan import Gemm
from tridecode.kernels.gemm.table import choose, choose_8_bit
from tridecode.kernels.paths import paths


@pytest.mark.parametrize("name", DEVICES)
def test_every_kernel_that_the_example_takes_is_named(name: str) -> None:
    said = paths(DEVICES[name])
    for tokens in (1, 2, 3, 8, 9, 64, 65, 256):
        gemm = Gemm(tokens, 4096, 4096)
        assert choose(gemm, DEVICES[name]).kernel in said
        if DEVICES[name].capability != 90:
            assert choose_packed(gemm, 128, DEVICES[name]).kernel in said
    assert said.startswith(f"compute capability {DEVICES[name].capability / 10}; ")
    assert ("kernels for Hopper do not run" in said) == (DEVICES[name].capability > 90)


def test_the_ranges_end_where_the_choice_changes() -> None:
    assert "gemm_sm90_split_k to 64, then gemm_library" in paths(DEVICES["h200"])
    assert choose(Gemm(64, 4096, 4096), DEVICES["h200"]).kernel == "gemm_sm90_split_k"
    assert choose(Gemm(65, 4096, 4096), DEVICES["h200"]).kernel == "gemm_library"


def test_which_cards_but_hoppers_multiply_in_8_bit() -> None:
    kernels = "gemm_mma_tiles_8bit to 64, then library_8_bit"
    assert f"W8A8 in int8: {kernels}" in paths(DEVICES["a100"])
    assert f"W8A8 in int8 and fp8: {kernels}" in paths(DEVICES["l40s"])
    assert "W8A8" not in paths(DEVICES["t4"])


@pytest.mark.parametrize("name", ["a100", "l40s", "t4"])
def test_cards_before_hopper_have_products_of_their_own_up_to_64_tokens(name: str) -> None:
    assert "gemm_mma_tiles to 64, then gemm_library" in paths(DEVICES[name])


def test_no_block_waits_for_another_where_mps_shares_the_device() -> None:
    alone, shared = DEVICES["h200"], DEVICES["h200"]._replace(shared=True)
    assert "MPS" in paths(shared) and "MPS" not in paths(alone)
    waits = 0
    for tokens in range(1, 257):
        for outputs, inputs in ((28672, 4096), (6144, 4096), (4096, 14336)):
            gemm = Gemm(tokens, inputs, outputs, "swiglu" if outputs == 28672 else "linear")
            waits += choose(gemm, alone).stream_k
            assert not choose(gemm, shared).stream_k
            for operand in ("int8", "fp8", "two_parts"):
                assert not choose_8_bit(gemm._replace(operand=operand), shared).stream_k
            assert not choose_packed(gemm, 128, shared).stream_k
    assert waits > 0
