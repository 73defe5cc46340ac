"""The queue of sequences that wait for a slot and blocks. Host only: no torch."""

from __future__ import annotations

import enum
from collections.abc import Callable

from tridecode.backend.engine.schedule.admission import LazyHeap
from tridecode.backend.engine.schedule.sequence import Sequence, Stage

#: maximum number of sequences that a sequence behind them overtakes at once
MOST_PASSED = 16
#: maximum number of times that a sequence is overtaken; then those behind it wait
MOST_OVERTAKEN = 64
#: calls of `admit` without a search for cached prompts after a search that found none
_REST = 8


class Admission(enum.Enum):
    """The outcome of an attempt to admit a sequence."""

    DONE = 0
    NO_SLOT = 1  # no sequence can be admitted now
    NO_BLOCKS = 2
    COMING = 3  # a running prompt computes its blocks, a copy brings them, or a thread computes its mask


class WaitingQueue:
    """Sequences are ordered by priority, then arrival. If the first one cannot be admitted, later ones of the
    same priority may overtake it: any sequence while the first waits for a prefix that a running prompt
    computes or for the mask of its grammar, but only sequences that find cached blocks while it waits for
    blocks. A sequence is overtaken at most MOST_OVERTAKEN times.
    """

    def __init__(self) -> None:
        self._heap: LazyHeap[Sequence] = LazyHeap(lambda sequence: sequence.stage is Stage.WAITING)
        self._rest = 0

    def __len__(self) -> int:
        """Return an upper bound of the waiting sequences."""
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        self._heap.push(sequence.order, sequence)

    def admit(self, attempt: Callable[[Sequence, bool], Admission]) -> Sequence | None:
        """Remove and return the next sequence that attempt(sequence, warm) admits; None if it admits none.

        warm: it is to admit the sequence only if blocks of it are cached.
        """
        passed: list[Sequence] = []
        warm = False
        try:
            while len(passed) <= MOST_PASSED and (sequence := self._heap.first()) is not None:
                if passed and sequence.group.priority != passed[0].group.priority:
                    break
                outcome = attempt(sequence, warm)
                if outcome is Admission.DONE:
                    self._heap.pop()
                    for other in passed:
                        other.overtaken += 1
                    return sequence
                if outcome is Admission.NO_SLOT or sequence.overtaken >= MOST_OVERTAKEN:
                    break
                if outcome is Admission.NO_BLOCKS and not warm:
                    if self._rest:
                        self._rest -= 1
                        break
                    warm = True
                self._heap.pop()
                passed.append(sequence)
            if warm:
                self._rest = _REST
            return None
        finally:
            for other in passed:
                self.push(other)
