"""Plans on the device: rows of several queries, sampled at several of them, and padding."""

from __future__ import annotations

import numpy as np
import torch

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.hf_models import llama
from tridecode.backend.engine.step.decode_graphs import decode_plan
from tridecode.backend.engine.step.plan import SlotStart, StepPlan
from tridecode.backend.engine.step.step_buffers import StepBuffers
from tridecode.backend.wire.messages import SamplingParams

BLOCK = 8


def plan_of(
    rows: list[tuple[int, int, list[int], int]],
    num_decodes: int,
    starts: list[SlotStart] | None = None,
    queries: int = 0,
) -> StepPlan:
    """rows: (slot, tokens in the cache, new tokens, samples). Slot s has the blocks 4 * s to 4 * s + 3."""
    positions = [np.arange(cached, cached + len(tokens)) for _, cached, tokens, _ in rows]
    places = [4 * BLOCK * slot + where for (slot, *_), where in zip(rows, positions)]
    counts = [len(tokens) for _, _, tokens, _ in rows]
    return StepPlan(
        step=1,
        token_ids=np.concatenate([tokens for _, _, tokens, _ in rows]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        kv_slots=np.concatenate(places).astype(np.int32),
        block_tables=np.array([[4 * slot + i for i in range(4)] for slot, *_ in rows], np.int32),
        context_lens=np.array([cached + len(tokens) for _, cached, tokens, _ in rows], np.int32),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        slots=np.array([slot for slot, *_ in rows], np.int32),
        samples=np.array([samples for *_, samples in rows], np.int32),
        num_decodes=num_decodes,
        queries=queries,
        starts=starts or [],
    )


def test_each_of_a_rows_last_tokens_is_sampled_in_its_slot() -> None:
    buffers = StepBuffers(32, 4, 4, torch.device("cpu"))
    rows = [(3, 5, [-1], 1), (1, 9, [4, 5, 6], 3), (0, 8, [7, 8], 1), (2, 0, [1, 2, 3], 0)]
    batch = buffers.load(plan_of(rows, num_decodes=2, queries=3))
    assert batch.sample_tokens.tolist() == [0, 1, 2, 3, 5]
    assert batch.sample_slots.tolist() == [3, 1, 1, 1, 0]
    assert (batch.num_decodes, batch.max_query, batch.max_context) == (2, 3, 12)
    assert (batch.decode_queries, batch.decode_tokens, batch.verifies) == (3, 4, True)
    assert not batch.fresh_prompts


def test_a_padded_plan_of_several_tokens_a_row_keeps_its_rows_in_front() -> None:
    buffers = StepBuffers(32, 8, 4, torch.device("cpu"))
    buffers.load(plan_of([(slot, 30, [1], 1) for slot in range(4)], num_decodes=4))  # previous contents
    plan = plan_of([(3, 5, [-1, 7], 2), (1, 9, [4], 1)], num_decodes=2, queries=2)
    plan.context_lens[0] = -1
    batch = buffers.load_rows(plan, 4, 2, 32)
    assert (batch.num_decodes, batch.decode_queries, batch.decode_tokens) == (4, 2, 8)
    assert batch.token_ids.tolist() == [-1, 7, 4, 0, 0, 0, 0, 0]
    assert batch.query_starts.tolist() == [0, 2, 3, 3, 3]
    assert batch.context_lens.tolist() == [-1, 10, 0, 0]
    assert batch.sample_slots.tolist() == [3, 3, 1, -1, -1, -1, -1, -1]
    assert batch.sample_tokens.tolist()[:3] == [0, 1, 2]
    assert batch.kv_slots.tolist()[3:] == [-1] * 5


def test_a_row_without_a_sample_has_none() -> None:
    buffers = StepBuffers(32, 4, 4, torch.device("cpu"))
    batch = buffers.load(plan_of([(3, 5, [-1], 1), (2, 0, [1, 2, 3], 0), (1, 0, [9], 1)], num_decodes=1))
    assert (batch.sample_tokens.tolist(), batch.sample_slots.tolist()) == ([0, 4], [3, 1])
    assert (batch.num_decodes, batch.max_query, batch.fresh_prompts) == (1, 3, True)


def test_padded_rows_read_and_write_nothing() -> None:
    buffers = StepBuffers(32, 4, 4, torch.device("cpu"))
    buffers.load(plan_of([(slot, 30, [1], 1) for slot in range(4)], num_decodes=4))  # previous contents
    for _ in range(StepBuffers.RING):
        batch = buffers.load_padded(decode_plan(1), 3, 32)
    assert batch.kv_slots.tolist() == batch.sample_slots.tolist() == [-1] * 3
    assert batch.context_lens.tolist() == [0] * 3 and not batch.block_tables[1:].any()
    assert batch.query_starts.tolist() == [0, 1, 1, 1]


def test_several_tokens_of_a_decoding_row_are_verified_in_one_step() -> None:
    """A row of draft tokens next to a row that decodes one: what a speculative step runs."""
    model = llama()
    one, other = prompts_of([5, 11], model.config.vocab_size)
    tokens = [hf_greedy(model, prompt, 6)[0] for prompt in (one, other)]
    engine = offline_engine(model, keep_logits=False, max_sequences=4, max_sequence_tokens=32).engine
    params = SamplingParams(max_tokens=6)
    starts = [SlotStart(i, params, np.array(p, np.int32), 0, 1.0) for i, p in enumerate((one, other))]
    prefill = plan_of([(0, 0, one, 1), (1, 0, other, 1)], num_decodes=0, starts=starts)
    assert engine.launch(prefill).wait().tokens.tolist() == [tokens[0][0], tokens[1][0]]
    wrong = (tokens[1][2] + 1) % model.config.vocab_size
    drafts = [tokens[1][0], tokens[1][1], wrong]
    plan = plan_of([(0, 5, [-1], 1), (1, 11, drafts, 3)], num_decodes=2, queries=3)
    result = engine.launch(plan).wait()
    assert result.accepted.tolist() == [1, 2]
    assert result.tokens[:3].tolist() == [tokens[0][1], tokens[1][1], tokens[1][2]]
    assert engine.state.sampling.lengths[:2].tolist() == [6, 13]
    # the device places the next rows behind what it has kept; the drafts of slot 1 are its own
    engine.state.sampling.drafts[1, :2] = torch.tensor(tokens[1][3:5])
    plan = plan_of([(0, 0, [-1], 1), (1, 0, [-1, -1, -1], 3)], num_decodes=2, queries=3)
    plan.context_lens[:], plan.positions[:], plan.kv_slots[:] = -1, 0, -1
    result = engine.launch(plan).wait()
    assert result.accepted.tolist() == [1, 3]
    assert result.tokens.tolist() == [tokens[0][2], *tokens[1][3:6]]
