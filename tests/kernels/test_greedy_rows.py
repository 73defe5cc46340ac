"""Greedy rows without other settings have a sweep of their own in `sample`: its tokens are numpy's argmax.

The other rows of a launch draw from the whole vocabulary, where the kernel skips the noise of ids that
cannot win.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Place
from tests.kernels.test_sample import configure, expected_draw, make_state, run
from tridecode.kernels.sampling_state import BROKEN_LOGITS, NO_TOKEN, SamplingState

#: one chunk of 2,048 ids and less, several, the vocabularies of GPT-2 (rows without 16-byte loads), LLaMA and
#: BLOOM; with 256 rows a block sweeps several chunks, with one row every chunk has a block
VOCABS = [4, 1000, 2048, 4100, 20484, 50257, 128256, 250880]


def greedy_state(place: Place, rows: int, vocab: int, **values: float | Tensor) -> SamplingState:
    state = make_state(place, rows, vocab)
    for slot in range(rows):
        configure(state, slot, top_k=1, **values)
    return state


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("rows", [1, 5, 64, 256])
def test_a_greedy_row_takes_the_first_of_its_largest_logits(large_place: Place, rows: int, vocab: int):
    """Logits are rounded to halves, so that most rows have several largest ones. On the CPU up to 20 rows."""
    place = large_place
    rows = min(rows, 20) if place.device.type == "cpu" else rows
    logits = (torch.randn(rows, vocab, generator=place.generator) * 4).round() / 2
    tokens, log_probs = run(place, logits, list(range(rows)), greedy_state(place, rows, vocab))
    assert tokens == logits.numpy().argmax(-1).tolist()
    assert log_probs == [0.0] * rows


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_largest_logit_is_found_at_every_place_of_a_chunk(place: Place, vocab: int):
    places = np.unique(np.array([0, 1, 2, 3, 4, 1023, 1024, 2047, 2048, 3071, 4095, 4096, 8191, vocab - 4]))
    places = [int(at) for at in [*places[places < vocab], vocab - 2, vocab - 1]]
    logits = torch.randn(len(places), vocab, generator=place.generator)
    for row, at in enumerate(places):
        logits[row, at] = 9.0
    state = greedy_state(place, len(places), vocab)
    assert run(place, logits, list(range(len(places))), state)[0] == places
    logits = torch.full_like(logits, -torch.inf)
    for row, at in enumerate(places):
        logits[row, at] = -3e38
    assert run(place, logits, list(range(len(places))), state)[0] == places


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_a_greedy_row_with_a_broken_logit_has_no_token(place: Place, vocab: int, bad: float):
    """The rows differ in the place of the broken logit; the last two are minus infinity, and sound."""
    places = [0, vocab // 2, vocab - 1]
    logits = torch.randn(len(places) + 2, vocab, generator=place.generator)
    for row, at in enumerate(places):
        logits[row, at] = bad
    logits[-2] = -torch.inf
    state = greedy_state(place, len(logits), vocab)
    tokens, _ = run(place, logits, list(range(len(logits))), state)
    assert tokens == [BROKEN_LOGITS] * len(places) + [NO_TOKEN, int(logits[-1].numpy().argmax())]


@pytest.mark.parametrize("settings", [{}, {"return_log_probs": 1}, {"temperature": 0.0}])
@pytest.mark.parametrize("vocab", [1000, 128256])
def test_zeros_of_either_sign_are_equal(place: Place, vocab: int, settings: dict):
    """The first zero is negative in even rows, positive in odd ones; everything else is smaller."""
    logits = -torch.rand(6, vocab, generator=place.generator) - 0.5
    firsts = [0, 5, vocab // 3, vocab // 2, vocab - 3, vocab - 2]
    for row, first in enumerate(firsts):
        logits[row, first] = 0.0 if row % 2 else -0.0
        logits[row, first + 1 :: 2] = -0.0 if row % 2 else 0.0
    assert run(place, logits, list(range(6)), greedy_state(place, 6, vocab, **settings))[0] == firsts


@pytest.mark.parametrize("vocab", [1000, 50257, 128256])
@pytest.mark.parametrize("scale", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_from_the_whole_vocabulary_beside_greedy_rows(
    place: Place, vocab: int, scale: float, temperature: float
):
    """Flat logits, scale 0, leave the choice to the noise alone."""
    rows = 40
    logits = torch.randn(rows, vocab, generator=place.generator) * scale
    state = make_state(place, rows, vocab)
    for slot in range(rows):
        configure(state, slot, top_k=slot % 4 == 0, temperature=temperature, seed=slot + 7, generated=slot)
    tokens, _ = run(place, logits, list(range(rows)), state)
    for slot, token in enumerate(tokens):
        row = (logits[slot] / temperature).double().numpy()
        drawn = expected_draw(row, 0, 1.0, slot + 7, slot)
        assert token == (int(row.argmax()) if slot % 4 == 0 else drawn), slot
