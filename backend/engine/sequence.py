"""One generation in progress: its tokens, its place and what ends it. Plain Python: no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from tridecode.backend.messages import SamplingParams


class Finish(str, enum.Enum):
    """Why a sequence ended; the value is what a door is told."""

    END_ID = "end_id"
    STOP_WORD = "stop_word"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class Stage(enum.Enum):
    WAITING = 0  # for a slot and blocks
    PREFILL = 1  # has a slot; part of its known tokens is not in the cache yet
    DECODE = 2
    DRAINING = 3  # its last token is in flight
    ENDED = 4


@dataclass(eq=False)
class Sequence:
    """State of one sequence. `cached` and `in_flight` advance when a step is planned, `output` when it is
    committed.

    door, request, index: whom its events are for. arrival: order of arrival, the tie-breaker of priority.
    cached: tokens whose keys and values are in the cache once the planned steps have run.
    prefill: tokens to be computed before decoding: the prompt and, after a preemption, the output so far.
    in_flight: tokens that planned steps will yield and that are not committed yet.
    """

    door: bytes
    request: int
    index: int
    prompt: np.ndarray  # int32
    params: SamplingParams
    arrival: int
    priority: int = 0
    deadline: float = float("inf")  # monotonic seconds

    output: list[int] = field(default_factory=list)
    stage: Stage = Stage.WAITING
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    prefill: int = 0
    in_flight: int = 0
    top_p: float = 1.0
    embedding: np.ndarray | None = None  # float32 (C,), the sum so far where it was asked for
    embedding_done: bool = False

    def __post_init__(self) -> None:
        self.top_p = self.params.top_p
        self.prefill = len(self.prompt)
        self._longest_stop = max((len(word) for word in self.params.stop_words), default=0)

    @property
    def order(self) -> tuple[int, int]:
        return (self.priority, self.arrival)

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt) + len(self.output)

    def known_tokens(self) -> np.ndarray:
        """int32: the prompt and what was generated since."""
        return (
            np.concatenate([self.prompt, np.asarray(self.output, np.int32)]) if self.output else self.prompt
        )

    def append(self, token: int) -> Finish | None:
        """Take a new token; the reason, if it ends the sequence."""
        self.output.append(token)
        params = self.params
        if params.top_p_decay < 1.0:
            reset = token == params.top_p_reset_id
            self.top_p = params.top_p if reset else max(self.top_p * params.top_p_decay, params.top_p_min)
        if token == params.end_id:
            return Finish.END_ID
        if self._longest_stop and self._stops():
            return Finish.STOP_WORD
        if len(self.output) >= params.max_tokens:
            return Finish.LENGTH
        return None

    def _stops(self) -> bool:
        """Whether the last tokens equal a stop word; it may begin in the prompt, as in FasterTransformer."""
        tail = self.output[-self._longest_stop :]
        if len(tail) < self._longest_stop:
            missing = self._longest_stop - len(tail)
            tail = self.prompt[max(len(self.prompt) - missing, 0) :].tolist() + tail
        return any(
            tail[-len(word) :] == word for word in self.params.stop_words if 0 < len(word) <= len(tail)
        )

    def restart(self) -> None:
        """Give up the cache: everything known is computed again when the sequence gets a place again."""
        self.stage, self.slot, self.blocks, self.cached = Stage.WAITING, -1, [], 0
        if not self.embedding_done:
            self.embedding = None
