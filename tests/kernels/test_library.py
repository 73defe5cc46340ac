"""The binding: what is read from api.h, and what the build says of itself. No GPU needed."""

from __future__ import annotations

import ctypes
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tridecode.kernels.build import SOURCES, BuildError, _check_spills, api_header, sources, targets
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


def functions(code: str) -> list[tuple[str, str, bool]]:
    """(name, body, whether a kernel) of each function that C++ code without comments defines."""
    found = []
    for match in re.finditer(r"__(global|device)__", code):
        head = re.match(r"[^;{]*\{", code[match.start() :])
        if head is None:  # a declaration
            continue
        plain = re.sub(r"__\w+__\s*(\((?:[^()]|\([^()]*\))*\))?", "", head.group())
        name = re.search(r"(\w+(?:\(\))?)\s*\(", plain)
        if name is None:
            continue
        start = end = match.start() + head.end()
        depth = 1
        while depth:
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        found.append((name.group(1), code[start:end], match.group(1) == "global"))
    return found


def kernels_without_wait(code: str) -> list[str]:
    """Kernels in which neither the body nor a function that it calls waits for the predecessor."""
    waiting = {"wait_for_predecessor", "wait_for_predecessor_alone"}
    defined = functions(code)
    calls = {name: set[str]() for name, _, _ in defined}
    for name, body, _ in defined:
        calls[name] |= set(re.findall(r"(\w+)\s*(?:<[^;{}()]*>)?\(", body))
    while new := {name for name, called in calls.items() if called & waiting} - waiting:
        waiting |= new
    return sorted(name for name, _, kernel in defined if kernel and name not in waiting)


def test_every_kernel_waits_for_the_kernel_before_it():
    """A kernel without the wait would let its successor read what its predecessor has yet to write."""
    headers = "".join(path.read_text() for path in sources("*.cuh"))
    for path in sources("*.cu"):
        text = path.read_text()
        code = re.sub(r"//[^\n]*", "", text + headers)
        kernels = [name for name, _, kernel in functions(code) if kernel]
        assert len(kernels) == code.count("__global__"), path.name
        assert kernels_without_wait(code) == [], path.name


def test_a_kernel_without_the_wait_is_found():
    """It is found even if another kernel of the file waits twice, or an uncalled function waits."""
    first = "template <int N> __global__ void __launch_bounds__(N, N < 2 ? 2 : 1) first(int* p) {\n"
    first += "  wait_for_predecessor();\n  { wait_for_predecessor(); }\n}\n"
    helper = "__device__ __forceinline__ void load(int* p) { wait_for_predecessor_alone(); }\n"
    second = "__global__ void second(int* p) { %s }\n"
    assert kernels_without_wait(first + helper + second % "load<2>(p);") == []
    assert kernels_without_wait(first + helper + second % "*p = 1;") == ["second"]


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
