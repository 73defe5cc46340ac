"""Tracks which slots of the host tier all ranks have pinned; plans query the ranks. No torch."""

from __future__ import annotations

from collections.abc import Callable

#: resolution in which ranks report how much of their memory is pinned
SHARES = 32
#: seconds between two queries
_INTERVAL_S = 0.05
#: seconds after the start during which prompts wait for their blocks in memory that is not pinned yet: a
#: rebuilt engine gets the requests of the previous one immediately
_PATIENCE_S = 1.0


class Readiness:
    """The state of the tier's memory, for the scheduler's thread.

    pinned: returns how many of SHARES of this rank's slots are pinned; -1 after a fault.
    usable: number of leading slots that all ranks have pinned. is_off: pinning has failed on some rank.
    """

    def __init__(self, num_slots: int, clock: Callable[[], float], pinned: Callable[[], int]):
        self.usable, self.is_off = 0, False
        self._num_slots, self._clock, self._pinned = num_slots, clock, pinned
        self._shares = 0  # reported by all ranks
        self._began = self._next = clock()
        self._is_asking = False

    @property
    def is_complete(self) -> bool:
        """Return whether all slots may be used."""
        return self._shares == SHARES

    @property
    def asks(self) -> bool:
        """Return whether the next plan queries the ranks: this rank has news, no query is in flight."""
        if self.is_off or self.is_complete or self._is_asking:
            return False
        return self._clock() >= self._next and self._pinned() != self._shares

    @property
    def may_wait(self) -> bool:
        """Return whether a prompt may wait for slots that are not usable yet."""
        if self.is_off or self.is_complete:
            return False
        return self._clock() - self._began < _PATIENCE_S

    def begin(self) -> bool:
        """Return `asks` for a plan, and record its query."""
        asks = self.asks
        self._is_asking |= asks
        return asks

    def answer(self, shares: int) -> None:
        """Process the answer: the minimum of all ranks' shares; -1 if pinning has failed on one."""
        self._is_asking, self._next = False, self._clock() + _INTERVAL_S
        self.is_off = shares < 0
        self._shares = max(shares, 0)
        self.usable = self._num_slots * self._shares // SHARES

    def abandon(self) -> None:
        """Record that the plan with the query could not run."""
        self._is_asking = False
