"""Learns how long steps take in service, compared with the costs that were measured at start-up. No torch."""

from __future__ import annotations

from collections import deque
from statistics import median

#: newest intervals of a shape whose median counts, and the fewest that count: the first steps with drafts, a
#: pause of the host or a few slow steps do not decide
_KEPT, _FEWEST = 9, 5
#: plain steps after which the intervals of steps with drafts are forgotten, so that drafts that were not
#: worth their time are tried again
_MEMORY = 4096
#: a step that takes this many times its cost has waited for something else
_OUTLIER = 5.0

#: padded rows, and padded tokens of the longest row: 1 in a plain step
Shape = tuple[int, int]


class StepTimes:
    """Compares the intervals between the results of equal steps with the costs of these steps. The costs lack
    what the host does between steps, which decides the time of steps of small models."""

    def __init__(self) -> None:
        self._intervals: dict[Shape, deque[float]] = {}
        self._ratios: dict[Shape, float] = {}  # median time over cost
        self._plain = self._wide = 0.0  # the newest of these ratios; 0.0: not known yet
        self._plain_steps = 0  # since the newest step with drafts
        self._newest: tuple[int, Shape] | None = None
        self._at = 0.0

    def seconds(self, shape: Shape, cost: float) -> float:
        """Return the seconds that a step of this shape takes. cost: its measured cost.

        A shape without enough intervals takes as many times its cost as other shapes with drafts, or as
        plain ones.
        """
        ratio = self._ratios.get(shape)
        if ratio is None:
            plain = self._plain or 1.0
            ratio = plain if shape[1] == 1 else max(self._wide, plain)
        return ratio * cost

    def take(self, rows: int, shape: Shape | None, now: float, cost: float) -> None:
        """Take the result of a step. rows: of the step. shape: of a decode step; None: another step. now:
        seconds. cost: seconds that a step of this shape was measured to take."""
        step = None if shape is None else (rows, shape)
        seconds, is_equal = now - self._at, step is not None and step == self._newest
        self._newest, self._at = step, now
        if shape is None:
            return
        self._plain_steps = self._plain_steps + 1 if shape[1] == 1 else 0
        if self._plain_steps == _MEMORY:
            self.forget()
        if is_equal and 0.0 < seconds < _OUTLIER * cost:
            self._learn(shape, seconds / cost)

    def forget(self) -> None:
        """Forget the intervals of steps with drafts."""
        self._wide, self._plain_steps = 0.0, 0
        for shape in [shape for shape in self._intervals if shape[1] > 1]:
            del self._intervals[shape]
            self._ratios.pop(shape, None)

    def _learn(self, shape: Shape, ratio: float) -> None:
        found = self._intervals.setdefault(shape, deque(maxlen=_KEPT))
        found.append(ratio)
        if len(found) < _FEWEST:
            return
        self._ratios[shape] = known = median(found)
        if shape[1] > 1:
            self._wide = known
        else:
            self._plain = known
