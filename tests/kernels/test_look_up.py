"""`look_up` against a search in plain Python: every place of the history and of the ring, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.conftest import Place
from tridecode.kernels.draft_history import (
    AGREED,
    ANSWER,
    CLIENT,
    LEAST_MATCH,
    MATCHED,
    MOST_MATCH,
    NOWHERE,
    OWN,
    SOURCE,
    DraftHistory,
)
from tridecode.kernels.sampling_state import MOST_DRAFTS

SLOTS, WIDTH = 6, 150


def run_back(tokens: list[int], end: int, suffix: list[int]) -> int:
    """The number of tokens up to tokens[end] that equal the end of suffix."""
    count = 0
    while count < min(len(suffix), MOST_MATCH) and end - count >= 0:
        if tokens[end - count] != suffix[len(suffix) - 1 - count]:
            break
        count += 1
    return count


def searched(own: list[int], ring: list[int], scopes: list[int], mine: list[int]) -> tuple[int, int, list]:
    """Search for a slot with these tokens: return length, source and drafts."""
    best = (LEAST_MATCH - 1, 2, -1)  # beats every shorter one
    for place in range(len(ring) - 1):
        if scopes[place] >= 0 and scopes[place] in mine:
            best = max(best, (run_back(ring, place, own), 0, place))
    for place in range(len(own) - 1):
        best = max(best, (run_back(own, place, own), 1, place))
    length, is_own, end = best
    if end < 0:
        return 0, NOWHERE, [0] * MOST_DRAFTS
    if is_own:
        text, drafts = list(own), []
        for i in range(MOST_DRAFTS):
            drafts.append(text[end + 1 + i])
            text.append(drafts[-1])
        return length, OWN, drafts
    drafts = []
    for token in ring[end + 1 : end + 1 + MOST_DRAFTS]:
        if token < 0:
            break
        drafts.append(token)
    drafts += [0] * (MOST_DRAFTS - len(drafts))
    return length, CLIENT if scopes[end] == mine[1] else ANSWER, drafts


def history_of(place: Place, ring: list[int], scopes: list[int]) -> DraftHistory:
    history = DraftHistory.allocate(SLOTS, WIDTH, len(ring), place.device)
    history.ring.copy_(place.ints(ring))
    history.ring_scopes.copy_(place.ints(scopes))
    history.used.fill_(len(ring))
    return history


def looked_up(place: Place, history: DraftHistory, drafts: torch.Tensor, rows, sampled, accepted):
    found = place.ints(np.full((len(rows), 3), -7))
    place.settle()
    place.ops.look_up(
        history, place.ints(rows), place.ints(sampled), place.ints(accepted), drafts,
        searches=True, found=found,
    )  # fmt: skip
    assert not history.best.any(), "the next launch needs empty scratch"
    return found.cpu()


@pytest.mark.parametrize("vocab", [2, 3, 40])
@pytest.mark.parametrize("ring_size", [40, 5000])
def test_drafts_follow_the_longest_match(place: Place, vocab: int, ring_size: int) -> None:
    random = np.random.default_rng([vocab, ring_size])
    sources = set()
    for _ in range(12):
        ring = random.integers(0, vocab, ring_size).tolist()
        scopes = np.repeat(random.integers(-1, 4, ring_size), random.integers(1, 20, ring_size))[:ring_size]
        for cut in [0, *np.flatnonzero(np.diff(scopes)).tolist()]:
            ring[cut] = -1
        scopes = scopes.tolist()
        history = history_of(place, ring, scopes)
        drafts = place.ints(random.integers(0, vocab, (SLOTS, MOST_DRAFTS)))
        old = drafts.clone()
        lengths = [int(one) for one in random.integers(1, WIDTH - 16, SLOTS)]
        texts = [random.integers(0, vocab, length).tolist() for length in lengths]
        mine = random.integers(-1, 4, (SLOTS, 2)).tolist()
        for slot, text in enumerate(texts):
            history.tokens[slot, : len(text)] = place.ints(text)
        history.lengths.copy_(place.ints(lengths))
        history.scopes.copy_(place.ints(mine))
        slots = random.permutation(SLOTS)[: SLOTS - 1].tolist()
        kept = random.integers(1, 17, len(slots)).tolist()
        sampled = random.integers(0, vocab, 16 * len(slots)).tolist()
        # the last row is of one token, without a count
        rows = [[slot, 16 * row, row if row < len(slots) - 1 else -1] for row, slot in enumerate(slots)]
        kept[-1] = 1
        found = looked_up(place, history, drafts, rows, sampled, kept)
        for row, slot in enumerate(slots):
            new = sampled[16 * row : 16 * row + kept[row]]
            text = texts[slot] + new
            assert history.tokens[slot, : len(text)].tolist() == text
            assert int(history.lengths[slot]) == len(text)
            length, source, wanted = searched(text, ring, scopes, mine[slot])
            assert found[row].tolist() == [length, source, int(int(old[slot, 0]) == new[0])]
            assert drafts[slot].tolist() == wanted
            sources.add(source)
        (other,) = set(range(SLOTS)) - set(slots)
        assert torch.equal(drafts[other], old[other])
        assert int(history.lengths[other]) == lengths[other]
    assert {OWN, ANSWER} <= sources or vocab == 40


def test_a_repeated_token_is_continued_beyond_the_end(place: Place) -> None:
    history = history_of(place, [-1] * 8, [-1] * 8)
    history.tokens[2, :5] = place.ints([9, 4, 5, 4, 5])
    history.lengths[2] = 5
    drafts = place.ints(np.zeros((SLOTS, MOST_DRAFTS)))
    found = looked_up(place, history, drafts, [[2, 0, -1]], [4], [])
    assert found[0, MATCHED] == 3 and found[0, SOURCE] == OWN and found[0, AGREED] == 0
    assert drafts[2].tolist() == [5, 4] * 7 + [5]


def test_a_slot_finds_answers_of_its_scopes_alone_and_none_goes_beyond_an_answer(place: Place) -> None:
    ring = [-1, 1, 2, 3, 4, -1, 1, 2, 7, 8, -1, -1]
    scopes = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1]
    for mine, source, wanted in [
        ([0, -1], ANSWER, [3, 4]),
        ([1, -1], ANSWER, [7, 8]),
        ([-1, 1], CLIENT, [7, 8]),
        ([-1, -1], NOWHERE, []),
        ([2, 3], NOWHERE, []),
    ]:
        history = history_of(place, ring, scopes)
        history.tokens[0, :2] = place.ints([5, 1])
        history.lengths[0] = 2
        history.scopes[0] = place.ints(mine)
        drafts = place.ints(np.full((SLOTS, MOST_DRAFTS), 2))
        found = looked_up(place, history, drafts, [[0, 0, -1]], [2], [])
        assert found[0].tolist() == [2 if source else 0, source, 1]
        assert drafts[0].tolist() == (wanted + [0] * MOST_DRAFTS)[:MOST_DRAFTS]


def test_rows_without_a_slot_find_nothing_and_change_nothing(place: Place) -> None:
    """Rows that pad a step, and one that has a match."""
    history = history_of(place, [-1] * 8, [-1] * 8)
    history.tokens[:, :4] = place.ints([4, 5, 4, 5])
    history.lengths.fill_(4)
    drafts = place.ints(np.full((SLOTS, MOST_DRAFTS), 7))
    found = looked_up(place, history, drafts, [[3, 0, -1], [-1, 9, 9], [-1, 0, -1]], [4], [1])
    assert found.tolist() == [[3, OWN, 0], [0, NOWHERE, 0], [0, NOWHERE, 0]]
    assert history.lengths.tolist() == [4, 4, 4, 5, 4, 4]
    others = [0, 1, 2, 4, 5]
    assert (drafts[others] == 7).all()


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_long_rings_and_histories_are_searched_by_several_blocks(place: Place, slots: int) -> None:
    """Every other slot finds a ring of 200,000 tokens, the others only their own 200 to 6,000. Runs follow
    each other on the same scratch, as the steps of a sequence do."""
    width, size = 6000, 200_000
    random = np.random.default_rng(slots)
    history = DraftHistory.allocate(slots, width, size, place.device)
    history.ring_scopes.fill_(0)
    history.used.fill_(size)
    reads = np.arange(slots) % 2 == 0
    history.scopes.copy_(place.ints(np.where(reads[:, None], [0, -1], [-1, -1])))
    names = 50_000 + 10 * np.arange(slots)
    for run in range(3):
        ring = np.arange(size) % 30_000 + 100
        ends = np.roll(np.linspace(3, size - 30, slots).astype(int), run)
        ring[ends - 1], ring[ends] = names, names + 1
        history.ring.copy_(place.ints(ring))
        own = np.tile(np.arange(width) % 90, (slots, 1))
        lengths = random.integers(200, width - 1, slots)
        firsts = np.where(run == 0, 0, lengths - 10)  # of the earlier occurrence in the slot's own text
        for slot in np.flatnonzero(~reads):
            own[slot, firsts[slot] : firsts[slot] + 2] = names[slot], names[slot] + 1
        own[np.arange(slots), lengths - 1] = names
        history.tokens.copy_(place.ints(own))
        history.lengths.copy_(place.ints(lengths))
        drafts = place.ints(np.zeros((slots, MOST_DRAFTS)))
        rows = [[slot, slot, -1] for slot in range(slots)]
        found = looked_up(place, history, drafts, rows, (names + 1).tolist(), [])
        for slot, length in enumerate(lengths.tolist()):
            text = [*own[slot, :length].tolist(), int(names[slot]) + 1]
            behind = (text[firsts[slot] + 2 :] * 2)[:MOST_DRAFTS]
            if reads[slot]:
                behind = ring[ends[slot] + 1 : ends[slot] + 1 + MOST_DRAFTS].tolist()
            assert found[slot, :2].tolist() == [2, ANSWER if reads[slot] else OWN], (run, slot)
            assert drafts[slot].tolist() == behind, (run, slot)
        assert history.lengths.tolist() == (lengths + 1).tolist()


def test_tokens_beyond_the_width_are_dropped(place: Place) -> None:
    history = history_of(place, [-1] * 8, [-1] * 8)
    history.lengths[1] = WIDTH - 1
    drafts = place.ints(np.zeros((SLOTS, MOST_DRAFTS)))
    looked_up(place, history, drafts, [[1, 0, 0]], [3, 4, 5], [3])
    assert int(history.lengths[1]) == WIDTH
    assert int(history.tokens[1, WIDTH - 1]) == 3
    assert int(history.tokens[2, 0]) == 0


def test_a_step_of_many_rows_appends_and_searches_nothing(place: Place) -> None:
    history = history_of(place, [-1] * 8, [-1] * 8)
    history.tokens[2, :4] = place.ints([4, 5, 4, 5])
    history.lengths[2] = 4
    drafts = place.ints(np.full((SLOTS, MOST_DRAFTS), 4))
    found = place.ints(np.full((1, 3), -7))
    place.settle()
    place.ops.look_up(
        history, place.ints([[2, 0, -1]]), place.ints([4]), place.ints([1]), drafts,
        searches=False, found=found,
    )  # fmt: skip
    assert found.tolist() == [[0, NOWHERE, 1]]
    assert history.tokens[2, :5].tolist() == [4, 5, 4, 5, 4]
    assert drafts[2].tolist() == [0] * MOST_DRAFTS and drafts[1].tolist() == [4] * MOST_DRAFTS


def test_the_ring_is_searched_as_far_as_it_is_used(place: Place) -> None:
    history = history_of(place, [-1, 1, 2, 7, -1, 1, 2, 8, -1], [0] * 9)
    history.tokens[0, :2] = place.ints([5, 1])
    history.scopes[0] = place.ints([0, -1])
    for used, wanted in [(9, 8), (5, 7), (2, 0)]:
        history.lengths[0] = 2
        history.used.fill_(used)
        drafts = place.ints(np.zeros((SLOTS, MOST_DRAFTS)))
        found = place.ints(np.zeros((1, 3)))
        place.settle()
        place.ops.look_up(
            history, place.ints([[0, 0, -1]]), place.ints([2]), place.ints([1]), drafts,
            searches=True, found=found,
        )  # fmt: skip
        assert int(drafts[0, 0]) == wanted
