"""Timelines of kernels become classes that add up to the step; every kernel of the library has a class."""

from __future__ import annotations

import pytest

from tests.kernels.device_code import functions, without_comments
from tridecode.kernels.build import sources
from tridecode.tools.bench.breakdown import Kernel, breakdown, full_steps, split_steps
from tridecode.tools.bench.kernel_classes import CLASSES, OURS, class_of, plain_name
from tridecode.tools.bench.measure import Step

SPACE = "void tridecode::(anonymous namespace)::"
SAMPLE = f"{SPACE}sample(tridecode_sample_task)"
KEEP, LOG_PROBS = f"{SPACE}keep_raw(tridecode_raw_task)", f"{SPACE}top_log_probs(tridecode_top_task)"
GEMV = f"{SPACE}gemv<__half, 4>(tridecode_gemv_task)"
SUM = f"{SPACE}all_reduce_rows<float, 1, 2>(tridecode::peers::Rows)"


def test_every_kernel_of_the_library_has_a_class_and_no_other_name_has() -> None:
    defined = set()
    for path in [*sources("*.cu"), *sources("*.cuh")]:
        found = functions(without_comments(path.read_text()))
        defined |= {function.name for function in found if function.is_kernel}
    assert defined == set(OURS) and set(OURS.values()) <= set(CLASSES)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (GEMV, "gemm"),
        (SUM, "communication"),
        (SAMPLE, "sampling"),
        (f"{SPACE}decode_attention<__half, 128, 4>(tridecode_attention_task)", "attention"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128>(Params)", "gemm"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)", "other"),
        ("void other::gemv<int>(int)", "other"),
        ("Memcpy DtoH (Device -> Pinned)", "other"),
    ],
)
def test_the_class_of_a_kernel_follows_from_its_name(kernel: str, kind: str) -> None:
    assert class_of(kernel) == kind


def test_a_name_is_without_namespaces_arguments_and_parameters() -> None:
    assert plain_name(GEMV) == "gemv" and plain_name("Memcpy DtoH (Device)") == "Memcpy DtoH"


def test_kernels_that_start_early_count_from_the_end_of_those_before() -> None:
    steps = [
        [Kernel(GEMV, 12, 20), Kernel(SUM, 14, 30), Kernel(SAMPLE, 33, 40)],
        [Kernel(GEMV, 40, 50), Kernel("copy", 42, 48), Kernel(SUM, 51, 55), Kernel(SAMPLE, 54, 60)],
    ]
    found = breakdown(steps, begun=10)
    assert (found["steps"], found["step_us"], found["kernels"]) == (2, 25, 3.5)
    assert (found["gemm"], found["communication"], found["sampling"]) == (9, 7, 6)
    assert found["bubbles"] == (2 + 3 + 0 + 1) / 2 and found["other"] == 0
    assert sum(found[kind] for kind in (*CLASSES, "bubbles")) == found["step_us"]


def test_steps_are_those_in_which_all_sequences_decode() -> None:
    def step(decodes: int, prompt_tokens: int = 0) -> Step:
        return Step(0.0, decodes, prompt_tokens)

    steps = [step(0, 8), step(1, 8), step(2), step(2), step(2), step(1)]
    assert full_steps(steps, 2) == (1, 3)
    assert full_steps(steps[:2], 2) == (2, 0)


def test_a_timeline_is_cut_behind_each_draw() -> None:
    names = [KEEP, GEMV, SAMPLE, KEEP, GEMV, SUM, SAMPLE, LOG_PROBS]
    kernels = [Kernel(name, at, at + 1) for at, name in enumerate(names * 2)]
    steps = split_steps(kernels, after=1, count=2)
    assert [[kernel.start for kernel in one] for one in steps] == [[3, 4, 5, 6], [7, 8, 9, 10]]
    with pytest.raises(ValueError, match="4 `sample` kernels recorded; wanted 4 steps before 0"):
        split_steps(kernels, after=0, count=4)
