"""Detects pauses of this process itself: SIGSTOP, `docker pause`, a suspended machine, a held interpreter
lock.

A process that judges its peers by their silence must not count the time in which it could not listen. A loop
calls `PauseWatch.turn` on each turn and moves its deadlines by the result. Standard library only.
"""

from __future__ import annotations

#: a turn later than this was delayed by a pause of this process
TOLERANCE_S = 1.0


class PauseWatch:
    """Finds the pauses of one loop. Times are monotonic seconds that the caller gives."""

    def __init__(self, now: float, longest_turn_s: float) -> None:
        """longest_turn_s: the longest time between two turns of an undisturbed loop, its waits included."""
        self._last = now
        self._limit_s = longest_turn_s + TOLERANCE_S

    def turn(self, now: float) -> float:
        """Return the seconds since the last turn if this process was paused in between, else 0.0."""
        gap, self._last = now - self._last, now
        return gap if gap > self._limit_s else 0.0
