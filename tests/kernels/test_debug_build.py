"""The debug build: files of its own, and on a GPU a wait that cannot end stops its kernel with a record."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tridecode.kernels import build
from tridecode.kernels.library import KernelError, Library, library_path

#: stands for nvcc: writes its arguments to the file behind -o
NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "release 13.0, V13.0.88"; exit; fi
all="$*"
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
echo "$all" > "$out"
"""


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `build` compiles two files by an nvcc that writes its arguments."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    files = [build.source("norm.cu"), build.source("runtime.cu")]
    monkeypatch.setenv("NVCC", str(nvcc))
    monkeypatch.setattr(build, "sources", lambda pattern="*": files if pattern == "*.cu" else [])
    monkeypatch.setattr(build, "source_hash", lambda: "0123456789ab")
    for name in ("OBJECTS", "LIBRARY", "DEBUG_OBJECTS", "DEBUG_LIBRARY"):
        moved = tmp_path / getattr(build, name).relative_to(build.HERE)
        monkeypatch.setattr(build, name, moved)
    return tmp_path / "lib"


def test_a_debug_build_leaves_the_other_one_as_it_is(compiled: Path):
    build.build("90")
    release = {path: path.read_bytes() for path in compiled.rglob("*") if path.is_file()}
    library = build.build("90", debug=True)
    assert library == compiled / "debug" / "libtridecode_kernels_debug.so"
    assert {path: path.read_bytes() for path in release} == release
    build.build("90")
    assert library.is_file() and len(list((compiled / "debug" / "obj").iterdir())) == 2


def test_files_of_a_debug_build_know_their_name_and_say_so(compiled: Path):
    build.build("90")
    build.build("90", debug=True)
    objects = [(compiled / "obj").iterdir(), (compiled / "debug" / "obj").iterdir()]
    release, debug = ({path.name.split("-")[0]: path.read_text() for path in each} for each in objects)
    assert '-DTRIDECODE_DEBUG="norm"' in debug["norm"] and "sources 0123456789ab, debug" in debug["runtime"]
    assert all("TRIDECODE_DEBUG" not in text and ", debug" not in text for text in release.values())


def test_the_library_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRIDECODE_KERNELS", raising=False)
    assert library_path() == build.LIBRARY
    monkeypatch.setenv("TRIDECODE_KERNELS", "debug")
    assert library_path() == build.DEBUG_LIBRARY
    monkeypatch.setenv("TRIDECODE_KERNELS", "fast")
    with pytest.raises(KernelError, match="TRIDECODE_KERNELS is 'fast'; wanted release or debug"):
        Library()


def test_a_missing_debug_library_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tridecode.kernels.library.DEBUG_LIBRARY", tmp_path / "none.so")
    monkeypatch.setenv("TRIDECODE_KERNELS", "debug")
    with pytest.raises(KernelError, match=r"none\.so does not exist; .*kernels\.build --debug"):
        Library()


# ---------------------------------------------------------------- on a GPU

STUCK = """
import torch
from tests.kernels.test_gemm_sm90 import even_split
from tridecode.kernels.cuda import Cuda
from tridecode.kernels.operands import Linear

ops = Cuda(torch.device("cuda", 0))
ops.gpu.choose_gemm = lambda gemm: even_split(gemm, 128)
x, weight = (torch.ones(n, 4096, dtype=torch.bfloat16, device="cuda") for n in (100, 512))
out = torch.empty(100, 512, dtype=torch.bfloat16, device="cuda")
ops.linear(x, Linear(weight), out=out)
torch.cuda.synchronize()
assert (out == 4096).all()
print("one product is right", flush=True)
ops.gpu.counters.fill_(-1)  # four clusters add up to 3: none of them sees 4
ops.linear(x, Linear(weight), out=out)
torch.cuda.synchronize()
"""

EARLY = """
import torch
from tests.kernels.batches import make_batch, make_cache, make_heads
from tests.kernels.conftest import Place
from tridecode.kernels.cuda import Cuda
from tridecode.kernels.operands import Norm

place = Place(Cuda(torch.device("cuda", 0)), torch.device("cuda", 0), torch.Generator().manual_seed(1))
heads = make_heads(place, 8, 2, 128)
batch = make_batch(place, [700], [1], 16)
cache = make_cache(place, batch, heads, 16, torch.bfloat16)
qkv = place.normal(1, heads.qkv_size, dtype=torch.bfloat16)
sizes = ((1, 1024), (1, 1024), 1024)
out, x, weight = (torch.ones(size, dtype=torch.bfloat16, device="cuda") for size in sizes)
place.ops.decode_attention(qkv, heads, batch, cache, out=out)
torch.cuda.synchronize()
torch.cuda._sleep(100_000_000)  # cycles: the norm is still queued when attention is launched
place.ops.norm(x, Norm(weight, None, 1e-5), out=x)
place.ops.decode_attention(qkv, heads, batch, cache, out=out)
"""


@pytest.fixture(scope="module")
def debug_library() -> Path:
    """The debug library, compiled unless it is there."""
    try:
        Library(build.DEBUG_LIBRARY)
    except KernelError:
        build.build("native", debug=True)
    return build.DEBUG_LIBRARY


def run_debug(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRIDECODE_KERNELS": "debug"}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.gpu
@pytest.mark.usefixtures("debug_library")
def test_a_wait_that_cannot_end_stops_the_kernel_with_a_record():
    done = run_debug(STUCK)
    assert "one product is right" in done.stdout and done.returncode != 0
    record = r"tridecode: gemm_sm90_even_split: block \d+ of 16, thread \d+, has waited 2 s for "
    assert re.search(record + "sums of the tile's other clusters; the kernel is stopped", done.stderr)


@pytest.mark.gpu
@pytest.mark.usefixtures("debug_library")
def test_attention_right_behind_a_kernel_that_releases_it_early_is_refused():
    done = run_debug(EARLY)
    assert "KernelError: decode_attention follows norm, which starts it before the kernel" in done.stderr
