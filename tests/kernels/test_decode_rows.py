"""Decode rows of several tokens: `place_rows` against plain Python, `verify` against one `sample` after
another, as steps of one token call it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.batches import make_batch
from tests.kernels.conftest import Place
from tests.kernels.sampling_states import SLOTS, cloned, random_state
from tests.kernels.test_sample import configure, make_state
from tridecode.kernels.bench.measure import capture
from tridecode.kernels.operands import Batch
from tridecode.kernels.reference import Reference
from tridecode.kernels.reference.rows import verify_rows
from tridecode.kernels.sampling_state import BROKEN_LOGITS, MOST_DRAFTS, SamplingState

# ------------------------------------------------------------ place_rows


def placed(place: Place, contexts, queries, slots, state, ids, shifts, block_tokens) -> Batch:
    """A batch whose decode rows are as a plan has them: row b is unknown where contexts[b] < 0."""
    lens = [max(context, count) for context, count in zip(contexts, queries)]
    batch = make_batch(place, lens, queries, block_tokens, decodes=len(queries))
    row = np.repeat(np.arange(len(queries)), queries)
    unknown = torch.tensor([contexts[r] < 0 for r in row])
    batch.positions = torch.where(unknown, torch.tensor([shifts[r] for r in row]), batch.positions.cpu())
    batch.positions = place.ints(batch.positions)
    batch.kv_slots = place.ints(batch.kv_slots.cpu().masked_fill(unknown, -1))
    batch.context_lens = place.ints(contexts)
    batch.token_ids = place.ints(ids)
    batch.sample_slots = place.ints([slots[r] for r in row])
    return batch


def test_a_row_is_placed_behind_what_its_slot_has(place: Place):
    block_tokens, columns = 4, 8
    queries, slots = [3, 1, 16, 2, 4], [5, 0, 2, 7, 3]
    contexts, shifts = [-1, -1, -1, 9, -1], [0, 100, 0, 0, 7]
    state = make_state(place, 8, 50)
    lengths = [13, 1, 0, 30, 2, 6, 1, 1]
    last = [100 + slot for slot in range(8)]
    drafts = [[1000 * slot + i for i in range(MOST_DRAFTS)] for slot in range(8)]
    state.lengths.copy_(place.ints(lengths))
    state.last_tokens.copy_(place.ints(last))
    state.drafts.copy_(place.ints(drafts))
    ids = torch.full((sum(queries),), -1)
    ids[1], ids[-1] = 41, 42
    batch = placed(place, contexts, queries, slots, state, ids, shifts, block_tokens)
    batch.block_tables = place.ints(torch.randperm(5 * columns, generator=place.generator).view(5, columns))
    before = batch.positions.tolist(), batch.kv_slots.tolist()
    place.settle()
    place.ops.place_rows(batch, state, block_tokens)
    tables, at = batch.block_tables.tolist(), 0
    for row, (count, slot) in enumerate(zip(queries, slots)):
        for i in range(count):
            known = int(ids[at])
            wanted = known if known >= 0 else last[slot] if i == 0 else drafts[slot][i - 1]
            assert int(batch.token_ids[at]) == wanted
            position = lengths[slot] + i
            if contexts[row] >= 0:
                assert (int(batch.positions[at]), int(batch.kv_slots[at])) == (before[0][at], before[1][at])
            else:
                assert int(batch.positions[at]) == position + shifts[row]
                column = position // block_tokens
                place_of = (
                    tables[row][column] * block_tokens + position % block_tokens if column < columns else -1
                )
                assert int(batch.kv_slots[at]) == place_of, (row, i)
            at += 1
        wanted = contexts[row] if contexts[row] >= 0 else lengths[slot] + count
        assert int(batch.context_lens[row]) == wanted
    assert (batch.kv_slots < 0).sum() == 2  # beyond the tables: 33 and 34, of a row of four from 30 on


def test_rows_without_a_slot_and_padding_stay(place: Place):
    """A beam has no slot, and the host knows its token and its length; a padded row has no tokens."""
    state = make_state(place, 4, 50)
    state.lengths.fill_(9)
    batch = placed(place, [6, -1, 0], [1, 2, 0], [-1, 1, -1], state, [17, 3, -1], [0, 0, 0], 16)
    batch.decode_queries = 2
    wanted = int(batch.positions[0]), int(batch.kv_slots[0])
    place.settle()
    place.ops.place_rows(batch, state, 16)
    assert (int(batch.positions[0]), int(batch.kv_slots[0])) == wanted
    assert batch.token_ids.tolist() == [17, 3, 0]
    assert batch.context_lens.tolist() == [6, 11, 0]


# ------------------------------------------------------------ verify


@dataclass
class Case:
    """Rows to verify, and what one token a step gives. logits: (N, V). state: before. tokens: of each row,
    those that it keeps."""

    batch: Batch
    logits: Tensor
    state: SamplingState
    tokens: list[list[int]]
    log_probs: list[list[float]]
    after: SamplingState


def make_case(
    place: Place,
    vocab: int,
    queries: list[int],
    share: float = 0.7,
    seed: int = 0,
    token_masks: bool = False,
    **always,
) -> Case:
    """share: of proposed tokens that are those of one token a step. token_masks: every second row has a mask
    behind each of its tokens. always: columns of all slots."""
    cpu, ops = torch.device("cpu"), Reference()
    random = np.random.default_rng(seed + 100 * vocab + sum(queries))
    state = random_state(cpu, vocab, SLOTS, random, **always)
    state.column("history_length")[::3] = 24  # full histories
    slots = random.permutation(SLOTS)[: len(queries)].tolist()
    contexts = [count + int(random.integers(0, 50)) for count in queries]
    batch = make_batch(place, contexts, queries, 16, decodes=len(queries))
    logits = torch.from_numpy(random.normal(size=(sum(queries), vocab)).astype(np.float32) * 4)
    own = slots[::2] if token_masks else []
    if own:
        bits = random.integers(-(2**31), 2**31, (sum(queries), state.masks.shape[1])).astype(np.int32)
        state.masks[SLOTS : SLOTS + len(bits)] = torch.from_numpy(bits)
        firsts = np.cumsum(queries) - queries
        state.column("masked")[own] = torch.from_numpy(SLOTS + firsts[::2]).int()
    after, ids, tokens, log_probs, at = cloned(state), random.integers(0, vocab, sum(queries)), [], [], 0
    after.column("masked")[own] = 1
    for context, count, slot in zip(contexts, queries, slots):
        kept: list[int] = []
        mask = after.masks[slot].clone()
        likely: list[float] = []
        for i in range(count):
            token, log_prob = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
            row = logits[at + i : at + i + 1].clone()
            if slot in own:
                after.masks[slot] = state.masks[SLOTS + at + i]
            ops.sample(row, torch.tensor([slot], dtype=torch.int32), after, tokens=token, log_probs=log_prob)
            kept.append(int(token))
            likely.append(float(log_prob))
            if i + 1 == count:
                break
            if random.random() < share:
                ids[at + i + 1] = int(token)
            if ids[at + i + 1] != int(token):
                break
        after.masks[slot] = mask
        after.lengths[slot] = context - count + len(kept)
        tokens.append(kept)
        log_probs.append(likely)
        at += count
    batch.token_ids = place.ints(ids)
    batch.sample_slots = place.ints(np.repeat(slots, queries))
    return Case(batch, logits, state, tokens, log_probs, after)


def on(device: torch.device, state: SamplingState) -> SamplingState:
    return SamplingState(*(tensor.clone().to(device) for tensor in state.tensors()))


def check(place: Place, case: Case, verify) -> None:
    state = on(place.device, case.state)
    rows, count = case.batch.num_decodes, case.batch.decode_tokens
    tokens, accepted = place.ints([-7] * count), place.ints([-7] * rows)
    log_probs = torch.full((count,), -7.0, device=place.device)
    place.settle()
    results = {"tokens": tokens, "log_probs": log_probs, "accepted": accepted}
    verify(case.logits.to(place.device).clone(), case.batch, state, **results)
    check_results(case, state, tokens, log_probs, accepted)


def check_results(
    case: Case, state: SamplingState, tokens: Tensor, log_probs: Tensor, accepted: Tensor
) -> None:
    assert accepted.tolist() == [len(kept) for kept in case.tokens]
    starts = case.batch.query_starts.tolist()
    for start, kept, likely in zip(starts, case.tokens, case.log_probs):
        assert tokens[start : start + len(kept)].tolist() == kept
        assert log_probs[start : start + len(kept)].tolist() == pytest.approx(likely, abs=2e-4)
    for name in (
        "slots",
        "last_tokens",
        "lengths",
        "drafts",
        "history",
        "counts",
        "bad_ids",
        "bad_ends",
        "masks",
        "biases",
    ):
        found, wanted = getattr(state, name).cpu(), getattr(case.after, name)
        assert torch.equal(found, wanted), (name, (found != wanted).nonzero()[:5].tolist())


QUERIES = {
    "one": [1],
    "two": [2],
    "sixteen": [16],
    "several": [3, 1, 16, 5, 8, 2],
    "many": [1 + i % 6 for i in range(60)],
}


@pytest.mark.parametrize("queries", QUERIES.values(), ids=QUERIES)
@pytest.mark.parametrize("vocab", [7, 1000, 32003])
def test_rows_keep_what_one_token_a_step_gives(place: Place, vocab: int, queries: list[int]):
    """All parameters, mixed from slot to slot."""
    for seed in range(2):
        case = make_case(place, vocab, queries, seed=seed)
        check(place, case, place.ops.verify)


@pytest.mark.parametrize(
    "always",
    [
        {"top_k": 1, "repetition_penalty": 1.4, "frequency_penalty": -0.5},
        {"top_p": 0.9, "top_p_decay": 0.8, "top_k": 0, "temperature": 1.0, "min_p": 0.0},
        {"min_tokens": 7, "temperature": 1.3, "top_k": 40},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0},
        {"num_bad_words": 3, "top_k": 1},
        {"no_repeat_ngram_size": 2, "top_k": 1},
        {"typical_p": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0},
    ],
    ids=["penalties", "decay", "min_tokens", "whole vocabulary", "bad words", "n-grams", "typical"],
)
def test_each_rule_counts_the_tokens_before_it_in_the_row(place: Place, always: dict):
    """A vocabulary of few ids, so that tokens of a row repeat and match bad words."""
    for seed in range(4):
        check(place, make_case(place, 12, [6, 2, 16, 9, 4], 0.95, seed, **always), place.ops.verify)


@pytest.mark.parametrize("vocab", [33, 1000, 32003])
def test_each_token_of_a_row_may_have_a_mask_of_its_own(place: Place, vocab: int):
    for seed in range(4):
        check(place, make_case(place, vocab, [6, 2, 9, 1, 4], 0.9, seed, True), place.ops.verify)


def test_the_first_of_equal_logits_is_kept_while_it_is_proposed(place: Place):
    """Greedy rows by numpy alone."""
    state = make_state(place, 4, 100)
    for slot in range(4):
        configure(state, slot, top_k=1, generated=3)
    batch = make_batch(place, [9, 20, 5], [4, 4, 4], 16, decodes=3)
    logits = torch.randn(12, 100, generator=place.generator)
    best = logits.numpy().argmax(1)
    ids = np.full(12, 99 - best[0])
    ids[1], ids[2] = best[0], (best[1] + 1) % 100  # row 0 keeps 2
    ids[5:8] = best[4:7]  # row 1 keeps all
    ids[9] = (best[8] + 1) % 100  # row 2 keeps 1
    batch.token_ids, batch.sample_slots = place.ints(ids), place.ints(np.repeat([2, 0, 3], 4))
    tokens, accepted = place.ints([-7] * 12), place.ints([-7] * 3)
    log_probs = torch.zeros(12, device=place.device)
    place.settle()
    results = {"tokens": tokens, "log_probs": log_probs, "accepted": accepted}
    place.ops.verify(logits.to(place.device), batch, state, **results)
    assert accepted.tolist() == [2, 4, 1]
    assert tokens[:2].tolist() == best[:2].tolist() and tokens[4:9].tolist() == best[4:9].tolist()
    assert state.lengths.tolist() == [20, 0, 7, 2]
    assert state.column("generated").tolist() == [7, 3, 5, 4]
    assert state.last_tokens.tolist() == [best[7], 0, best[1], best[8]]


def test_a_row_ends_at_logits_that_are_not_numbers(place: Place):
    state = make_state(place, 2, 40)
    for slot in range(2):
        configure(state, slot, top_k=1)
    batch = make_batch(place, [8, 8], [3, 3], 16, decodes=2)
    logits = torch.randn(6, 40, generator=place.generator)
    logits[1, 5] = torch.nan
    best = logits.argmax(1)
    ids = torch.zeros(6, dtype=torch.int64)
    ids[1], ids[2], ids[4], ids[5] = best[0], 0, best[3], best[4]
    batch.token_ids, batch.sample_slots = place.ints(ids), place.ints([0, 0, 0, 1, 1, 1])
    tokens, accepted = place.ints([-7] * 6), place.ints([-7] * 2)
    place.settle()
    place.ops.verify(
        logits.to(place.device), batch, state, tokens=tokens, log_probs=torch.zeros(6, device=place.device),
        accepted=accepted,
    )  # fmt: skip
    assert accepted.tolist() == [2, 3]
    assert tokens[:2].tolist() == [int(best[0]), BROKEN_LOGITS]


def test_padding_and_rows_without_a_slot_keep_nothing(place: Place):
    case = make_case(place, 50, [3, 4, 2])
    batch, state = case.batch, on(place.device, case.state)
    batch.sample_slots[3:7] = -1  # the second row
    starts = [*batch.query_starts.tolist(), 9, 9]
    batch = replace(
        batch,
        query_starts=place.ints(starts),
        context_lens=place.ints([*batch.context_lens.tolist(), 0, 0]),
        token_ids=torch.cat([batch.token_ids, place.ints([0] * 3)]),
        sample_slots=torch.cat([batch.sample_slots, place.ints([-1] * 3)]),
        block_tables=torch.cat([batch.block_tables, batch.block_tables[:2]]),
        num_decodes=5,
        decode_tokens=12,
        memo={},
    )
    tokens, accepted = place.ints([-7] * 12), place.ints([-7] * 5)
    logits = torch.cat([case.logits, torch.zeros(3, 50)]).to(place.device)
    place.settle()
    results = {"tokens": tokens, "log_probs": torch.zeros(12, device=place.device), "accepted": accepted}
    place.ops.verify(logits, batch, state, **results)
    assert accepted.tolist() == [len(case.tokens[0]), 0, len(case.tokens[2]), 0, 0]
    slot = case.batch.sample_slots.tolist()
    kept = [slot[0], slot[7]]
    assert torch.equal(state.slots[kept].cpu(), case.after.slots[kept])
    others = [i for i in range(SLOTS) if i not in kept]
    assert torch.equal(state.slots[others].cpu(), case.state.slots[others])
    assert torch.equal(state.lengths[others].cpu(), case.state.lengths[others])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1000, 128256])
def test_one_launch_after_another_verifies_the_same(cuda_place: Place, vocab: int):
    """verify_rows, which also samples a vocabulary that ranks share, over the kernel of `sample`."""
    case = make_case(cuda_place, vocab, [4, 1, 7], token_masks=True)

    def verify(logits: Tensor, batch: Batch, state: SamplingState, **results: Tensor) -> None:
        verify_rows(cuda_place.ops.sample, logits, batch, state, **results)

    check(cuda_place, case, verify)


@pytest.mark.gpu
def test_a_graph_places_verifies_and_goes_on(cuda_place: Place):
    """One graph of 4 rows of up to 5 tokens: each replay continues from the lengths of the one before."""
    place, rows, most, vocab, block_tokens = cuda_place, 4, 5, 500, 16
    state = make_state(place, 8, vocab)
    for slot in range(8):
        configure(state, slot, top_k=1)
    batch = make_batch(place, [200] * rows, [most] * rows, block_tokens, decodes=rows)
    count = rows * most
    logits = torch.zeros(count, vocab, device=place.device)
    tokens, accepted = place.ints([0] * count), place.ints([0] * rows)
    results = {"tokens": tokens, "log_probs": torch.zeros(count, device=place.device), "accepted": accepted}

    def step() -> None:
        place.ops.place_rows(batch, state, block_tokens)
        place.ops.verify(logits, batch, state, **results)

    batch.sample_slots = place.ints([-1] * count)
    graph = capture(step)
    lengths, last = [3, 0, 30, 64, 17, 5, 9, 1], [9] * 8
    state.lengths.copy_(place.ints(lengths))
    state.last_tokens.copy_(place.ints(last))
    random = np.random.default_rng(3)
    for _ in range(6):
        queries = random.integers(1, most + 1, rows)
        slots = random.permutation(8)[:rows]
        best = random.integers(0, vocab, count)
        drafts = random.integers(0, vocab, (8, MOST_DRAFTS))
        starts = np.concatenate([[0], np.cumsum(queries)])
        wanted = random.integers(1, queries + 1)
        for row, slot in enumerate(slots):
            drafts[slot, : wanted[row] - 1] = best[starts[row] : starts[row] + wanted[row] - 1]
            drafts[slot, wanted[row] - 1] = (best[starts[row] + wanted[row] - 1] + 1) % vocab
        state.drafts.copy_(place.ints(drafts))
        batch.token_ids.fill_(-1)
        batch.positions.fill_(0)
        batch.context_lens.fill_(-1)
        batch.query_starts.copy_(place.ints(starts))
        padded = np.full(count, -1)
        padded[: starts[-1]] = np.repeat(slots, queries)
        batch.sample_slots.copy_(place.ints(padded))
        logits.zero_()
        logits[torch.arange(count), torch.from_numpy(best)] = 5.0
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert accepted.tolist() == wanted.tolist()
        tables = batch.block_tables.tolist()
        for row, slot in enumerate(slots):
            for i in range(queries[row]):
                at, position = starts[row] + i, lengths[slot] + i
                assert int(batch.positions[at]) == position
                block = tables[row][position // block_tokens]
                assert int(batch.kv_slots[at]) == block * block_tokens + position % block_tokens
            assert int(batch.token_ids[starts[row]]) == last[slot]
            lengths[slot] += int(wanted[row])
            last[slot] = int(best[starts[row] + wanted[row] - 1])
        assert state.lengths.tolist() == lengths
        assert state.last_tokens.tolist() == last
