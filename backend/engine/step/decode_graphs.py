"""Decode steps as CUDA graphs, one for each padded number of rows; capturing of graphs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from tridecode.backend.engine.step.plan import StepPlan
from tridecode.kernels.operands import Batch

log = logging.getLogger("tridecode.engine")
T = TypeVar("T")


def padded_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then by 8 to 128, by 16 to 256, by 32 above; the last is `most`."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, most + 32, 32)]
    return [*(size for size in sizes if size < most), most]


def coarse_sizes(most: int) -> list[int]:
    """Return 1, 2, 4, up to 64, then multiples of 32; the last is `most`. GEMM tiles have these sizes up to
    64 rows, so padding costs little.
    """
    sizes = [1, 2, 4, 8, 16, 32, *range(64, most + 32, 32)]
    return [*(size for size in sizes if size < most), most]


def decode_plan(rows: int) -> StepPlan:
    """Return a plan of `rows` decode rows that read and write nothing, to capture a graph from."""
    return empty_plan(rows, rows, rows, samples=1)


def empty_plan(decodes: int, tokens: int, rows: int, samples: int) -> StepPlan:
    """Return a plan that reads and writes nothing.

    The first `decodes` of `rows` rows have one token each, the others none; `tokens` may exceed their sum.
    samples: those of each row.
    """
    return StepPlan(
        step=0,
        token_ids=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int32),
        kv_slots=np.full(tokens, -1, np.int32),
        block_tables=np.zeros((rows, 1), np.int32),
        context_lens=np.zeros(rows, np.int32),
        query_starts=np.minimum(np.arange(rows + 1, dtype=np.int32), decodes),
        slots=np.full(rows, -1, np.int32),
        samples=np.full(rows, samples, np.int32),
        num_decodes=decodes,
    )


def prompt_plan(tokens: int, rows: int) -> StepPlan:
    """Return a plan of `rows` fresh prompts with `tokens` tokens in all that are not written to the cache,
    for warm-up.
    """
    starts = np.linspace(0, tokens, rows + 1).astype(np.int32)
    lens = np.diff(starts).astype(np.int32)
    return StepPlan(
        step=0,
        token_ids=np.zeros(tokens, np.int32),
        positions=np.arange(tokens, dtype=np.int32) - np.repeat(starts[:-1], lens),
        kv_slots=np.full(tokens, -1, np.int32),
        block_tables=np.zeros((rows, 1), np.int32),
        context_lens=lens,
        query_starts=starts,
        slots=np.full(rows, -1, np.int32),
        samples=np.ones(rows, np.int32),
        num_decodes=0,
    )


class Capturer(Generic[T]):
    """Captures graphs of `run(batch)` that share one memory pool. batch: a Batch or another argument of
    `run`.

    Capture the largest graph first, so that the smaller ones fit into the pool. report: called with the name
    of each capture. synchronize: waits for the device. Use it within no_collection.
    """

    def __init__(
        self,
        run: Callable[[T], object],
        report: Callable[[str], None],
        synchronize: Callable[[], None],
    ):
        self._run, self._report, self._synchronize = run, report, synchronize
        self._pool: Any = None  # pool handle of torch

    def __call__(self, batch: T, what: str) -> torch.cuda.CUDAGraph:
        """Return a graph of `batch`. what: its name, for reports."""
        self._report(f"the capture of CUDA graph {what}")
        self._run(batch)  # a library's set-up at its first call must not happen during a capture
        self._synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._run(batch)
        self._pool = self._pool or graph.pool()
        return graph


@contextmanager
def no_collection() -> Iterator[None]:
    """Suspend garbage collection within the block: freeing an earlier engine's graph would break a
    capture.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def warm_up_plans(max_tokens: int, max_rows: int, longest: int) -> list[StepPlan]:
    """Return the largest steps: up to max_rows sequences of up to `longest` tokens, max_tokens in all.

    Positions stay below `longest`, the number of rows of position tables.
    """
    tokens = min(max_tokens, max_rows * longest)
    rows = max(min(max_rows, 8), -(-tokens // longest))
    return [prompt_plan(tokens, rows), prompt_plan(min(tokens, 16, longest), 1), decode_plan(max_rows)]


class DecodeGraphs:
    """Graphs of decode steps.

    `load(plan, rows)` copies a plan of up to `rows` decode rows to the device, always to the same addresses.
    """

    def __init__(self, sizes: list[int], load: Callable[[StepPlan, int], Batch], capture: Capturer):
        self._load = load
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._size_of = {
            rows: min(size for size in sizes if size >= rows) for rows in range(1, max(sizes) + 1)
        }
        with no_collection():
            for number, size in enumerate(sorted(sizes, reverse=True), 1):
                what = f"{number} of {len(sizes)}, of {size} rows"
                self._graphs[size] = capture(load(decode_plan(size), size), what)
        log.info("captured %d decode graphs of up to %d rows", len(sizes), max(sizes))

    def replay(self, plan: StepPlan) -> int | None:
        """Run a plan of decode rows with one token each and no slot starts.

        Returns the padded size, or None for any other plan.
        """
        if plan.num_decodes != plan.num_tokens or plan.starts or plan.num_rows not in self._size_of:
            return None
        size = self._size_of[plan.num_rows]
        self._load(plan, size)
        self._graphs[size].replay()
        return size
