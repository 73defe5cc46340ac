"""Steps with prompts, padded to the shape of a graph: the shapes, and that padding changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.engine.test_step_buffers import plan_of
from tests.backend.hf_models import bloom, gpt2, llama
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.prefill_graphs import (
    PROMPTS,
    StepShapes,
    empty_plan,
    step_shapes,
    tokens_of_graphs,
)
from tridecode.backend.engine.step.step_buffers import StepBuffers, StepShape
from tridecode.backend.wire.messages import SamplingParams
from tridecode.kernels.operands import Batch

SHAPES = [StepShape(decodes, tokens, 4) for decodes in (0, 2, 4) for tokens in (4, 8, 16)]


def decode(slot: int, cached: int = 5) -> tuple[int, int, list[int], int]:
    return slot, cached, [-1], 1


def prompt(slot: int, tokens: int, cached: int = 0, samples: int = 1) -> tuple[int, int, list[int], int]:
    return slot, cached, list(range(1, tokens + 1)), samples


@pytest.mark.parametrize("slots", [1, 2, 16, 300])
@pytest.mark.parametrize("max_tokens", [1, 16, 100, 8192])
def test_shapes_stay_within_the_limits_of_the_engine(slots: int, max_tokens: int) -> None:
    for shape in step_shapes(slots, max_tokens):
        assert shape.decodes + shape.tokens <= max_tokens
        assert 1 <= shape.rows <= PROMPTS and shape.decodes + shape.rows <= slots
        plan = empty_plan(shape)
        assert plan.num_tokens == shape.decodes + shape.tokens and plan.num_samples == 0
        assert (plan.kv_slots == -1).all() and plan.num_rows == shape.decodes + shape.rows


def test_large_models_have_graphs_of_fewer_tokens() -> None:
    assert tokens_of_graphs(106_000_000, 8192) == 8192
    assert 256 < tokens_of_graphs(6_980_000_000, 8192) < 512
    assert step_shapes(8, tokens_of_graphs(10**12, 8192)) == []


@pytest.mark.parametrize(
    "rows, decodes, wanted",
    [
        ([prompt(0, 4)], 0, (0, 4)),
        ([prompt(0, 5)], 0, (0, 8)),
        ([decode(1), prompt(0, 3), prompt(2, 3)], 1, (2, 8)),
        ([decode(1), decode(3), decode(4), prompt(0, 16, samples=0)], 3, (4, 16)),
        ([decode(1), decode(2)], 2, None),
        ([prompt(0, 17)], 0, None),
        ([decode(slot) for slot in range(5)] + [prompt(6, 2)], 5, None),
        ([prompt(slot, 1) for slot in range(5)], 0, None),
        ([(0, 5, [3, 4], 2), prompt(1, 3)], 1, None),
        ([prompt(0, 4, cached=8)], 0, (0, 4)),
    ],
)
def test_a_plan_gets_the_smallest_shape_that_holds_it(rows, decodes: int, wanted) -> None:
    found = StepShapes(SHAPES).of(plan_of(rows, decodes))
    assert (found and (found.decodes, found.tokens)) == wanted


@pytest.mark.parametrize("most_cached", [0, 4, 8])
def test_prompts_with_cached_tokens_have_shapes_up_to_a_size(most_cached: int) -> None:
    shapes = StepShapes(SHAPES, most_cached)
    assert shapes.of(plan_of([decode(1), prompt(0, 16)], 1)) == StepShape(2, 16, 4)
    for tokens in (4, 8, 16):
        found = shapes.of(plan_of([decode(1), prompt(0, tokens - 2), prompt(2, 2, cached=8)], 1))
        assert found == (StepShape(2, tokens, 4) if tokens <= most_cached else None)


def test_padding_lies_behind_decoding_rows_and_behind_prompts() -> None:
    buffers = StepBuffers(32, 8, 4, torch.device("cpu"))
    plan = plan_of([decode(3, cached=6), prompt(1, 3), prompt(0, 2, samples=0)], 1)
    batch = buffers.load_mixed(plan, StepShape(2, 8, 4), 32)
    assert batch.token_ids.tolist() == [-1, 0, 1, 2, 3, 1, 2, 0, 0, 0]
    assert (batch.kv_slots[1], batch.kv_slots[7:].tolist()) == (-1, [-1] * 3)
    assert batch.query_starts.tolist() == [0, 1, 2, 5, 7, 7, 7]
    assert batch.context_lens.tolist() == [7, 0, 3, 2, 0, 0]
    assert batch.sample_slots.tolist() == [3, 1, -1, -1, -1, -1]
    assert batch.sample_tokens.tolist()[:2] == [0, 4]
    assert (batch.num_decodes, batch.max_query) == (2, 8)


@pytest.mark.parametrize("make", [bloom, gpt2, llama])
def test_padded_steps_give_the_tokens_of_transformers(make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    offline = offline_engine(model, keep_logits=False, max_sequences=4, max_sequence_tokens=64)
    sizes = [StepShape(decodes, tokens, 4 - decodes) for decodes in (0, 2, 3) for tokens in (4, 8, 13)]
    engine, shapes, used = offline.engine, StepShapes(sizes), []
    load = engine.buffers.load

    def padded(plan: StepPlan) -> Batch:
        shape = shapes.of(plan)
        if shape is None:
            return load(plan)
        used.append(shape)
        return engine.buffers.load_mixed(plan, shape, 64)

    monkeypatch.setattr(engine.buffers, "load", padded)
    prompts = prompts_of([5, 1, 11, 7, 9, 3], model.config.vocab_size)
    answers = offline.generate(prompts, SamplingParams(max_tokens=6))
    assert [answer.tokens for answer in answers] == [hf_greedy(model, one, 6)[0] for one in prompts]
    assert any(shape.decodes for shape in used) and len(set(used)) > 1
    assert np.isfinite(engine.state.work.hidden.float().numpy()).all()
