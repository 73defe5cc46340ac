"""Learns how long steps take in service, compared with the costs that were measured at start-up. No torch."""

from __future__ import annotations

from collections import deque
from statistics import median

#: newest intervals of a shape whose median counts, and the fewest that count: the first steps with drafts, a
#: pause of the host or a few slow steps do not decide
_KEPT, _FEWEST = 9, 5
#: a step that takes this many times its cost has waited for something else
_OUTLIER = 5.0

#: padded rows, and padded tokens of the longest row: 1 in a plain step
Shape = tuple[int, int]


class StepTimes:
    """Compares the intervals between the results of equal steps with the costs of these steps. The costs lack
    what the host does between steps, which decides the time of steps of small models."""

    def __init__(self) -> None:
        self._intervals: dict[Shape, deque[float]] = {}  # over cost
        self._ratios: dict[Shape, float] = {}  # their medians, as far as computed
        #: the shapes of the newest enough intervals, of a plain step and of one with drafts
        self._plain: Shape | None = None
        self._wide: Shape | None = None
        self._newest: tuple[int, Shape] | None = None
        self._at = 0.0

    def seconds(self, shape: Shape, cost: float) -> float:
        """Return the seconds that a step of this shape takes. cost: its measured cost.

        A shape without enough intervals takes as many times its cost as other shapes with drafts, or as
        plain ones.
        """
        ratio = self._ratio(shape)
        if ratio is None:
            plain = self._ratio(self._plain) or 1.0
            ratio = plain if shape[1] == 1 else max(self._ratio(self._wide) or 0.0, plain)
        return ratio * cost

    def take(self, rows: int, shape: Shape | None, now: float, cost: float) -> None:
        """Take the result of a step. rows: of the step. shape: of a decode step; None: another step. now:
        seconds. cost: seconds that a step of this shape was measured to take."""
        step = None if shape is None else (rows, shape)
        seconds, is_equal = now - self._at, step == self._newest
        self._newest, self._at = step, now
        if shape is not None and is_equal and 0.0 < seconds < _OUTLIER * cost:
            self._learn(shape, seconds / cost)

    def forget(self) -> None:
        """Forget the intervals of steps with drafts."""
        self._wide = None
        for shape in [shape for shape in self._intervals if shape[1] > 1]:
            del self._intervals[shape]
            self._ratios.pop(shape, None)

    def _learn(self, shape: Shape, ratio: float) -> None:
        found = self._intervals.get(shape)
        if found is None:
            found = self._intervals[shape] = deque(maxlen=_KEPT)
        found.append(ratio)
        if len(found) < _FEWEST:
            return
        self._ratios.pop(shape, None)
        if shape[1] > 1:
            self._wide = shape
        else:
            self._plain = shape

    def _ratio(self, shape: Shape | None) -> float | None:
        """Return the median time over cost of a shape, which most steps do not need; None: not known yet."""
        if shape is None or len(self._intervals.get(shape, ())) < _FEWEST:
            return None
        found = self._ratios.get(shape)
        if found is None:
            found = self._ratios[shape] = median(self._intervals[shape])
        return found
