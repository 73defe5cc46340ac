"""Breaks down the time of a decode step by kernel, from a timeline of the device (torch.profiler, CUPTI).

Kernels overlap, since each starts before its predecessor has ended and waits for it. A kernel's time
therefore starts at the end of all kernels that started before it. Kernel classes and bubbles, in which no
kernel runs, then add up to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType

from tridecode.tools.bench.kernel_classes import CLASSES, OTHER, class_of, plain_name
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.measure import Step

_MOST_OTHERS = 8
_LAST = "sample"  # the kernel that ends a step


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy of the timeline. start, end: microseconds."""

    name: str
    start: float
    end: float


def record(runner: LoopRunner, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Kernel]:
    """Return the device's timeline, in order of start, while each prompt gets output_tokens tokens."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        runner.generate(prompts, output_tokens)
        torch.cuda.synchronize()
    found = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def full_steps(steps: Sequence[Step], batch: int) -> tuple[int, int]:
    """Return (number of steps after the last pure decode step of all sequences, number of consecutive such
    steps before).
    """
    full = [step.decodes == batch and step.prompt_tokens == 0 for step in steps]
    after = next((number for number, is_full in enumerate(reversed(full)) if is_full), len(full))
    before = full[: len(full) - after]
    count = next((number for number, is_full in enumerate(reversed(before)) if not is_full), len(before))
    return after, count


def split_steps(kernels: Sequence[Kernel], after: int, count: int) -> list[list[Kernel]]:
    """Return the kernels of `count` consecutive steps, before the last `after` ones. A step ends with the
    kernel `sample`; other kernels of its sampling that follow are counted in the next step.

    Raises ValueError if the timeline has fewer steps: every counted step runs `sample` once.
    """
    ends = [number for number, kernel in enumerate(kernels) if plain_name(kernel.name) == _LAST]
    last = len(ends) - after
    if count < 1 or last - count < 1:
        raise ValueError(f"{len(ends)} `{_LAST}` kernels recorded; wanted {count} steps before {after}")
    marks = ends[last - count - 1 : last]
    return [list(kernels[first + 1 : end + 1]) for first, end in zip(marks, marks[1:])]


def breakdown(steps: Sequence[Sequence[Kernel]], begun: float) -> dict[str, Any]:
    """Return microseconds per step by class, and of bubbles, over consecutive steps.

    begun: the end of the previous step. "others": the kernels with the largest share of "other".
    """
    times: defaultdict[str, float] = defaultdict(float)
    others: defaultdict[str, float] = defaultdict(float)
    bubbles, reached = 0.0, begun
    for kernel in (kernel for step in steps for kernel in step):
        bubbles += max(kernel.start - reached, 0.0)
        own = max(kernel.end - max(kernel.start, reached), 0.0)
        kind = class_of(kernel.name)
        times[kind] += own
        if kind == OTHER:
            others[plain_name(kernel.name)] += own
        reached = max(reached, kernel.end)
    count = len(steps)
    longest = sorted(others.items(), key=lambda item: -item[1])[:_MOST_OTHERS]
    return {
        "steps": count,
        "step_us": round((reached - begun) / count, 2),
        **{kind: round(times[kind] / count, 2) for kind in CLASSES},
        "bubbles": round(bubbles / count, 2),
        "kernels": round(sum(map(len, steps)) / count, 1),
        "others": {name: round(us / count, 2) for name, us in longest},
    }


def break_down(runner: LoopRunner, prompts: Sequence[Sequence[int]], output_tokens: int) -> dict[str, Any]:
    """Return `breakdown` of the steps in which all prompts decode. Raises ValueError if there are none."""
    kernels = record(runner, prompts, output_tokens)
    after, count = full_steps(runner.take_run().steps, len(prompts))
    steps = split_steps(kernels, after, count - 1)  # the first one follows a step with prompts
    begun = max(kernel.end for kernel in kernels if kernel.start < steps[0][0].start)
    return {"batch": len(prompts), **breakdown(steps, begun)}
