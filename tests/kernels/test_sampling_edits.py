"""Rules of `sample` that change single logits or keep typical ids, at the sizes of real vocabularies, against
numpy's float64 and transformers' processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor

from tests.kernels.conftest import Place
from tests.kernels.sampling_states import add_biases
from tests.kernels.test_sample import configure, end_ids, make_state, run
from tridecode.backend.wire.sampling_params import MAX_BIASES
from tridecode.kernels.philox import uniforms
from tridecode.kernels.sampling_state import MOST_BIASES, NO_TOKEN, SamplingState


def remember(place: Place, state: SamplingState, slot: int, history: list[int]) -> None:
    state.history[slot, : len(history)] = place.ints(history)
    configure(state, slot, history_length=len(history))


def typical_draw(logits: np.ndarray, kept: np.ndarray, share: float, seed: int, generated: int) -> int:
    """Draw among the kept ids (V,) bool whose information content is nearest to the entropy."""
    ids = np.flatnonzero(kept)
    values = logits[ids] - logits[ids].max()
    mass = np.exp(values) / np.exp(values).sum()
    distance = np.abs(values - (mass * values).sum())
    order = np.argsort(distance, kind="stable")
    last = min(np.searchsorted(np.cumsum(mass[order]), share), len(ids) - 1)
    ids = ids[distance <= distance[order[last]]]
    noise = -np.log(-np.log1p(-uniforms((seed, 0), ids, generated).astype(np.float64)))
    return int(ids[np.argmax(logits[ids] + noise)])


@pytest.mark.parametrize("vocab", [7, 1000, 50257, 128256])
@pytest.mark.parametrize("scale", [0.5, 3.0, 9.0])
def test_draws_with_typical_p_are_those_of_the_contract(place: Place, vocab: int, scale: float):
    settings = [
        (typical, top_k, top_p, min_p)
        for typical in (0.2, 0.9, 0.9999)
        for top_k, top_p, min_p in (
            (0, 1.0, 0.0),
            (40, 1.0, 0.0),
            (0, 0.6, 0.0),
            (0, 1.0, 0.05),
            (3000, 0.9, 0.0),
        )
    ]
    logits = torch.randn(len(settings), vocab, generator=place.generator) * scale
    logits[::4, ::3] = -torch.inf
    state = make_state(place, len(settings), vocab)
    wanted = []
    for slot, (typical, top_k, top_p, min_p) in enumerate(settings):
        configure(state, slot, typical_p=typical, top_k=top_k, top_p_now=top_p, min_p=min_p)
        configure(state, slot, seed=77 + slot, generated=slot)
        row = logits[slot].double().numpy()
        kept = np.isfinite(row)
        if min_p:
            kept &= np.exp(row - row.max()) >= np.float32(min_p)
        if 0 < top_k < vocab:
            kept &= row >= np.sort(row)[-top_k]
        if top_p < 1:
            values = np.sort(row[kept])[::-1]
            mass = np.cumsum(np.exp(values - values[0]))
            reached = np.searchsorted(mass / mass[-1], np.float32(top_p))
            kept &= row >= values[min(reached, len(values) - 1)]
        wanted.append(typical_draw(row, kept, np.float32(typical), 77 + slot, slot))
    tokens, _ = run(place, logits, list(range(len(settings))), state)
    assert [slot for slot, pair in enumerate(zip(tokens, wanted)) if len(set(pair)) > 1] == []


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("vocab", [5, 3000, 128256])
def test_the_ids_of_repeated_n_grams_are_those_of_transformers(place: Place, vocab: int, size: int):
    """Long histories of few ids at both ends of the vocabulary; each draw's log probability shows how many
    ids are left."""
    random, rows = np.random.default_rng(size * vocab), 6
    few = np.unique(np.concatenate([random.integers(0, vocab, 3), [0, vocab - 1]]))
    state = make_state(place, rows, vocab, history=700)
    histories = [random.choice(few, int(length)).tolist() for length in (0, 1, size, 90, 333, 700)]
    scores = torch.randn(rows, vocab, generator=place.generator)
    wanted = []
    for slot, history in enumerate(histories):
        if len(history) > 100:  # the end occurs earlier for certain
            history[-70:] = history[5:75]
        configure(state, slot, top_k=1, return_log_probs=1, no_repeat_ngram_size=size)
        remember(place, state, slot, history)
        ids = torch.tensor([history], dtype=torch.int64)
        left = scores[slot : slot + 1].clone()
        wanted.append(NoRepeatNGramLogitsProcessor(size)(ids, left)[0] if history else left[0])
    tokens, log_probs = run(place, scores, list(range(rows)), state)
    for slot, left in enumerate(wanted):
        if bool((left == -torch.inf).all()):
            assert tokens[slot] == NO_TOKEN
            continue
        assert tokens[slot] == int(left.argmax()), slot
        assert log_probs[slot] == pytest.approx(float(left.double().log_softmax(0).max()), abs=1e-4)
    lengths = state.column("history_length").tolist()
    assert lengths == [min(len(history) + 1, 700) for history in histories]


def test_an_answer_without_repeated_n_grams_follows_its_own_tokens(place: Place):
    """Greedy answers of 40 tokens under logits that always prefer the same ids: every bigram is new."""
    vocab, prompt = 12, [3, 4, 3]
    state = make_state(place, 2, vocab, history=64)
    configure(state, 1, top_k=1, no_repeat_ngram_size=2)
    remember(place, state, 1, prompt)
    logits, answer = torch.arange(vocab, dtype=torch.float32)[None].flip(1), list(prompt)
    for _ in range(40):
        (token,), _ = run(place, logits, [1], state)
        seen = set(zip(answer, answer[1:]))
        assert token == next(one for one in range(vocab) if (answer[-1], one) not in seen)
        answer.append(token)


def test_ids_of_the_history_beyond_the_vocabulary_ban_nothing(place: Place):
    """Virtual tokens of a learned prompt have such ids."""
    state = make_state(place, 1, 10)
    configure(state, 0, top_k=1, no_repeat_ngram_size=1)
    remember(place, state, 0, [9, 10, 11, 2**31 - 1])
    assert run(place, torch.arange(10.0)[None], [0], state)[0] == [8]


@pytest.mark.parametrize("vocab", [40, 5003, 128256])
@pytest.mark.parametrize("count", [1, 300, MOST_BIASES])
def test_biases_are_added_before_temperature(place: Place, vocab: int, count: int):
    random, rows = np.random.default_rng(count), 3
    logits = torch.randn(rows, vocab, generator=place.generator)
    state = make_state(place, rows, vocab)
    wanted = logits.double().clone()
    for slot in range(rows):
        ids = random.permutation(vocab)[:count]
        add_biases(state, slot, ids, random)
        values = state.biases[slot, : len(ids), 1].cpu().view(torch.float32).double()
        configure(state, slot, top_k=1, return_log_probs=1, temperature=0.7)
        wanted[slot, torch.from_numpy(ids)] += values
    tokens, log_probs = run(place, logits, list(range(rows)), state)
    assert tokens == wanted.argmax(-1).tolist()
    likely = (wanted / 0.7).log_softmax(-1).amax(-1).tolist()
    assert log_probs == pytest.approx(likely, abs=2e-4)


def test_a_bias_lifts_neither_a_bad_word_nor_an_end_that_is_held_back(place: Place):
    logits = torch.zeros(1, 50)
    state = make_state(place, 1, 50)
    configure(state, 0, top_k=1, min_tokens=3, end_ids=end_ids(place, 7), num_bad_words=1, num_biases=4)
    state.bad_ids[0, 0], state.bad_ends[0, 0] = 8, 1
    values = np.array([90, 80, 3, 60], np.float32).view(np.int32).tolist()
    state.biases[0, :4] = place.ints(list(zip([7, 8, 9, 50], values)))  # 50 is beyond the vocabulary
    assert run(place, logits, [0], state)[0] == [9]


def test_the_slots_have_room_for_every_bias_that_requests_may_have() -> None:
    assert MOST_BIASES == MAX_BIASES


def rows_with_edits(place: Place, vocab: int, slots: int) -> tuple[SamplingState, Tensor]:
    random = np.random.default_rng(5)
    state = make_state(place, slots, vocab, history=128)
    for slot in range(slots):
        configure(state, slot, seed=slot, top_p_now=0.9 if slot % 2 else 1.0, top_k=slot % 3 * 30)
        configure(state, slot, no_repeat_ngram_size=slot % 4, typical_p=0.8 if slot % 5 == 0 else 1.0)
        remember(place, state, slot, random.integers(0, 9, 100).tolist())
        if slot % 2:
            add_biases(state, slot, random.permutation(vocab)[:300], random)
    return state, torch.randn(slots, vocab, generator=place.generator) * 3


def test_rows_with_these_rules_draw_in_a_batch_what_they_draw_alone(place: Place):
    vocab, slots = 20000, 24
    together, logits = rows_with_edits(place, vocab, slots)
    alone, _ = rows_with_edits(place, vocab, slots)
    for _ in range(3):
        tokens, _ = run(place, logits, list(range(slots)), together)
        assert tokens == [run(place, logits[slot : slot + 1], [slot], alone)[0][0] for slot in range(slots)]
