"""Compares each feature of `sample` with the contract in kernels/ops.py, computed in float64 by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Place
from tests.kernels.sampling_states import packed
from tridecode.kernels.philox import philox, uniforms
from tridecode.kernels.sampling_state import BROKEN_LOGITS, MOST_COUNTED, NO_TOKEN, SLOT, SamplingState


def make_state(place: Place, slots: int, vocab: int, history: int = 32) -> SamplingState:
    return SamplingState.allocate(slots, history, vocab, 8, place.device)


def configure(state: SamplingState, slot: int, **values: float | Tensor) -> None:
    for name, value in values.items():
        state.column(name)[slot] = value


def run(
    place: Place, logits: Tensor, slots: list[int], state: SamplingState
) -> tuple[list[int], list[float]]:
    tokens, log_probs = place.ints([-7] * len(slots)), torch.full((len(slots),), -7.0, device=place.device)
    place.settle()
    place.ops.sample(
        logits.to(place.device).clone(), place.ints(slots), state, tokens=tokens, log_probs=log_probs
    )
    return tokens.tolist(), log_probs.tolist()


def expected_draw(
    logits: np.ndarray, top_k: int, top_p: float, seed: int, generated: int, min_p: float = 0.0
) -> int:
    """Draw by the contract: min-p, top-k and top-p with ties, then the largest logit plus Gumbel noise."""
    keep = np.isfinite(logits)
    if min_p:
        keep &= np.exp(logits - logits.max()) >= min_p
    if 0 < top_k < len(logits):
        keep &= logits >= np.sort(logits)[-top_k]
    if top_p < 1:
        values = np.sort(logits[keep])[::-1]
        mass = np.exp(values - values[0])
        reached = np.searchsorted(np.cumsum(mass / mass.sum()), top_p)
        keep &= logits >= values[min(reached, len(values) - 1)]
    ids = np.flatnonzero(keep)
    noise = -np.log(-np.log1p(-uniforms((seed, 0), ids, generated).astype(np.float64)))
    return int(ids[np.argmax(logits[ids] + noise)])


def test_philox_gives_the_published_words():
    """The generator gives Random123's known answers for philox4x32-10."""
    zero = philox((0, 0), np.zeros((1, 4), np.uint64))
    assert [f"{int(w):08x}" for w in zero[0]] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    ones = philox((0xFFFFFFFF, 0xFFFFFFFF), np.full((1, 4), 0xFFFFFFFF, np.uint64))
    assert [f"{int(w):08x}" for w in ones[0]] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


@pytest.mark.parametrize("vocab", [2, 19, 1000, 50257, 250880])
def test_greedy_takes_the_largest_and_of_equals_the_lowest(place: Place, vocab: int):
    logits = torch.randn(5, vocab, generator=place.generator)
    logits[1] = -3.0
    logits[2, vocab // 2 :] = 9.0
    logits[3] = -torch.inf
    state = make_state(place, 8, vocab)
    for slot in range(8):
        configure(state, slot, top_k=1)
    tokens, log_probs = run(place, logits, [3, 0, 1, 7, -1], state)
    assert tokens == [int(logits[0].argmax()), 0, vocab // 2, NO_TOKEN, -7]
    assert log_probs[:4] == [0.0] * 4
    assert state.column("generated").tolist() == [1, 1, 0, 1, 0, 0, 0, 1]
    assert state.last_tokens[[3, 0, 1, 7]].tolist() == [*tokens[:3], 0]


@pytest.mark.parametrize("vocab", [7, 1000, 50257, 128256])
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_draws_are_those_of_the_contract(place: Place, vocab: int, scale: float):
    settings = [
        (0, 1.0),
        (1, 1.0),
        (40, 1.0),
        (0, 0.9),
        (50, 0.8),
        (0, 0.05),
        (3, 0.5),
        (vocab, 0.3),
        (1000, 0.999),
        (0, 0.0),
    ]
    logits = torch.randn(len(settings), vocab, generator=place.generator) * scale
    state = make_state(place, len(settings), vocab)
    for slot, (top_k, top_p) in enumerate(settings):
        configure(state, slot, top_p_now=top_p, top_k=top_k, seed=1234 + slot, generated=5 * slot)
    tokens, _ = run(place, logits, list(range(len(settings))), state)
    wanted = [
        expected_draw(row.double().numpy(), top_k, np.float32(top_p), 1234 + slot, 5 * slot)
        for slot, (row, (top_k, top_p)) in enumerate(zip(logits, settings))
    ]
    assert tokens == wanted


#: the ids that are kept: fewer than a block lists, more than it lists (0.0001 of flat logits), one
MIN_PS = (0.3, 0.01, 1e-4, 1e-30, 1.0)


@pytest.mark.parametrize("vocab", [7, 1000, 50257, 128256])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_draws_with_min_p_are_those_of_the_contract(place: Place, vocab: int, scale: float):
    settings = [
        (min_p, top_k, top_p)
        for min_p in MIN_PS
        for top_k, top_p in ((0, 1.0), (0, 0.6), (5, 1.0), (40, 0.9), (vocab - 1, 1.0), (3000, 0.5))
    ]
    logits = torch.randn(len(settings), vocab, generator=place.generator) * scale
    logits[::4, ::3] = -torch.inf
    state = make_state(place, len(settings), vocab)
    for slot, (min_p, top_k, top_p) in enumerate(settings):
        configure(state, slot, min_p=min_p, top_p_now=top_p, top_k=top_k, seed=99 + slot, generated=slot)
    tokens, _ = run(place, logits, list(range(len(settings))), state)
    wanted = [
        expected_draw(row.double().numpy(), top_k, np.float32(top_p), 99 + slot, slot, np.float32(min_p))
        for slot, (row, (min_p, top_k, top_p)) in enumerate(zip(logits, settings))
    ]
    assert [slot for slot, pair in enumerate(zip(tokens, wanted)) if len(set(pair)) > 1] == []


@pytest.mark.parametrize("vocab", [262_144, 278_528, 278_532, 300_032])
def test_draws_from_the_largest_vocabularies_are_those_of_the_contract(large_place: Place, vocab: int):
    """Up to 278,528 ids the maxima of segments fit in shared memory; beyond, each pass loads them again.

    The candidates of the fourth row are in more segments than a block lists.
    """
    settings = [(50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (2000, 0.95, 0.0), (0, 0.5, 0.01)]
    place = large_place
    logits = torch.randn(len(settings), vocab, generator=place.generator) * 4
    logits[1, -1] = logits[1].max() + 2
    logits[2, vocab // 2] = logits[2].max() + 1
    state = make_state(place, len(settings), vocab)
    for slot, (top_k, top_p, min_p) in enumerate(settings):
        configure(state, slot, top_k=top_k, top_p_now=top_p, min_p=min_p, seed=slot + 5, return_log_probs=1)
    tokens, log_probs = run(place, logits, list(range(len(settings))), state)
    for slot, (row, (top_k, top_p, min_p)) in enumerate(zip(logits.double(), settings)):
        limits = top_k, np.float32(top_p), slot + 5, 0, np.float32(min_p)
        assert tokens[slot] == expected_draw(row.numpy(), *limits), slot
        assert log_probs[slot] == pytest.approx(float(row.log_softmax(0)[tokens[slot]]), abs=1e-4)


def test_a_draw_does_not_depend_on_its_neighbours(place: Place):
    vocab = 20000
    logits = torch.randn(1, vocab, generator=place.generator) * 3
    alone = make_state(place, 40, vocab)
    crowd = make_state(place, 40, vocab)
    for state in (alone, crowd):
        for slot in range(40):
            configure(
                state,
                slot,
                return_log_probs=1,
                top_p_now=0.7 if slot % 2 else 1.0,
                top_k=slot % 3 * 20,
                seed=slot,
                temperature=0.8,
            )
    together = run(place, logits.expand(40, vocab), list(range(40)), crowd)
    for slot in (0, 1, 2, 3, 17):
        assert run(place, logits, [slot], alone) == ([together[0][slot]], [together[1][slot]])


def test_draws_follow_the_distribution(place: Place):
    """Of 4,000 draws of five tokens, each count is within five standard deviations."""
    share = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    state = make_state(place, 40, 5)
    for slot in range(40):
        configure(state, slot, seed=slot)
    counts = np.zeros(5)
    for _ in range(100):
        tokens, _ = run(place, share.log().expand(40, 5), list(range(40)), state)
        counts += np.bincount(tokens, minlength=5)
    deviation = np.sqrt(4000 * share.numpy() * (1 - share.numpy()))
    assert (np.abs(counts - 4000 * share.numpy()) < 5 * deviation).all(), counts


def test_penalties_follow_temperature_and_count_occurrences(place: Place):
    vocab = 300
    logits = torch.randn(1, vocab, generator=place.generator)
    state = make_state(place, 2, vocab)
    configure(
        state,
        1,
        top_k=1,
        return_log_probs=1,
        temperature=0.5,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
    )
    seen = torch.randint(0, vocab, (120,), generator=place.generator)
    seen = torch.cat([seen, logits[0].topk(20).indices])
    state.counts[1] = torch.bincount(seen, minlength=vocab).to(torch.int16)
    counts = state.counts[1].cpu().double()
    wanted = logits[0].double() / 0.5
    punished = torch.where(wanted < 0, wanted * 1.3, wanted / 1.3) - 0.4 - 0.2 * counts
    wanted = torch.where(counts > 0, punished, wanted)
    (token,), (log_prob,) = run(place, logits, [1], state)
    assert token == int(wanted.argmax())
    assert log_prob == pytest.approx(float(wanted.log_softmax(0)[token]), abs=1e-4)
    assert int(state.counts[1, token]) == int(counts[token]) + 1
    assert int(state.counts[0].sum()) == 0


def test_a_token_counts_up_to_the_largest_number(place: Place):
    state = make_state(place, 1, 40)
    configure(state, 0, top_k=1, presence_penalty=0.1)
    state.counts[0, 7] = MOST_COUNTED - 1
    logits = torch.zeros(1, 40)
    logits[0, 7] = 5.0
    for _ in range(3):
        assert run(place, logits, [0], state)[0] == [7]
        assert int(state.counts[0, 7]) == MOST_COUNTED


def test_bad_words_are_stopped_at_their_last_id(place: Place):
    logits = torch.zeros(3, 50)
    logits[:, 7], logits[:, 8], logits[:, 9] = 5.0, 4.0, 3.0
    state = make_state(place, 3, 50, history=4)
    for slot, history in enumerate(([1, 2, 3], [2, 3], [3])):
        configure(state, slot, top_k=1, num_bad_words=2, history_length=len(history))
        state.bad_ids[slot, :5] = place.ints([2, 3, 7, 8, 9])  # the words 2 3 7, and 8, and 9
        state.bad_ends[slot, :2] = place.ints([3, 4])
        state.history[slot, : len(history)] = place.ints(history)
    tokens, _ = run(place, logits, [0, 1, 2], state)
    assert tokens == [9, 9, 7]  # 8 is always excluded, 7 only after 2 3; 9 lies beyond the configured words
    assert state.history[:, :4].tolist() == [[1, 2, 3, 9], [2, 3, 9, 0], [3, 7, 0, 0]]
    tokens, _ = run(place, logits, [0, 1, 2], state)
    assert state.column("history_length").tolist() == [4, 4, 3]  # a full history does not grow


@pytest.mark.parametrize("vocab", [7, 1000, 50257, 128256])
@pytest.mark.parametrize("share", [0.5, 0.01])
def test_a_masked_slot_draws_only_from_the_ids_of_its_mask(place: Place, vocab: int, share: float):
    """Every second slot is masked; the largest logits are impossible there, and one is not a number."""
    settings = [
        {"top_k": 1},
        {"top_k": 0},
        {"top_k": 40},
        {"top_k": 0, "top_p_now": 0.6},
        {"top_k": 3, "top_p_now": 0.9},
        {"top_k": 0, "min_p": 0.01},
        {"top_k": 0, "min_p": 1e-4, "top_p_now": 0.95},
    ]
    logits = torch.randn(2 * len(settings), vocab, generator=place.generator) * 3
    possible = torch.rand(vocab, generator=place.generator).numpy() < share
    possible[[1, vocab - 1]] = True, False
    state = make_state(place, 2 * len(settings), vocab)
    for slot in range(2 * len(settings)):
        some = settings[slot // 2]
        configure(state, slot, masked=slot % 2, seed=slot, generated=slot, return_log_probs=1, **some)
        state.masks[slot] = packed(possible, state).to(place.device)
        if slot % 2:
            logits[slot, torch.from_numpy(~possible)] += 60.0
            logits[slot, vocab - 1] = torch.nan
    tokens, log_probs = run(place, logits, list(range(2 * len(settings))), state)
    for slot, (token, log_prob) in enumerate(zip(tokens, log_probs)):
        some, row = settings[slot // 2], logits[slot].double().numpy()
        if slot % 2:
            row = np.where(possible, row, -np.inf)
            assert possible[token]
        top_k, top_p, min_p = some["top_k"], some.get("top_p_now", 1.0), some.get("min_p", 0.0)
        wanted = expected_draw(row, top_k, np.float32(top_p), slot, slot, np.float32(min_p))
        assert token == (int(row.argmax()) if top_k == 1 else wanted), slot
        assert log_prob == pytest.approx(float(torch.from_numpy(row).log_softmax(0)[token]), abs=1e-3)


def test_a_mask_without_an_id_leaves_no_token(place: Place):
    state = make_state(place, 6, 5000)
    for slot, values in enumerate(NOTHING_LEFT.values()):
        configure(state, slot, masked=1, **values)
    tokens, log_probs = run(place, torch.zeros(6, 5000), list(range(6)), state)
    assert tokens == [NO_TOKEN] * 6 and log_probs == [0.0] * 6


def end_ids(place: Place, *ids: int) -> Tensor:
    """Return a slot's end ids, padded with -1."""
    most = SLOT["end_ids"].shape[0]
    return place.ints([*ids, *[-1] * (most - len(ids))])


@pytest.mark.parametrize(
    ("vocab", "ends"),
    [
        (70, [4]),
        (70, [4, 69, 0]),
        (5003, [0, 2047, 2048, 4096, 5002]),
        (5003, list(range(40, 56))),
        (128256, [128001, 128008, 128009]),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 1, "return_log_probs": 1, "temperature": 0.5, "presence_penalty": 1.0},
        {"top_k": 3, "seed": 5},
        {"top_k": 0, "top_p_now": 0.4, "seed": 6},
        {"top_k": 0, "seed": 7, "repetition_penalty": 0.5},
    ],
)
def test_all_end_ids_are_impossible_until_enough_tokens(
    place: Place, vocab: int, ends: list[int], settings: dict
):
    """The end ids lie at both ends of the vocabulary and of the kernel's chunks of 2,048 ids."""
    other, logits = 6, torch.full((1, vocab), -60.0)
    logits[0, other] = 0.0
    logits[0, torch.tensor(ends)] = 40.0
    state = make_state(place, 2, vocab)
    configure(state, 0, end_ids=end_ids(place, *ends), min_tokens=2, **settings)
    found = [run(place, logits, [0], state) for _ in range(3)]
    assert [tokens[0] for tokens, _ in found[:2]] == [other, other] and found[2][0][0] in ends
    if settings.get("return_log_probs"):
        assert found[0][1] == pytest.approx([0.0], abs=1e-5)  # end ids have no probability


def test_an_end_id_beyond_the_vocabulary_has_no_effect(place: Place):
    logits = torch.arange(64.0)[None]
    state = make_state(place, 2, 64)
    configure(state, 0, top_k=1, min_tokens=9, end_ids=end_ids(place, 64, 70, 2**31 - 1))
    assert run(place, logits, [0], state)[0] == [63]


NOTHING_LEFT = {
    "greedy": {"top_k": 1},
    "top-k": {"top_k": 3, "return_log_probs": 1},
    "top-p": {"top_k": 0, "top_p_now": 0.5},
    "min-p": {"top_k": 0, "min_p": 0.5},
    "all": {"top_k": 0, "return_log_probs": 1},
    "penalised": {"top_k": 1, "frequency_penalty": 0.5},
}


@pytest.mark.parametrize("settings", NOTHING_LEFT.values(), ids=NOTHING_LEFT)
def test_a_row_without_a_possible_id_has_no_token(place: Place, settings: dict):
    """Logits, bad words, or bad words and end ids together exclude all tokens; the fourth row has one
    left."""
    logits = torch.zeros(4, 6)
    logits[0] = -torch.inf
    state = make_state(place, 4, 6)
    for slot in range(4):
        configure(state, slot, min_tokens=3, **settings)
    for slot, words in ((1, 6), (2, 4), (3, 4)):
        configure(state, slot, num_bad_words=words)
        state.bad_ids[slot, :words] = place.ints(list(range(words)))
        state.bad_ends[slot, :words] = place.ints(list(range(1, words + 1)))
    configure(state, 2, end_ids=end_ids(place, 4, 5))
    configure(state, 3, end_ids=end_ids(place, 4))
    tokens, log_probs = run(place, logits, [0, 1, 2, 3], state)
    assert tokens == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 5] and log_probs[:3] == [0.0] * 3
    assert state.last_tokens.tolist() == [0, 0, 0, 5]  # valid ids, because the next step may already use them
    assert state.column("generated").tolist() == [1, 1, 1, 1]


def test_top_p_decays_and_is_reset(place: Place):
    logits = torch.zeros(1, 30)
    logits[0, 3] = 50.0
    state = make_state(place, 1, 30)
    configure(state, 0, top_p=0.8, top_p_now=0.8, top_p_decay=0.5, top_p_min=0.15, top_p_reset_id=9)
    seen = []
    for _ in range(3):
        run(place, logits, [0], state)
        seen.append(float(state.column("top_p_now")[0]))
    assert seen == pytest.approx([0.4, 0.2, 0.15])
    logits[0, 9] = 120.0
    run(place, logits, [0], state)
    assert float(state.column("top_p_now")[0]) == pytest.approx(0.8)


def test_log_probs_are_over_the_whole_vocabulary(place: Place):
    logits = torch.randn(4, 30011, generator=place.generator) * 4
    state = make_state(place, 4, 30011)
    for slot, top_k in enumerate((1, 20, 0, 1)):
        configure(
            state,
            slot,
            return_log_probs=1,
            top_p_now=0.9 if slot == 2 else 1.0,
            top_k=top_k,
            temperature=0.7,
            seed=3,
        )
    tokens, log_probs = run(place, logits, [0, 1, 2, 3], state)
    wanted = (logits.double() / 0.7).log_softmax(-1)
    assert log_probs == pytest.approx(
        [float(wanted[row, token]) for row, token in enumerate(tokens)], abs=1e-4
    )


def broken_rows(place: Place, logits: torch.Tensor, settings: dict) -> None:
    """Check that row 1 of logits (3, V) gives no token and does not affect the others."""
    state = make_state(place, 3, logits.shape[1])
    for slot in range(3):
        configure(state, slot, **{"repetition_penalty": 1.5, **settings})
    tokens, log_probs = run(place, logits, [0, 1, 2], state)
    assert tokens[1] == BROKEN_LOGITS and log_probs[1] == 0.0 and min(tokens[0], tokens[2]) >= 0
    assert int(state.last_tokens[1]) == 0  # a valid id, because the next step may already use it


BROKEN_SETTINGS = [
    {"top_k": 1},
    {"top_k": 1, "repetition_penalty": 1.0},
    {"top_k": 5},
    {"top_k": 0, "top_p": 0.5},
    {"top_k": 0, "min_p": 0.1},
    {"top_k": 0, "temperature": 0.7},
    {"top_k": 1, "return_log_probs": 1},
]


@pytest.mark.parametrize("settings", BROKEN_SETTINGS)
@pytest.mark.parametrize("wrong", ["all NaN", "+inf"])
@pytest.mark.parametrize("vocab_size", [40, 50_257])
def test_no_token_is_taken_from_logits_that_are_not_numbers(
    place: Place, wrong: str, settings: dict, vocab_size: int
) -> None:
    logits = torch.randn(3, vocab_size, generator=place.generator)
    logits[1] = torch.nan if wrong == "all NaN" else logits[1]
    logits[1, 17] = torch.nan if wrong == "all NaN" else torch.inf
    broken_rows(place, logits, settings)


@pytest.mark.parametrize("settings", BROKEN_SETTINGS)
@pytest.mark.parametrize("vocab_size", [40, 50_257])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001])
def test_a_single_nan_among_numbers_ends_the_row(
    place: Place, settings: dict, vocab_size: int, bits: int
) -> None:
    """A NaN is found at any position in a load of four ids, with either sign and any payload bits."""
    nan = torch.from_numpy(np.array([bits], np.uint32).view(np.float32))
    for at in (0, 1, 2, 3, 17, vocab_size - 1):
        logits = torch.randn(3, vocab_size, generator=place.generator)
        logits[1, at] = nan
        broken_rows(place, logits, settings)
