"""Measures what steps of decode rows cost with and without drafts, before the first request."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.speculation.depth import StepCosts
from tridecode.backend.engine.step.decode_graphs import decode_plan
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.query_graphs import empty_rows, query_shapes

log = logging.getLogger("tridecode.engine")

#: timed runs of each shape after an untimed one, by type of device; the median counts
_RUNS = {"cuda": 5, "cpu": 3}
#: rows that are measured on a CPU, whose steps take long
_CPU_ROWS = (1, 4, 16)
#: maximum tokens per row for which every number of drafts of a planned drafter is measured
_MOST_TOKENS = 8


def measured_costs(engine: Engine, most_queries: int) -> StepCosts | None:
    """Return the measured seconds of steps whose decode rows have up to most_queries tokens. Collective. None
    for a device that is neither a GPU nor a CPU.

    The rows have empty contexts, so attention to earlier tokens and sampling are not measured. The cost of
    drafts is the time that the drafter needs to compute them.
    """
    device = engine.device.type
    if device not in _RUNS:
        return None
    shapes = _shapes(engine, most_queries)
    plain = {rows: _seconds(engine, decode_plan(rows)) for rows in sorted({rows for rows, _ in shapes})}
    several = {shape: _seconds(engine, empty_rows(*shape), shape[1] - 1) for shape in shapes}
    for (rows, queries), seconds in several.items():
        ratio = seconds / plain[rows]
        log.info("a step of %d rows of %d tokens: %.2f x one of a token each", rows, queries, ratio)
    searched = None
    if engine.drafter is not None and engine.drafter.is_planned and engine.drafter.looks_up:
        searched = {shape: _seconds(engine, empty_rows(*shape)) for shape in shapes}
    return StepCosts(plain, several, searched)


def _shapes(engine: Engine, most_queries: int) -> list[tuple[int, int]]:
    """Return the (rows, tokens per row) to measure. A planned drafter needs time for each draft, so that
    numbers of tokens between those of graphs count, too."""
    padded = [shape for shape in query_shapes(engine.config.slots, most_queries) if shape[1] > 1]
    if engine.device.type == "cpu":
        return [shape for shape in padded if shape[0] in _CPU_ROWS]
    graphs = engine.query_graphs
    if graphs is None:
        return padded
    drafter = engine.drafter
    if drafter is None or not drafter.is_planned:
        return [shape for shape in padded if shape in graphs.shapes]
    rows = sorted({rows for rows, _ in padded})
    counts = range(2, min(most_queries, drafter.most_planned + 1, _MOST_TOKENS) + 1)
    found = {(size, count) for size in rows for count in counts if graphs.has(size, count)}
    if drafter.looks_up or most_queries > _MOST_TOKENS:
        found.update(shape for shape in padded if shape in graphs.shapes)
    return sorted(found)


def _seconds(engine: Engine, plan: StepPlan, drafts: int = 0) -> float:
    """Return the median seconds of a step and of `drafts` drafts for each of its rows."""
    times = []
    for run in range(_RUNS[engine.device.type] + 1):
        begun = time.perf_counter()
        _run(engine, plan)
        if drafts and engine.drafter is not None:
            engine.drafter.rehearse(plan.num_rows, drafts)
        if engine.is_asynchronous:
            engine.synchronize()
        if run:
            times.append(time.perf_counter() - begun)
    return float(np.median(times))


@torch.inference_mode()
def _run(engine: Engine, plan: StepPlan) -> None:
    """Run the forward of a plan of empty rows on all stages, as a graph where there is one."""
    x = engine.state.work.hidden[: plan.num_tokens]
    engine.ranks.receive(x)
    if not engine.replay_rows(plan):
        engine.run(engine.buffers.load(plan))
    engine.ranks.send(x)
