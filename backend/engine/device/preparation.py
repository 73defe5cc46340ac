"""Builds an engine and prepares it for its first step: warm-up, allocation of the cache, CUDA graphs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial

import torch

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.cache_size import choose_num_blocks
from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.measured_costs import measured_costs
from tridecode.backend.engine.device.parts.background_run import OpenWeights
from tridecode.backend.engine.device.parts.table import RUNS
from tridecode.backend.engine.host_tier.store import HostStore
from tridecode.backend.engine.ranks.parallel import Ranks
from tridecode.backend.engine.step.decode_graphs import (
    Capturer,
    DecodeGraphs,
    coarse_sizes,
    padded_sizes,
    warm_up_plans,
)
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.prefill_graphs import PromptGraphs, step_shapes, tokens_of_graphs
from tridecode.backend.engine.step.query_graphs import QueryGraphs, query_shapes
from tridecode.backend.engine.step.step_buffers import StepShape
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.draft_files import TrainedDraft
from tridecode.kernels.operands import Batch
from tridecode.kernels.ops import Ops

log = logging.getLogger("tridecode.engine")

Progress = Callable[[str], None]
OpenHost = Callable[[DeviceState], HostStore | None]


def build_engine(
    model: ModelConfig,
    config: EngineConfig,
    weights: Weights,
    ops: Ops,
    ranks: Ranks,
    device: torch.device,
    open_weights: OpenWeights | None = None,
    phase: Progress = lambda what: None,
    open_host: OpenHost | None = None,
    draft: tuple[ModelConfig, Weights] | None = None,
    trained: TrainedDraft | None = None,
) -> Engine:
    """Return an engine that is ready for its first step. Collective.

    config: resolved. draft, trained: the draft model or the trained drafter, if any. open_weights:
    see Engine. phase: called with the name of each phase as it begins. open_host: opens this rank's part of
    the host tier, if the memory is available; None: no host tier.
    """
    state = DeviceState(model, config, weights, ops, ranks, device, draft, trained)
    engine = Engine(state, open_weights)
    state.trained = None  # the drafter has its tensors, packed
    prepare(engine, phase, open_host)
    return engine


def prepare(engine: Engine, phase: Progress, open_host: OpenHost | None = None) -> None:
    """Run the phases between loading and the first step, which all ranks begin together: the wait for the
    others at each has a limit and a diagnosis, which the exchanges within have not. open_host: see
    build_engine."""
    state, ranks = engine.state, engine.ranks

    def begin(what: str) -> None:
        ranks.barrier(f"the start of {what}")
        phase(what)

    if engine.is_asynchronous:
        begin("the warm-up")
        _warm_up(engine, phase)
    begin("the allocation of the cache")
    if open_host is not None:
        state.host = open_host(state)
    state.num_blocks = ranks.smallest(choose_num_blocks(engine.config, state.block_bytes(), engine.device))
    state.caches = state.allocate_cache(state.num_blocks)
    if state.host is not None:
        state.host.use(state.caches)
    if can_capture(engine):
        begin("the capture of CUDA graphs")
        _capture(engine, phase)
    if engine.config.speculation != "off":
        begin("the measurement of steps with drafts")
        queries = engine.most_drafts + 1
        if engine.graphs is not None:
            capture_query_graphs(engine, queries, phase)
            if engine.drafter is not None:
                engine.drafter.prepare(phase)
        engine.step_costs = measured_costs(engine, queries)
    ranks.barrier("the end of the start")


def _warm_up(engine: Engine, phase: Progress) -> None:
    """Run the largest steps, so that libraries allocate their buffers before the cache takes the rest of the
    memory."""
    state, ranks, longest = engine.state, engine.ranks, engine.config.max_sequence_tokens
    assert longest is not None
    state.caches = state.allocate_cache(1)
    plans = warm_up_plans(state.work.hidden.shape[0], engine.config.slots, longest)
    for number, plan in enumerate(plans, 1):
        phase(f"the warm-up, step {number} of {len(plans)}")
        x = state.work.hidden[: plan.num_tokens]
        ranks.receive(x)
        engine.run(engine.buffers.load(plan))
        ranks.send(x)
    for run in engine.background:
        run.warm_up()
    ranks.barrier("the end of the warm-up")  # all have launched it
    engine.synchronize()
    ranks.raise_if_lost()


def can_capture(engine: Engine) -> bool:
    """Return whether steps may run as CUDA graphs; logs why not."""
    state, ranks = engine.state, engine.ranks
    if not engine.is_asynchronous or not engine.config.cuda_graphs:
        return False
    if ranks.num_stages > 1 and not ranks.is_pipelined:
        log.info("no CUDA graphs: padded rows would write tokens on pipeline stages that do not sample")
        return False
    decoders = [state.work] if state.draft is None else [state.work, state.draft.work]
    if not all(ranks.captures(work.hidden[: engine.config.slots]) for work in decoders):
        log.info("no CUDA graphs: the sums over the tensor ranks go through host memory")
        return False
    if all(state.ops.captures(heads) for heads in state.model.heads):
        return True
    log.info("no CUDA graphs: these operations read lengths on the host")
    return False


def capture_query_graphs(engine: Engine, most_queries: int, phase: Progress = lambda what: None) -> None:
    """Capture graphs of steps that verify rows of up to most_queries tokens, for an engine with a drafter.
    Does nothing where steps do not run as graphs."""
    if engine.graphs is None:
        return
    longest = engine.config.max_sequence_tokens
    assert longest is not None

    def load(plan: StepPlan, rows: int, queries: int) -> Batch:
        return engine.buffers.load_rows(plan, rows, queries, longest)

    capture = Capturer(engine.run, phase, engine.synchronize)
    shapes = [
        shape
        for shape in query_shapes(engine.config.slots, most_queries)
        if engine.ranks.captures(engine.state.work.hidden[: shape[0] * shape[1]])
    ]
    engine.query_graphs = QueryGraphs(shapes, load, capture)


def _run_with(engine: Engine, make_ops: Callable[[Batch], Ops], batch: Batch) -> None:
    engine.run(batch, ops=make_ops(batch))


def _capture(engine: Engine, phase: Progress) -> None:
    """Capture graphs of decode steps for every padded number of rows, and of small steps with prompts."""
    state, ranks, config = engine.state, engine.ranks, engine.config
    buffers, longest, dtype = engine.buffers, config.max_sequence_tokens, state.work.hidden.dtype
    assert longest is not None and config.max_step_tokens is not None

    def load(plan: StepPlan, rows: int) -> Batch:
        return buffers.load_padded(plan, rows, longest)

    caches = zip(state.model.heads, state.caches)
    most_cached = min((state.ops.captured_tokens(heads, cache, dtype) for heads, cache in caches), default=0)

    def load_mixed(plan: StepPlan, shape: StepShape) -> Batch:
        return buffers.load_mixed(plan, shape, longest, fresh=shape.tokens > most_cached)

    capture = Capturer(engine.run, phase, engine.synchronize)
    engine.graphs = DecodeGraphs(padded_sizes(config.slots), load, capture)
    captures = {}
    for part, run in RUNS.items():
        for form, make_ops in run.graph_ops(state).items():
            capture_part = Capturer(partial(_run_with, engine, make_ops), phase, engine.synchronize)
            engine.part_graphs[part, form] = DecodeGraphs(coarse_sizes(config.slots), load, capture_part)
            if form in run.prompt_forms:
                captures[part, form] = capture_part
    if ranks.num_stages > 1:  # a stage receives the rows of the plan, without padding between them
        return
    products = [(layer.qkv, layer.dense, layer.up, layer.down) for layer in state.model.layers]
    weights = sum(math.prod(one.weight.shape) for layer in products for one in layer)
    shapes = [
        shape
        for shape in step_shapes(config.slots, tokens_of_graphs(weights, config.max_step_tokens))
        if ranks.captures(state.work.hidden[: shape.decodes + shape.tokens])
    ]
    engine.prompt_graphs = PromptGraphs(shapes, load_mixed, capture, most_cached)
    for key, capture_part in captures.items():
        engine.part_prompt_graphs[key] = PromptGraphs(shapes, load_mixed, capture_part, most_cached)
