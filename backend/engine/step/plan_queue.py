"""The queue of plans that a rank > 0 has received but not begun, and its receiver thread. No torch."""

from __future__ import annotations

import queue
import threading
from typing import Protocol

from tridecode.backend.engine.step.plan import PlanMessage

#: maximum number of queued plans; rank 0 has fewer in flight
_MOST = 64


class End:
    """Follows the last plan."""


class Ranks(Protocol):
    def broadcast_plan(self, plan: PlanMessage | None) -> PlanMessage | None: ...


class PlanQueue:
    """Receives plans in a thread, from its creation until rank 0 sends the end or is gone.

    The broadcast of plans has a process group of its own that no other thread uses.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._arrived: queue.Queue[PlanMessage | End | BaseException] = queue.Queue(_MOST)
        self._thread = threading.Thread(target=self._receive, name="plans", daemon=True)
        self._thread.start()

    def take(self, timeout_s: float | None = None) -> PlanMessage | End | None:
        """Return the next message or End; None if nothing arrives within timeout_s (None: no limit).

        Raises the error of the receiver: TridecodeError for a damaged plan, RuntimeError if rank 0 is gone.
        """
        try:
            found = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, End):
            self._thread.join()
        return found

    def _receive(self) -> None:
        try:
            while (plan := self._ranks.broadcast_plan(None)) is not None:
                self._arrived.put(plan)
            self._arrived.put(End())
        except BaseException as error:  # raised by `take`, in the thread that runs the steps
            self._arrived.put(error)
