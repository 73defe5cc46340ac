"""Sampling over logits that several ranks share: the tokens, log probabilities and state of Reference.sample
on the whole logits. The ranks are threads; TRIDECODE_TEST_DEVICE=cuda runs them on one GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.backend.engine.offline_models import DEVICE
from tests.backend.engine.thread_ranks import Meeting, ThreadRanks
from tests.kernels.sampling_states import SLOTS, cloned, cut, random_state
from tridecode.backend.engine.ranks import vocab_draw, vocab_logits
from tridecode.backend.engine.ranks.vocab_draw import threshold, uniforms
from tridecode.backend.engine.ranks.vocab_sampler import sample
from tridecode.backend.engine.ranks.vocab_share import mask_padding, values_at, whole_rows
from tridecode.backend.weights.layout import VocabShare
from tridecode.kernels import philox
from tridecode.kernels.reference import Reference
from tridecode.kernels.sampling_state import NO_TOKEN, SamplingState, SlotRows
from tridecode.kernels.top_log_probs import best_tokens, raw_log_probs

PLACE = torch.device(DEVICE)


def on_ranks(world: int, work: Callable[[int, ThreadRanks], Any]) -> list[Any]:
    """What `work` returns on each of `world` tensor ranks."""
    meeting, found, errors = Meeting(world, 1), [None] * world, []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank, ThreadRanks(meeting, rank))
        except BaseException as error:
            errors.append(error)
            for barrier in meeting.barriers.values():
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return found


def compare(logits: Tensor, slots: list[int], state: SamplingState, world: int) -> list[int]:
    """Sample on `world` ranks and with Reference; the tokens."""
    vocab, place = logits.shape[1], logits.device
    wanted_state, slot_ids = cloned(state), torch.tensor(slots, dtype=torch.int32, device=place)
    wanted = torch.full((len(slots),), -7, dtype=torch.int32, device=place)
    wanted_probs = torch.zeros(len(slots), device=place)
    Reference().sample(logits.clone(), slot_ids, wanted_state, tokens=wanted, log_probs=wanted_probs)

    def work(rank: int, ranks: ThreadRanks) -> tuple[Tensor, Tensor, SamplingState]:
        share = VocabShare(vocab, rank, world)
        mine, own = mask_padding(cut(logits, share), share), cloned(state, share)
        tokens, log_probs = torch.full_like(wanted, -7), torch.full_like(wanted_probs, 3.0)
        untouched = mine[slot_ids < 0].clone()
        sample(mine, slot_ids, own, share, ranks, tokens=tokens, log_probs=log_probs)
        assert torch.equal(mine[slot_ids < 0], untouched)  # candidates of beams read them afterwards
        return tokens, log_probs, own

    done = on_ranks(world, work)
    for rank, (tokens, log_probs, own) in enumerate(done):
        share = VocabShare(vocab, rank, world)
        assert tokens.tolist() == wanted.tolist()
        sampled = slot_ids >= 0
        torch.testing.assert_close(log_probs[sampled], wanted_probs[sampled], atol=1e-5, rtol=0)
        assert (log_probs[~sampled] == 3.0).all()  # separately sampled rows keep their values
        for name in ("slots", "last_tokens", "history"):
            assert torch.equal(getattr(own, name), getattr(wanted_state, name)), name
        assert torch.equal(own.counts, cut(wanted_state.counts, share, 0))
    return wanted.tolist()


@pytest.mark.parametrize(("vocab", "world"), [(1000, 2), (1003, 4), (50257, 2), (9, 2), (10, 4)])
def test_all_settings_give_the_tokens_of_the_whole_logits(vocab: int, world: int) -> None:
    """Vocabularies of 9 and 10 leave ranks without ids: a share is a multiple of 8."""
    random = np.random.default_rng(vocab)
    rounds, rows = (2, 12) if vocab > 10_000 else (6, 48)
    for scale in np.linspace(0.5, 6.0, rounds):
        state = random_state(PLACE, vocab, SLOTS, random)
        logits = torch.from_numpy(random.normal(0, scale, (rows, vocab)).astype(np.float32)).to(DEVICE)
        slots = random.permutation(SLOTS)[:rows]
        slots[random.random(rows) < 0.1] = -1
        compare(logits, slots.tolist(), state, world)


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"temperature": 0.0}, {}])
def test_equal_logits_across_ranks(settings: dict) -> None:
    """Greedy takes the lowest id of all ranks; top-k and top-p keep all ids that equal the last one."""
    random = np.random.default_rng(3)
    state = random_state(PLACE, 40, SLOTS, random, **settings)
    logits = torch.from_numpy(random.integers(-2, 3, (SLOTS, 40)).astype(np.float32)).to(DEVICE)
    logits[:, 5] = logits[:, 30] = 4.0
    logits[1], logits[2], logits[3] = (
        0.0,
        -3.0,
        torch.where(torch.arange(40, device=DEVICE) % 2 == 0, -0.0, 0.0),
    )
    for world in (2, 4):
        compare(logits, list(range(SLOTS)), state, world)


def test_a_plain_greedy_batch_exchanges_one_message(monkeypatch) -> None:
    random = np.random.default_rng(4)
    logits = torch.from_numpy(random.normal(size=(5, 100)).astype(np.float32)).to(DEVICE)
    state = SamplingState.allocate(8, 4, 100, 2, torch.device(DEVICE))
    state.column("top_k")[:] = 1
    sent: list[tuple[int, ...]] = []

    class Counting(ThreadRanks):
        def gather(self, x: Tensor) -> Tensor:
            sent.append(tuple(x.shape))
            return super().gather(x)

        def all_reduce(self, x: Tensor) -> None:
            raise AssertionError("a sum over the ranks")

    def work(rank: int, ranks: ThreadRanks) -> list[int]:
        share, own = VocabShare(100, rank, 2), cloned(state)
        tokens, log_probs = torch.zeros(5, dtype=torch.int32, device=DEVICE), torch.zeros(5, device=DEVICE)
        slots = torch.arange(5, dtype=torch.int32, device=DEVICE)
        ranks = Counting(ranks.meeting, rank)
        mine = mask_padding(cut(logits, share), share)
        sample(mine, slots, own, share, ranks, tokens=tokens, log_probs=log_probs)
        return tokens.tolist()

    assert on_ranks(2, work) == [logits.argmax(1).tolist()] * 2
    assert sent == [(2, 5)] * 2


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_k": 0, "top_p": 0.8}, {"top_k": 7}])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_numbers_on_one_rank_end_the_row_on_all(settings: dict, bad: float) -> None:
    random = np.random.default_rng(5)
    state = random_state(PLACE, 60, SLOTS, random, num_bad_words=0, temperature=1.0, **settings)
    state.column("num_bad_words")[:] = 0
    logits = torch.from_numpy(random.normal(size=(6, 60)).astype(np.float32)).to(DEVICE)
    logits[1, 45], logits[3] = bad, bad
    assert [token < 0 for token in compare(logits, [9, 1, 2, 3, 4, 5], state, 2)] == [
        False, True, False, True, False, False,
    ]  # fmt: skip


def test_where_nothing_is_possible_there_is_no_token() -> None:
    random = np.random.default_rng(6)
    state = random_state(PLACE, 30, SLOTS, random, return_log_probs=1)
    logits = torch.full((4, 30), -torch.inf, device=DEVICE)
    logits[3, 28] = 0.0  # on the last rank alone
    state.column("num_bad_words")[:] = 0
    assert compare(logits, [0, 1, 2, 3], state, 2) == [NO_TOKEN] * 3 + [28]


def test_a_top_k_beyond_what_is_exchanged_is_searched_by_bits(monkeypatch) -> None:
    monkeypatch.setattr(vocab_draw, "MOST_CANDIDATES", 3)
    random = np.random.default_rng(7)
    state = random_state(PLACE, 500, SLOTS, random, temperature=1.3, top_k=60)
    state.column("top_k")[::3] = 499
    logits = torch.from_numpy(random.normal(0, 3, (SLOTS, 500)).astype(np.float32)).to(DEVICE)
    logits[:9] = logits[:9].round()  # ties at the k-th
    compare(logits, list(range(SLOTS)), state, 4)


def test_rows_are_drawn_in_parts(monkeypatch) -> None:
    monkeypatch.setattr(vocab_draw, "_VALUES", 300)
    random = np.random.default_rng(8)
    state = random_state(PLACE, 200, SLOTS, random, temperature=1.0, top_k=0)
    logits = torch.from_numpy(random.normal(0, 3, (40, 200)).astype(np.float32)).to(DEVICE)
    compare(logits, list(range(40)), state, 2)


def test_the_threshold_is_a_value_of_the_row_at_exact_weights() -> None:
    """Against a sort, for weights that have no rounding, with negative values, both zeros and extremes."""
    random = np.random.default_rng(9)
    values = random.choice([-3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 2.0000002, 3e38], (20, 64))
    values = values.astype(np.float32)
    weights = random.integers(1, 9, values.shape).astype(np.float64)
    wanted = np.array([random.integers(1, row.sum() + 1) for row in weights], np.float64)
    place = torch.device(DEVICE)

    def work(rank: int, ranks: ThreadRanks) -> Tensor:
        part = slice(32 * rank, 32 * rank + 32)
        x, w = (torch.from_numpy(a[:, part].copy()).to(place) for a in (values, weights))
        return threshold(x, w, torch.from_numpy(wanted).to(place), ranks, is_share=False).cpu()

    found = on_ranks(2, work)[1].numpy()
    for row in range(20):
        order = np.argsort(-values[row], kind="stable")
        reached = np.cumsum(weights[row, order]) >= wanted[row]
        assert found[row] == values[row, order[reached.argmax()]]


def test_the_generator_is_philox_for_every_seed_and_counter() -> None:
    random = np.random.default_rng(10)
    for seed in (0, 1, 2**64 - 1, int(random.integers(2**63)) + 2**63):
        ids, drawn = random.integers(0, 250_880, 200), int(random.integers(0, 2**20))
        wanted = philox.uniforms((seed & 0xFFFFFFFF, seed >> 32), ids, drawn)
        seeds = torch.from_numpy(np.full(200, seed, np.uint64).view(np.int64))
        found = uniforms(seeds, torch.from_numpy(ids), torch.full((200,), drawn))
        assert np.array_equal(found.numpy(), wanted)


@pytest.mark.parametrize(("vocab", "world"), [(90, 2), (10, 4)])
def test_other_readers_of_logits_get_those_of_the_whole_vocabulary(vocab: int, world: int) -> None:
    """Candidates of beams, the most likely tokens, whole rows and single values."""
    random = np.random.default_rng(11)
    logits = torch.from_numpy(random.normal(0, 2, (6, vocab)).astype(np.float32)).to(DEVICE)
    state = random_state(PLACE, vocab, SLOTS, random)
    if vocab == 10:  # fewer possible tokens than candidates: every id must still be one of the vocabulary
        state.column("num_bad_words")[7] = 8
        state.bad_ids[7, :8] = torch.arange(8, device=PLACE)
        state.bad_ends[7, :8] = torch.arange(1, 9, device=PLACE)
    state, beams, slots = cloned(state), torch.tensor([0, 2, 5], device=PLACE), np.array([7, 30, 12])
    place = torch.device(DEVICE)
    shape = 3, min(12, vocab)
    ids, log_probs = torch.zeros(shape, dtype=torch.int32, device=place), torch.zeros(shape, device=place)

    def slot_rows(held: SamplingState, first_id: int = 0) -> SlotRows:
        return SlotRows(held, torch.from_numpy(slots).to(place), held.started[slots], first_id)

    Reference().candidates(logits, beams, slot_rows(state), ids=ids, log_probs=log_probs)
    rows, chosen = torch.tensor([1, 4], device=place), torch.tensor([3, vocab - 1], device=place)
    tops = best_tokens(raw_log_probs(logits, rows), chosen, 5)

    def work(rank: int, ranks: ThreadRanks):
        share = VocabShare(vocab, rank, world)
        mine = mask_padding(cut(logits, share), share)
        found = torch.zeros_like(ids), torch.zeros_like(log_probs)
        own = slot_rows(cloned(state, share), share.first)
        vocab_logits.beam_candidates(mine, beams, own, share, ranks, ids=found[0], log_probs=found[1])
        raw = vocab_logits.raw_log_probs(mine, rows, ranks)
        best = vocab_logits.best_tokens(raw, chosen, 5, share, ranks)
        targets = torch.arange(6, device=place) * (vocab - 1) // 5
        picked = (
            values_at(mine, targets, share, ranks),
            vocab_logits.log_probs_at(mine, targets, share, ranks),
        )
        return found, best, whole_rows(mine, share, ranks), targets, picked

    for found, best, rows_of, targets, picked in on_ranks(world, work):
        finite = torch.isfinite(log_probs)
        assert torch.equal(found[0][finite], ids[finite])
        assert all(len(set(row)) == shape[1] and max(row) < vocab for row in found[0].tolist())
        torch.testing.assert_close(found[1], log_probs, atol=1e-5, rtol=0)
        assert torch.equal(best[0], tops[0])
        torch.testing.assert_close(best[1], tops[1], atol=1e-5, rtol=0)
        assert torch.equal(rows_of, logits)
        assert torch.equal(picked[0], logits.gather(1, targets[:, None])[:, 0])
        wanted = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(picked[1], wanted, atol=1e-5, rtol=0)
