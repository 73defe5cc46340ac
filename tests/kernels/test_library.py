"""The binding: what is read from api.h, and what the build says of itself. No GPU needed."""

from __future__ import annotations

import ctypes
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tridecode.kernels import build
from tridecode.kernels.build import SOURCES, BuildError, _check_spills, api_header, included, sources, targets
from tridecode.kernels.library import prototypes, structures
from tridecode.kernels.ops import Ops
from tridecode.kernels.reference import Reference


def test_every_function_of_the_header_is_read():
    header = api_header()
    code = re.sub(r"//[^\n]*", "", header)
    found = prototypes(header)
    assert len(found) == len(re.findall(r"\btridecode_\w+\(", code))
    kinds = {name: types for _, name, types in found}
    assert kinds["tridecode_norm"] == [
        *[ctypes.c_void_p] * 4,
        ctypes.c_float,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_void_p,
    ]


def test_tasks_have_the_layout_of_the_c_compiler(tmp_path: Path):
    """Size and offsets that ctypes gives each struct of api.h, asserted by a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    tasks = structures(api_header())
    assert "tridecode_gemm_task" in tasks
    kinds = {ctypes.c_int: 1, ctypes.c_int64: 2, ctypes.c_float: 3, ctypes.c_void_p: 4}
    lines = ["#include <stddef.h>", '#include "api.h"', "#define CHECK(x) _Static_assert(x, #x)"]
    lines.append("#define KIND(x) _Generic(x, int: 1, int64_t: 2, float: 3, default: 4)")
    for name, task in tasks.items():
        lines.append(f"CHECK(sizeof({name}) == {ctypes.sizeof(task)});")
        for field, kind in task._fields_:
            lines.append(f"CHECK(offsetof({name}, {field}) == {getattr(task, field).offset});")
            lines.append(f"CHECK(KIND((({name}*)0)->{field}) == {kinds[kind]});")
    source = tmp_path / "layout.c"
    source.write_text("\n".join(lines) + "\n")
    command = [compiler, "-std=c11", "-fsyntax-only", f"-I{SOURCES}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_task_takes_fields_by_name_only():
    header = "typedef struct {\n  const void* x;  // (rows); contiguous\n  int64_t a, b;\n  float f;\n} t;\n"
    task = structures(header)["t"]
    assert [name for name, _ in task._fields_] == ["x", "a", "b", "f"]
    assert ctypes.sizeof(task) == 32
    made = task(x=5, b=7)
    assert (made.x, made.a, made.b, made.f) == (5, 0, 7, 0.0)
    with pytest.raises(AttributeError):
        task(y=1)
    with pytest.raises(KeyError):
        structures("typedef struct { bool x; } t;")


def test_every_function_of_the_header_is_defined_once():
    declared = {name for _, name, _ in prototypes(api_header())}
    defined: list[str] = []
    for path in sources("*.cu"):
        defined += re.findall(r"^\w[\w ]*\*?\s*(tridecode_\w+)\(", path.read_text(), re.MULTILINE)
    assert sorted(defined) == sorted(declared)


def test_cuda_has_the_signatures_of_the_contract():
    from tridecode.kernels.cuda import Cuda

    for name, method in inspect.getmembers(Ops, inspect.isfunction):
        if name.startswith("_"):
            continue
        wanted = list(inspect.signature(method).parameters)
        assert list(inspect.signature(getattr(Cuda, name)).parameters) == wanted
        assert list(inspect.signature(getattr(Reference, name)).parameters) == wanted


def test_a_kernel_that_spills_fails_the_build():
    report = "ptxas info : Compiling entry function '_Z5otherv' for 'sm_90'\n"
    report += " 8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads"
    with pytest.raises(BuildError, match="norm.cu: _Z5otherv spills 12 bytes"):
        _check_spills("norm.cu", report)
    _check_spills("norm.cu", report.replace("12 bytes", "0 bytes"))


def test_all_means_every_chip_and_ptx_for_those_to_come():
    codes = targets("all")
    assert codes[0] == "-gencode=arch=compute_75,code=sm_75"
    assert codes[-1] == "-gencode=arch=compute_120,code=compute_120"
    assert targets("90") == ["-gencode=arch=compute_90,code=sm_90"]


def test_an_object_depends_on_the_headers_it_includes_and_on_no_others(tmp_path: Path, monkeypatch):
    for name, text in (
        ("rows/a.cu", '#include <stdint.h>\n#include "rows/a.cuh"\n'),
        ("rows/a.cuh", '#include "common.cuh"\n'),
        ("common.cuh", '#include "rows/a.cuh"\n'),
        ("other.cuh", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    source = tmp_path / "rows/a.cu"
    assert [path.name for path in included(source)] == ["common.cuh", "a.cu", "a.cuh"]
    before = build._object_hash(source, ["-O3"])
    (tmp_path / "other.cuh").write_text("int other;\n")
    assert build._object_hash(source, ["-O3"]) == before
    assert build._object_hash(source, ["-O2"]) != before
    (tmp_path / "common.cuh").write_text("int changed;\n")
    assert build._object_hash(source, ["-O3"]) != before


def test_every_include_of_a_source_is_below_csrc():
    for path in sources("*.cu"):
        assert all(file.is_file() for file in included(path))
