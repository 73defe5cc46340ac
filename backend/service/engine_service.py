"""The engine's interface for front ends: limits, preparation threads, submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tridecode.backend.base.errors import EngineDownError
from tridecode.backend.service.client_request import ClientRequest
from tridecode.backend.service.engine_link import EngineLink
from tridecode.backend.service.link import Link, Sink
from tridecode.backend.service.owner import Owner
from tridecode.backend.service.preparation import Preparation
from tridecode.backend.wire.messages import Limits, SequenceRequest, SessionRound

_Link = TypeVar("_Link", bound=Link, covariant=True)
_ID_BYTES = 4  # SequenceRequest.prompt has int32


@dataclass(frozen=True)
class Submission:
    """One request of the engine: some sequences of a client's request, and the receiver of their events.

    session: set if it is a round of a session; history: the session's stored tokens, for each row.
    """

    sequences: list[SequenceRequest]
    sink: Sink
    priority: int
    session: SessionRound | None = None
    history: list[list[int]] | None = None


class EngineService(Generic[_Link]):
    """Submits requests of token ids. A link or preparation passed in remains the caller's to close."""

    def __init__(self, link: _Link, preparation: Preparation, resume_within_s: float = 0.0):
        """resume_within_s: see Link.submit."""
        self.link, self.preparation = link, preparation
        self._resume_within_s = resume_within_s

    @classmethod
    def open(
        cls,
        engine_dir: str,
        name: str,
        owner: Owner,
        *,
        hold_s: float = 2.0,
        resume_within_s: float = 60.0,
        max_preparing_requests: int = 1024,
        max_preparing_bytes: int = 67_108_864,
        number: int = 0,
    ) -> EngineService[EngineLink]:
        """Return a service with its own link and preparation threads, which `close` ends.

        engine_dir: the model folder whose config.pbtxt is the engine's. name: of the front end, for logs.
        number: of the engine in the model's instance_group. The engine starts in the background: see
        EngineLink.wait_ready.
        """
        link = EngineLink(engine_dir, name, owner, hold_s, number=number).start()
        preparation = Preparation(max_preparing_requests, max_preparing_bytes).start()
        return EngineService(link, preparation, resume_within_s)

    def close(self) -> None:
        """Drop the requests that are being prepared, fail the open ones, disconnect from the engine."""
        self.preparation.close()
        self.link.close()

    def limits(self) -> Limits:
        """Return the engine's limits, or those of the last engine while it is rebuilt.

        Raises EngineDownError before the first engine was ready.
        """
        limits = self.link.limits()
        if limits is None:
            state = self.link.state()
            raise EngineDownError(f"the engine is not ready ({state.phase}): {state.detail}")
        return limits

    def submit(
        self,
        client: ClientRequest,
        submissions: Sequence[Submission],
        *,
        timeout_s: float = 0.0,
        resume: bool = True,
    ) -> None:
        """Submit a client's requests to the engine; cancel them if the client's request has ended meanwhile.

        timeout_s: 0 for the engine's default. resume: whether the next engine continues them if theirs is
        lost.
        """
        resume_within_s = self._resume_within_s if resume else 0.0
        client.requests = [self.link.reserve() for _ in submissions]
        sequences = [sequence for one in submissions for sequence in one.sequences]
        client.count(
            sum(sequence.params.num_sequences for sequence in sequences),
            sum(len(sequence.prompt) // _ID_BYTES for sequence in sequences),
        )
        for number, one in zip(client.requests, submissions):
            self.link.submit(
                number,
                one.sequences,
                one.sink,
                priority=one.priority,
                timeout_s=timeout_s,
                label=client.label,
                session=one.session,
                history=one.history,
                resume_within_s=resume_within_s,
            )
        if client.ended:
            client.cancel_rows()
