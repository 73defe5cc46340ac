"""Learns how much longer steps with drafts take in service than their costs say. No torch."""

from __future__ import annotations

#: moving-average weight of a step
_WEIGHT = 0.05
#: share by which the learned time of steps with drafts approaches that of plain steps in each plain step, so
#: that drafts that were not worth their time are tried again after some thousand steps
_RECOVERY = 1 / 4096
#: a step that takes this many times its cost has waited for something else
_OUTLIER = 5.0


class StepTimes:
    """Compares the intervals between the results of equal steps with the costs that were measured at
    start-up. Those lack what the host does between steps, which decides the time of steps of small models."""

    def __init__(self) -> None:
        # time over cost; 0.0: not known yet, the cost counts
        self._plain = self._wide = 0.0
        self._newest: tuple[int, int] | None = None
        self._at = 0.0

    @property
    def overhead(self) -> float:
        """Return how much longer steps with drafts take than plain steps, both relative to their costs; at
        least 1.0."""
        return max(self._wide / (self._plain or 1.0), 1.0) if self._wide else 1.0

    def take(self, shape: tuple[int, int] | None, now: float, cost: float) -> None:
        """Take the result of a step. shape: (rows, padded tokens of the longest row) of a decode step;
        None: another step. now: seconds. cost: seconds that a step of this shape was measured to take."""
        seconds, is_equal = now - self._at, shape is not None and shape == self._newest
        self._newest, self._at = shape, now
        if shape is None:
            return
        if shape[1] == 1 and self._wide > (self._plain or 1.0):
            self._wide += _RECOVERY * ((self._plain or 1.0) - self._wide)
        if not is_equal or not 0.0 < seconds < _OUTLIER * cost:
            return
        if shape[1] > 1:
            self._wide = _updated(self._wide, seconds / cost)
        else:
            self._plain = _updated(self._plain, seconds / cost)


def _updated(known: float, found: float) -> float:
    return found if known == 0.0 else known + _WEIGHT * (found - known)
