"""The transport between a front end and an engine.

EngineLink reaches an engine of this machine through its socket; backend/front/triton reaches those of other
machines through Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tridecode.backend.wire import messages as m

Sink = Callable[[m.Event], None]


class Link(Protocol):
    """Submits requests and passes the engine's events to sinks. All methods may be called on any thread.

    A sink is called on the link's thread with each Event of its request and must not block. Every request
    that was submitted ends with a last event of each of its sequences, or with one event of finish "error",
    "cancelled" or "deadline" for all of them; after cancel() no event follows.
    """

    def reserve(self) -> int:
        """Return an id for a future request, unique within this link."""
        ...

    def submit(
        self,
        request: int,
        sequences: list[m.SequenceRequest],
        sink: Sink,
        *,
        priority: int = 0,
        timeout_s: float = 0.0,
        label: str = "",
        session: m.SessionRound | None = None,
        history: list[list[int]] | None = None,
        resume_within_s: float = 0.0,
    ) -> None:
        """Submit a request under an id from reserve(). Raises TridecodeErrors.

        timeout_s: 0 for the engine's default. label: the client's id. session, history: see Submission.
        resume_within_s: how long the request waits for the next engine if it loses its own; 0: it ends.
        """
        ...

    def cancel(self, request: int) -> None:
        """Forget the request, here and in the engine; no effect if it has ended."""
        ...

    def limits(self) -> m.Limits | None:
        """Return the engine's limits, or the last one's while it is rebuilt; None before the first was
        ready."""
        ...

    def state(self) -> m.EngineState:
        """Return the engine's last known state; phase "ready" only if it takes requests."""
        ...

    def beat(self) -> m.EngineBeat | None:
        """Return the engine's last heartbeat; None while no engine runs, or where none can be had."""
        ...

    def close(self) -> None:
        """Fail open requests and disconnect."""
        ...
