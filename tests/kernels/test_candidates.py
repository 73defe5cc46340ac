"""candidates, for beam search, against the contract in kernels/ops.py written out in numpy's float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.conftest import Place
from tridecode.backend.engine.device.sampling import start_slots
from tridecode.backend.engine.step.plan import SlotStart
from tridecode.backend.wire.sampling_params import SamplingParams
from tridecode.kernels.checks import ShapeError
from tridecode.kernels.reference import sampling
from tridecode.kernels.sampling_state import SamplingState, SlotRows


def candidates(
    place: Place, logits: np.ndarray, width: int, rows: list[int], starts: list[SlotStart] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """ids and log_probs, (n, width). starts: of the rows' sequences, in any slots; None: neutral ones."""
    count = len(rows)
    starts = starts or [slot_start(slot, []) for slot in range(count)]
    state = SamplingState.allocate(count + 2, 32, logits.shape[1], 32, place.device)
    start_slots(state, starts)
    slots = np.array([start.slot for start in starts])
    sequences = SlotRows(state, torch.from_numpy(slots).to(place.device), state.started[slots])
    ids = torch.full((count, width), -7, dtype=torch.int32, device=place.device)
    log_probs = torch.full((count, width), -7.0, device=place.device)
    given, held = torch.from_numpy(logits).to(place.device), state.slots.clone()
    place.settle()
    place.ops.candidates(
        given, torch.tensor(rows, device=place.device), sequences, ids=ids, log_probs=log_probs
    )
    assert np.array_equal(given.cpu().numpy(), logits, equal_nan=True), "the logits have changed"
    assert torch.equal(state.slots, held), "the slots have changed"
    return ids.cpu().numpy(), log_probs.cpu().numpy()


def slot_start(slot: int, history: list[int], generated: int = 0, **params) -> SlotStart:
    return SlotStart(slot, SamplingParams(**params), np.array(history, np.int32), generated, 1.0)


def check(found: tuple[np.ndarray, np.ndarray], processed: np.ndarray) -> None:
    """processed: (n, V) float64 logits after everything but the softmax."""
    ids, log_probs = found
    best = np.argsort(-processed, axis=1, kind="stable")[:, : ids.shape[1]]
    assert np.array_equal(ids, best)
    top = processed.max(1, keepdims=True)
    whole = top + np.log(np.exp(processed - top).sum(1, keepdims=True))
    assert np.allclose(log_probs, np.take_along_axis(processed - whole, best, 1), atol=2e-5)


@pytest.mark.parametrize(("vocab", "width"), [(19, 19), (1000, 8), (50257, 128)])
def test_the_most_likely_tokens_of_the_wanted_rows(place: Place, vocab: int, width: int) -> None:
    logits = np.random.default_rng(vocab).normal(0, 3, (6, vocab)).astype(np.float32)
    rows = [4, 0, 5]
    check(candidates(place, logits, width, rows), logits[rows].astype(np.float64))


@pytest.mark.parametrize("generated", [2, 3])
@pytest.mark.parametrize("part", [1, 2, 100])
def test_temperature_penalties_and_bans_of_each_row(
    place: Place, part: int, generated: int, monkeypatch
) -> None:
    """This also holds if the rows are processed in parts."""
    monkeypatch.setattr(sampling, "_CANDIDATE_LOGITS", 300 * part)
    logits = np.random.default_rng(1).normal(0, 3, (5, 300)).astype(np.float32)
    temperature, repetition = [[0.5], [1.0], [3.0]], [[1.0], [1.7], [0.8]]
    presence, frequency = [[0.0], [0.4], [-1.0]], [[0.25], [0.0], [0.5]]
    histories = [[5, 7, 5], [5, *[299] * 4], [*[0] * 9, 11]]
    rules = [
        {"bad_words": [[5, 7], [7, 5, 3]]},
        {"bad_words": [[299, 5, 8], [5, 8]]},
        {"bad_words": [[17]], "end_id": 11, "more_end_ids": [12], "min_tokens": 3},
    ]
    banned = np.array([[0, 2, 2, 2], [3, 17, 11, 12]])
    banned = banned if generated < 3 else banned[:, :2]
    names = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")
    starts = []
    for row, slot in enumerate([4, 0, 2]):
        values = (temperature[row][0], repetition[row][0], presence[row][0], frequency[row][0])
        params = {**dict(zip(names, values)), **rules[row]}
        starts.append(slot_start(slot, histories[row], generated, **params))
    found = candidates(place, logits, 10, [3, 1, 4], starts)
    wanted = logits[[3, 1, 4]].astype(np.float64) / np.array(temperature)
    for row, history in enumerate(histories):
        for token in set(history):
            x, factor, count = wanted[row, token], repetition[row][0], history.count(token)
            wanted[row, token] = (
                (x * factor if x < 0 else x / factor) - presence[row][0] - frequency[row][0] * count
            )
    wanted[banned[0], banned[1]] = -np.inf
    check(found, wanted)


def test_a_row_without_numbers_is_not_one_whose_ids_are_all_banned(place: Place) -> None:
    logits = np.random.default_rng(2).normal(0, 3, (4, 9)).astype(np.float32)
    logits[0, 3], logits[1, 8] = np.nan, np.inf
    every = [[token] for token in range(9)]
    starts = [slot_start(slot, [], bad_words=every if slot == 2 else []) for slot in range(4)]
    _, log_probs = candidates(place, logits, 4, [0, 1, 2, 3], starts)
    assert np.isnan(log_probs[:2]).any(1).all()
    assert (log_probs[2] == -np.inf).all() and np.isfinite(log_probs[3]).all()


def test_shapes_that_disagree_are_refused(place: Place) -> None:
    with pytest.raises(ShapeError, match="candidates: rows"):
        ids = torch.zeros(2, 4, dtype=torch.int32, device=place.device)
        rows = torch.zeros(3, dtype=torch.int64, device=place.device)
        state, logits = (
            SamplingState.allocate(3, 4, 9, 4, place.device),
            torch.zeros(5, 9, device=place.device),
        )
        sequences, log_probs = (
            SlotRows(state, rows, state.started[:3]),
            torch.zeros(2, 4, device=place.device),
        )
        place.ops.candidates(logits, rows, sequences, ids=ids, log_probs=log_probs)
