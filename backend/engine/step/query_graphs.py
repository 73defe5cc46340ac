"""Steps that verify drafts as CUDA graphs, one for each padded number of rows and of tokens in a row."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from tridecode.backend.engine.step.decode_graphs import Capturer, empty_plan, no_collection
from tridecode.backend.engine.step.plan import MOST_QUERIES, StepPlan
from tridecode.kernels.operands import Batch

log = logging.getLogger("tridecode.engine")

#: padded rows, and tokens of the longest row
ROWS, QUERIES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, MOST_QUERIES)


def query_shapes(most_tokens: int, most_queries: int) -> list[tuple[int, int]]:
    """Return the (rows, queries) of an engine that samples most_tokens in a step at most and verifies rows of
    up to most_queries tokens."""
    queries = [count for count in QUERIES if count < 2 * most_queries]
    return [(rows, count) for rows in ROWS for count in queries if rows * count <= most_tokens]


def empty_rows(rows: int, queries: int) -> StepPlan:
    """Return a plan of decode rows that read and write nothing, to capture a graph from."""
    tokens = rows * queries
    starts = np.arange(0, tokens + 1, queries, dtype=np.int32)
    return replace(empty_plan(rows, tokens, rows, samples=queries), query_starts=starts, queries=queries)


class QueryGraphs:
    """Graphs of steps of decode rows of several tokens. load(plan, rows, queries) copies a plan to the
    device, padded, to the same addresses for each size."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        load: Callable[[StepPlan, int, int], Batch],
        capture: Capturer,
    ):
        self._load = load
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.replayed = 0
        with no_collection():
            largest_first = sorted(shapes, key=lambda shape: shape[0] * shape[1], reverse=True)
            for number, (rows, queries) in enumerate(largest_first, 1):
                what = f"{number} of {len(shapes)} with drafts, {rows} rows of {queries} tokens"
                self._graphs[rows, queries] = capture(load(empty_rows(rows, queries), rows, queries), what)
        log.info("captured %d graphs of steps with drafts", len(shapes))

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """Return the (rows, queries) of the graphs."""
        return set(self._graphs)

    def has(self, rows: int, queries: int) -> bool:
        """Return whether there is a graph for `rows` rows of `queries` tokens, with padding."""
        return (_least(ROWS, rows), _least(QUERIES, queries)) in self._graphs

    def replay(self, plan: StepPlan) -> bool:
        """Run a plan of decode rows without slot starts that verifies; return False if no graph fits."""
        if plan.num_decodes != plan.num_rows or plan.starts:
            return False
        shape = _least(ROWS, plan.num_rows), _least(QUERIES, plan.queries)
        graph = self._graphs.get(shape)
        if graph is None:
            return False
        self._load(plan, *shape)
        graph.replay()
        self.replayed += 1
        return True


def _least(sizes: tuple[int, ...], wanted: int) -> int:
    """Return the first of ascending sizes that is at least `wanted`, or 0."""
    place = bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else 0
