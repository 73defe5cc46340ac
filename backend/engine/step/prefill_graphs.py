"""Small prefill steps as CUDA graphs.

Launching the operations of a step one by one takes the host longer than the GPU needs for them if prompts are
short, weights have 8 bits or the model is small. Such a step is padded to one of a few shapes and runs as a
graph, as decode steps do (decode_graphs.py).
"""

from __future__ import annotations

import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import product

import numpy as np
import torch

from tridecode.backend.engine.step import decode_graphs as graphs
from tridecode.backend.engine.step.decode_graphs import Capturer, no_collection
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.step_buffers import StepShape
from tridecode.kernels.operands import FEW_EXACT_TOKENS, Batch

log = logging.getLogger("tridecode.engine")

#: Padded numbers of prefill tokens. GEMMs run in tiles of 64 or 128 tokens, so padding costs the GPU little.
TOKENS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
#: padded numbers of decode rows in the same step
DECODES = (0, 4, 16, 32, 64)
#: Maximum prompts of a step of up to SHORT tokens, and of a longer step. Attention visits each padded row
#: once per 128 tokens (0.2 ms per step of 512 tokens and 16 rows of LLaMA-3-8B).
PROMPTS, SHORT, FEW_PROMPTS = 16, FEW_EXACT_TOKENS, 4


#: Limit of weights times tokens of a step: beyond it the GPU takes longer than the host needs to launch the
#: step, and padding costs time. One prompt of LLaMA-3-8B, 7.0e9 weights, graph / launched, ms, in bf16: 256
#: tokens: 8.0 / 8.2, 512: 14.4 / 13.7; in W8A8: 256: 5.6 / 7.1, 512: 8.8 / 8.6, 1000: 15.4 / 14.2.
#: SmolLM2-135M, 1.06e8 weights, 1000 tokens: 2.2 / 8.5
MOST_WORK = 2.7e12


def tokens_of_graphs(weights: int, max_tokens: int) -> int:
    """Return the largest number of tokens of a step that runs as a graph.

    weights: number of weights in the layers' GEMMs, on this rank.
    """
    return min(max_tokens, int(MOST_WORK / max(weights, 1)))


def step_shapes(max_rows: int, max_tokens: int) -> list[StepShape]:
    """Return the padded shapes of an engine with max_rows slots and steps of up to max_tokens."""
    return [
        StepShape(decodes, tokens, min(PROMPTS if tokens <= SHORT else FEW_PROMPTS, max_rows - decodes))
        for decodes, tokens in product(DECODES, TOKENS)
        if decodes < max_rows and decodes + tokens <= max_tokens
    ]


def empty_plan(shape: StepShape) -> StepPlan:
    """Return a plan of `shape` that reads and writes nothing, to capture a graph from."""
    tokens, rows = shape.decodes + shape.tokens, shape.decodes + shape.rows
    return graphs.empty_plan(shape.decodes, tokens, rows, samples=0)


class StepShapes:
    """Finds the shape of a plan. most_cached: maximum prompt tokens of a shape for prompts with cached
    tokens; 0: such plans have no shape."""

    def __init__(self, shapes: list[StepShape], most_cached: int = sys.maxsize):
        self._most_cached = most_cached
        self._decodes = sorted({shape.decodes for shape in shapes})
        self._tokens = sorted({shape.tokens for shape in shapes})
        self._shapes = {(shape.decodes, shape.tokens): shape for shape in shapes}

    def of(self, plan: StepPlan) -> StepShape | None:
        """Return the smallest shape that the plan can be padded to, or None."""
        decodes, rows = plan.num_decodes, plan.num_rows
        if decodes == rows or plan.query_starts[decodes] != decodes or plan.samples.max() > 1:
            return None
        key = _least(self._decodes, decodes), _least(self._tokens, plan.num_tokens - decodes)
        shape = self._shapes.get(key)
        if shape is None or rows - decodes > shape.rows or not plan.samples[:decodes].all():
            return None
        if (
            shape.tokens > self._most_cached
            and (plan.context_lens[decodes:] != np.diff(plan.query_starts[decodes:])).any()
        ):
            return None
        return shape


class PromptGraphs:
    """Graphs of small prefill steps, one for each shape.

    load(plan, shape): copies a plan to the device, padded to a shape, always to the same addresses. capture:
    the Capturer of DecodeGraphs. most_cached: see StepShapes.
    """

    def __init__(
        self,
        shapes: list[StepShape],
        load: Callable[[StepPlan, StepShape], Batch],
        capture: Capturer,
        most_cached: int,
    ):
        self._load, self.shapes = load, StepShapes(shapes, most_cached)
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self.replayed = 0
        started = time.monotonic()
        with no_collection():
            largest_first = sorted(shapes, key=lambda shape: shape.decodes + shape.tokens, reverse=True)
            for number, shape in enumerate(largest_first, 1):
                what = f"{number} of {len(shapes)} with prompts, {shape.decodes} + {shape.tokens} tokens"
                self._graphs[shape] = capture(load(empty_plan(shape), shape), what)
        log.info("captured %d prefill graphs, %.1f s", len(shapes), time.monotonic() - started)

    def replay(self, plan: StepPlan, shape: StepShape) -> Batch:
        """Run a plan of this shape and return its batch on the device. The slots of starting sequences must
        already be initialised."""
        batch = self._load(plan, shape)
        self._graphs[shape].replay()
        self.replayed += 1
        return batch


def _least(sizes: list[int], wanted: int) -> int:
    """Return the first of the ascending sizes that is at least `wanted`, or -1."""
    place = bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else -1
