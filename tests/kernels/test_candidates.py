"""candidates, for beam search, against the contract in kernels/ops.py written out in numpy's float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.conftest import Place
from tridecode.kernels import reference
from tridecode.kernels.checks import ShapeError
from tridecode.kernels.ops import CandidateRows


def candidates(place: Place, logits: np.ndarray, width: int, **wanted) -> tuple[np.ndarray, np.ndarray]:
    """ids and log_probs, (n, width)."""
    moved = {name: torch.as_tensor(value).to(place.device) for name, value in wanted.items()}
    count = len(wanted["rows"])
    ids = torch.full((count, width), -7, dtype=torch.int32, device=place.device)
    log_probs = torch.full((count, width), -7.0, device=place.device)
    given = torch.from_numpy(logits).to(place.device)
    place.settle()
    place.ops.candidates(given, CandidateRows(**moved), ids=ids, log_probs=log_probs)
    assert np.array_equal(given.cpu().numpy(), logits, equal_nan=True), "the logits have changed"
    return ids.cpu().numpy(), log_probs.cpu().numpy()


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
    check(candidates(place, logits, width, rows=rows), logits[rows].astype(np.float64))


@pytest.mark.parametrize("part", [1, 2, 100])
def test_temperature_penalties_and_bans_of_each_row(place: Place, part: int, monkeypatch) -> None:
    """Also where the rows are taken in parts."""
    monkeypatch.setattr(reference, "_CANDIDATE_LOGITS", 300 * part)
    logits = np.random.default_rng(1).normal(0, 3, (5, 300)).astype(np.float32)
    temperature, repetition = [[0.5], [1.0], [3.0]], [[1.0], [1.7], [0.8]]
    presence, frequency = [[0.0], [0.4], [-1.0]], [[0.25], [0.0], [0.5]]
    seen = np.array([[0, 0, 1, 1, 2, 2], [5, 7, 5, 299, 0, 11], [2, 1, 1, 4, 9, 1]])
    banned = np.array([[2, 0, 2], [17, 3, 11]])
    columns = dict(temperature=temperature, repetition=repetition, presence=presence, frequency=frequency)
    found = candidates(
        place,
        logits,
        10,
        rows=[3, 1, 4],
        seen=seen,
        banned=banned,
        **{name: np.array(value, np.float32) for name, value in columns.items()},
    )
    wanted = logits[[3, 1, 4]].astype(np.float64) / np.array(temperature)
    for row, token, count in seen.T:
        x, factor = wanted[row, token], repetition[row][0]
        wanted[row, token] = (
            (x * factor if x < 0 else x / factor) - presence[row][0] - frequency[row][0] * count
        )
    wanted[banned[0], banned[1]] = -np.inf
    check(found, wanted)


def test_a_row_without_numbers_is_not_one_whose_ids_are_all_banned(place: Place) -> None:
    logits = np.random.default_rng(2).normal(0, 3, (4, 9)).astype(np.float32)
    logits[0, 3], logits[1, 8] = np.nan, np.inf
    every = np.array([[2] * 9, range(9)])
    _, log_probs = candidates(place, logits, 4, rows=[0, 1, 2, 3], banned=every)
    assert np.isnan(log_probs[:2]).any(1).all()
    assert (log_probs[2] == -np.inf).all() and np.isfinite(log_probs[3]).all()


def test_shapes_that_disagree_are_refused(place: Place) -> None:
    with pytest.raises(ShapeError, match="candidates: rows"):
        ids = torch.zeros(2, 4, dtype=torch.int32, device=place.device)
        rows = CandidateRows(torch.zeros(3, dtype=torch.int64, device=place.device))
        logits = torch.zeros(5, 9, device=place.device)
        place.ops.candidates(logits, rows, ids=ids, log_probs=torch.zeros(2, 4, device=place.device))
