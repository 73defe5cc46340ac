"""Tracks which slots of the host tier all ranks have pinned. Plans ask the ranks. No torch."""

from __future__ import annotations

from collections.abc import Callable

#: parts of the slots in which ranks report how much of their memory is pinned
SHARES = 32
#: seconds between two questions
_INTERVAL_S = 0.05
#: seconds after the start during which prompts wait for memory that is not pinned yet, where it holds their
#: blocks: a rebuilt engine gets the requests of the last one at once
_PATIENCE_S = 1.0


class Readiness:
    """The state of the tier's memory, for the scheduler's thread.

    pinned: returns the shares of this rank's slots that are pinned, of SHARES; -1 if they never will be.
    usable: number of leading slots that all ranks have pinned. is_off: some rank will never pin its memory.
    """

    def __init__(self, num_slots: int, clock: Callable[[], float], pinned: Callable[[], int]):
        self.usable, self.is_off = 0, False
        self._num_slots, self._clock, self._pinned = num_slots, clock, pinned
        self._shares = 0  # that all ranks have reported
        self._began = self._next = clock()
        self._is_asking = False

    @property
    def is_complete(self) -> bool:
        """Return whether all slots may be used."""
        return self._shares == SHARES

    @property
    def asks(self) -> bool:
        """Return whether the next plan asks the ranks: this rank has news, and no plan in flight asks."""
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
        """Return `asks`, for a plan."""
        asks = self.asks
        self._is_asking |= asks
        return asks

    def answer(self, shares: int) -> None:
        """Take the ranks' answer: the fewest shares of all; -1 if one rank will never pin its memory."""
        self._is_asking, self._next = False, self._clock() + _INTERVAL_S
        self.is_off = shares < 0
        self._shares = max(shares, 0)
        self.usable = self._num_slots * self._shares // SHARES

    def abandon(self) -> None:
        """Note that the plan that asks could not run."""
        self._is_asking = False
