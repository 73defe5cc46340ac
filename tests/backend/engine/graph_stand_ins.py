"""Stand-ins of CUDA graphs on a CPU: a replay runs the step operation by operation, with the padding and the
operations that a capture would have recorded. Which steps are replayed is decided as on a GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.parts.table import RUNS
from tridecode.backend.engine.step.decode_graphs import DecodeGraphs
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.prefill_graphs import PromptGraphs
from tridecode.backend.engine.step.step_buffers import StepShape
from tridecode.kernels.operands import Batch


def add_graphs(engine: Engine, slots: int, shapes: list[StepShape] | None = None) -> None:
    """Give the engine a stand-in of a graph for each number of rows, without and with adapters, and for each
    of the shapes of steps with prompts."""
    loaded: list[Batch] = []

    def load(plan: StepPlan, rows: int) -> Batch:
        loaded[:] = [engine.buffers.load(plan)]
        return loaded[0]

    def load_mixed(plan: StepPlan, shape: StepShape) -> Batch:
        assert engine.config.max_sequence_tokens is not None
        loaded[:] = [engine.buffers.load_mixed(plan, shape, engine.config.max_sequence_tokens)]
        return loaded[0]

    def capture(make_ops, batch: Batch, what: str) -> SimpleNamespace:
        def replay() -> None:
            engine.run(loaded[0], ops=None if make_ops is None else make_ops(loaded[0]))

        return SimpleNamespace(replay=replay)

    sizes = list(range(1, slots + 1))
    engine.graphs = DecodeGraphs(sizes, load, partial(capture, None))
    for part, run in RUNS.items():
        for form, make_ops in run.graph_ops(engine.state).items():
            engine.part_graphs[part, form] = DecodeGraphs(sizes, load, partial(capture, make_ops))
    if shapes is not None:
        most = max(shape.tokens for shape in shapes)
        engine.prompt_graphs = PromptGraphs(shapes, load_mixed, partial(capture, None), most)
        for part, run in RUNS.items():
            for form, make_ops in run.graph_ops(engine.state).items():
                if form in run.prompt_forms:
                    captured = PromptGraphs(shapes, load_mixed, partial(capture, make_ops), most)
                    engine.part_prompt_graphs[part, form] = captured
