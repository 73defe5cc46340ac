"""The waits of kernels, read from the sources: for the kernel before (griddepcontrol), and for blocks of the
same launch. A mistake there is a race or a hang that only some timings show.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernels.device_code import callers, end_of, functions, launches, unit, without_comments
from tridecode.kernels.build import source, sources

WAITS = {"wait_for_predecessor", "wait_for_predecessor_alone"}
HALVES = {*WAITS, "let_successor_start"}

#: functions that read memory before their wait: constants, or results of kernels before their predecessor,
#: which kReadsAhead of debug.cu must name. A function that is in neither begins with its wait
READ_CONSTANTS = {
    *("add_normed", "finish_heads", "norm_row", "quantize_row"),
    *("expand_rows", "expand_weight"),
    *("copy_chunks", "gemm_int4_sm90"),
    *("copy_int4_stages", "gemm_int4_stream_k_sm90"),
    *("copy_packed_stages", "gemm_packed_mma", "gemm_packed_sm90"),
    *("copy_wide_stages", "gemm_packed_wide_sm90", "gemm_packed_even_split_sm90"),
    *("gemm_mma", "gemm_mma_tiles", "gemv"),
    *("copy_part", "gemm_sm90_split_k"),
    *("copy_stages", "gemm_sm90_data_parallel", "gemm_sm90_even_split", "gemm_sm90_stream_k", "share_tile"),
    *("product_chain_sm90a", "adapter_sums", "norm_one_row"),
}
READ_RESULTS = {
    *("decode_attention", "decode_attention_cluster", "decode_attention_wide"),
    *("combine_prefill_parts", "prefill_attention_split"),
    *("add_adapters", "spread_row", "spread_adapted_rows", "spread_adapters_norm", "norm_share"),
    *("rotate_and_cache_whole", "rotate_and_round_whole"),
    *("all_reduce_owned_rows", "all_reduce_rows"),
}
_READ = re.compile(r"\[(?!\])|->|load|copy|fetch|request|atomic|__ld|\*\w+[;)]|\bdivide\(")

#: functions that read what another block or GPU may be writing
POLLS = {
    "load_acquire",
    "load_arrival",
    "load_relaxed",
    "load_word",
    "load_words",
    "load_their_words",
    "load_system",
}
_POLL = re.compile(rf"\b({'|'.join(POLLS)}|is_of|atomic\w+)\(")
_LIMITED = re.compile(r"\bspin\.again\(|\bpatience_?\.is_over\(")


def kernels_without_wait(code: str) -> list[str]:
    """Kernels in which neither the body nor a function that it calls waits for the predecessor."""
    defined = functions(code)
    waiting = callers(defined, WAITS)
    return sorted(
        function.name for function in defined if function.is_kernel and function.name not in waiting
    )


def table(name: str, text: str) -> set[str]:
    """The strings of an array of debug.cu."""
    (body,) = re.findall(rf"{name}\[\] = \{{([^}}]*)\}}", text)
    return set(re.findall(r'"([\w ]+)"', body))


def order_faults(code: str, tables: str) -> list[str]:
    """Return how a unit breaks the rules of wait_for_predecessor. tables: the text of debug.cu."""
    defined, found, faults = functions(code), launches(code), []
    releasing, ahead = table("kReleasesFirst", tables), table("kReadsAhead", tables)
    names = {kernel: launch.names for launch in found for kernel in launch.kernels}
    last_wait = re.compile(rf"\b({'|'.join(callers(defined, HALVES))})\s*(<[^;{{}}()]*>)?\(")
    for function in defined:
        name, body = function.name, function.body
        direct = re.findall(rf"\b({'|'.join(HALVES)})\(", body)
        if name in HALVES or not (function.is_kernel or direct):
            continue
        users = callers(defined, {name})
        launched = {each for kernel, its in names.items() if kernel in users for each in its}
        if not launched:
            faults.append(f"{name} is launched under no name")
        if "let_successor_start" in direct and not launched <= releasing:
            faults.append(f"{name} releases its successor first; kReleasesFirst lacks {sorted(launched)}")
        ends = [match.start() for match in last_wait.finditer(body)]
        before = re.sub(r"(extern )?__shared__[^;]*;", "", body[: ends[-1]] if ends else "")
        if not _READ.search(before) or name in READ_CONSTANTS:
            continue
        if name not in READ_RESULTS:
            faults.append(f"{name} reads memory before its wait; READ_CONSTANTS and READ_RESULTS lack it")
        elif not launched & ahead:
            faults.append(f"{name} reads results before its wait; kReadsAhead lacks {sorted(launched)}")
    return faults


def loops(code: str) -> list[str]:
    """The condition and body of each while and do loop."""
    found = []
    for match in re.finditer(r"\bwhile \(", code):
        behind = end_of(code, match.end(), "()")
        condition = code[match.end() : behind]
        if code[behind:].startswith(";"):  # do {...} while (...);
            depth, at = 0, match.start() - 1
            while True:
                depth += {"}": 1, "{": -1}.get(code[at], 0)
                if code[at] == "{" and depth == 0:
                    break
                at -= 1
            found.append(condition + code[at : match.start()])
        elif code[behind:].lstrip().startswith("{"):
            opened = code.index("{", behind) + 1
            found.append(condition + code[opened : end_of(code, opened)])
        else:
            found.append(condition + code[behind : code.index(";", behind)])
    return found


def endless_waits(code: str) -> list[str]:
    """Loops that read what others write, without a limit."""
    return [loop for loop in loops(code) if _POLL.search(loop) and not _LIMITED.search(loop)]


def residency_faults(code: str) -> list[str]:
    """Kernels whose blocks wait for each other, and that are not launched as such, or the reverse."""
    defined = functions(code)
    spinning = {each.name for each in defined if re.search(r"\bSpin \w+\(", each.body)}
    reached = callers(defined, spinning) if spinning else set()
    return [
        f"{sorted(launch.kernels)}: {launch.how}"
        for launch in launches(code)
        if bool(launch.kernels & reached) != (launch.how == "launch_resident")
    ]


# ---------------------------------------------------------------- the kernel before


def test_every_kernel_waits_for_the_kernel_before_it():
    """A kernel without the wait would let its successor read what its predecessor has yet to write."""
    for path in sources("*.cu"):
        code = unit(path)
        kernels = [function for function in functions(code) if function.is_kernel]
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


def test_every_kernel_waits_before_it_releases_its_successor_or_is_listed():
    tables = source("debug.cu").read_text()
    names: set[str] = set()
    for path in sources("*.cu"):
        code = unit(path)
        assert order_faults(code, tables) == [], path.name
        names |= {name for launch in launches(code) for name in launch.names}
    assert table("kReleasesFirst", tables) | table("kReadsAhead", tables) <= names


def test_griddepcontrol_is_in_one_place():
    held = {path.name for path in sources("*.cu*") if "griddepcontrol." in path.read_text()}
    assert held == {"common.cuh"}


def changed(path: Path, old: str, new: str) -> str:
    """The unit of a file with one change."""
    code = unit(path)
    assert old in code, f"{path.name} has no {old!r}"
    return code.replace(old, new, 1) if new else code.replace(old, "")


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        (
            "place_rows.cu",
            "const __grid_constant__ Task task) {\n  wait_for_predecessor();",
            "const __grid_constant__ Task task) {\n  let_successor_start();\n  wait_for_predecessor_alone();",
            "place_rows releases its successor first; kReleasesFirst lacks ['place_rows']",
        ),
        (
            "place_rows.cu",
            "const __grid_constant__ Task task) {\n",
            "const __grid_constant__ Task task) {\n  const int slot = task.slots[blockIdx.x];\n",
            "place_rows reads memory before its wait; READ_CONSTANTS and READ_RESULTS lack it",
        ),
        (
            "add_adapters.cu",
            '"add_adapters", kernel',
            '"add_lora", kernel',
            "add_adapters reads results before its wait; kReadsAhead lacks ['add_lora']",
        ),
        (
            "norm.cu",
            'launch("norm"',
            'launch("rms"',
            "norm_row releases its successor first; kReleasesFirst lacks ['rms']",
        ),
    ],
)
def test_a_wrong_order_is_found(file: str, old: str, new: str, fault: str):
    tables = source("debug.cu").read_text()
    assert fault in order_faults(changed(source(file), old, new), tables)


# ---------------------------------------------------------------- blocks of the same launch


def test_every_wait_for_another_block_or_gpu_has_a_limit():
    for path in sources("*.cu*"):
        assert endless_waits(without_comments(path.read_text())) == [], path.name


def test_loads_that_others_write_are_in_few_functions():
    """So that a wait is seen by the name of the function that it calls."""
    code = "".join(without_comments(path.read_text()) for path in sources("*.cuh"))
    code += "".join(without_comments(path.read_text()) for path in sources("*.cu"))
    found = {
        each.name for each in functions(code) if re.search(r'"ld\.(acquire|relaxed|volatile)', each.body)
    }
    assert found == POLLS


@pytest.mark.parametrize(
    ("file", "limit"),
    [
        ("gemm_sm90_walk.cuh", "spin.again()"),
        ("gemm_sm90_even_split.cuh", "spin.again()"),
        ("product_chain_rows.cuh", "spin.again()"),
        ("product_chain_finish.cuh", "spin.again()"),
        ("all_reduce.cu", " && !patience.is_over(missing)"),
        ("add_copied.cu", " && !patience.is_over(1 - task.rank)"),
        ("sampling_exchange.cuh", " && !patience_.is_over(missing)"),
    ],
)
def test_a_wait_without_a_limit_is_found(file: str, limit: str):
    text = without_comments(source(file).read_text())
    assert limit in text and endless_waits(text.replace(limit, "")) != []


def test_kernels_whose_blocks_wait_for_each_other_are_launched_as_such():
    for path in sources("*.cu"):
        assert residency_faults(unit(path)) == [], path.name


@pytest.mark.parametrize("file", ["gemm_packed_sm90.cu", "product_chain_sm90a.cu"])
def test_another_launch_of_such_a_kernel_is_found(file: str):
    code = changed(source(file), "return launch_resident(", "return launch(")
    assert residency_faults(code) == [f"{[Path(file).stem]}: launch"]
