"""A histogram in Prometheus' sense, over any storage of numbers: a list, or memory that processes share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def num_cells(bounds: Sequence[float]) -> int:
    """Return the numbers that a histogram stores."""
    return len(bounds) + 2


def bound_labels(bounds: Sequence[float]) -> list[str]:
    """Return the values of the label `le`."""
    return [*(f"{bound:g}" for bound in bounds), "+Inf"]


class Histogram:
    """Counts of values per bucket, and their sum. One thread adds; others may read growing values.

    bounds: upper bounds of the buckets, ascending; a value that equals a bound belongs to its bucket.
    """

    __slots__ = ("_bounds", "_cells")

    def __init__(self, bounds: Sequence[float], cells: list[float] | memoryview[float] | None = None):
        """cells: num_cells(bounds) numbers, the storage: a count per bucket, the count of larger values, the
        sum. None: a new list of zeros.
        """
        self._bounds = bounds
        if cells is None:
            cells = [0] * num_cells(bounds)
        self._cells = cells

    def add(self, value: float) -> None:
        self._cells[bisect_left(self._bounds, value)] += 1
        self._cells[-1] += value

    @property
    def counts(self) -> list[float]:
        """Return each bucket's count, not cumulative, and behind them that of values above all bounds."""
        return list(self._cells[:-1])

    @property
    def sum(self) -> float:
        return self._cells[-1]

    def buckets(self) -> dict[str, float]:
        """Return label `le` -> cumulative count."""
        return dict(zip(bound_labels(self._bounds), accumulate(self._cells[:-1])))
