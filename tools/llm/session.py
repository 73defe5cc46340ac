"""A conversation whose rounds continue each other's tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from tridecode.backend.base.errors import RequestError, SessionGoneError
from tridecode.tools.llm.jobs import Job, Model, Prompt, Round, parts_of
from tridecode.tools.llm.outputs import RequestOutput
from tridecode.tools.llm.params import SamplingParams
from tridecode.tools.llm.run_jobs import run_jobs
from tridecode.tools.llm.streams import stream_job


class Session:
    """Made by `LLM.session`. A round sends its new tokens only; the model sees the whole conversation.

    The end token of a round is replaced by the next one. A round that fails, or whose stream is left, changes
    nothing. The engine frees an idle session's memory after idle_s; the next round computes it again, except
    with memory_tokens, where it raises SessionGoneError.
    """

    def __init__(self, model: Model, max_tokens: int, memory_tokens: int, idle_s: float):
        """See LLM.session. Raises RequestError for numbers that do not fit the model."""
        limit = model.max_model_len
        if not 0 < max_tokens <= limit:
            raise RequestError(f"max_tokens of a session is {max_tokens}; wanted 1 to {limit:,}")
        if not 0 <= memory_tokens <= max_tokens:
            raise RequestError(f"memory_tokens is {memory_tokens}; wanted 0 to {max_tokens:,}")
        if not idle_s > 0:
            raise RequestError(f"idle_s is {idle_s}; wanted more than 0")
        self._model, self._room, self._memory, self._idle_s = model, max_tokens, memory_tokens, idle_s
        self._tokens: list[int] = []
        self._number: int | None = None  # None: the engine does not have it
        self._busy = threading.Lock()

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the conversation, without an end token that the next round replaces."""
        return list(self._tokens)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str = "",
        add_special_tokens: bool | None = None,
    ) -> RequestOutput:
        """Add a prompt to the conversation and return the answer to it.

        adapter: the same in every round. add_special_tokens: None: as the repository says in the first round,
        none in later ones. Raises RequestError while another round runs.
        """
        with self._turn(prompt, sampling_params, adapter, add_special_tokens) as turn:
            job = self._job(turn)
            try:
                (output,) = run_jobs(self._model, [job], shows=False)
            except SessionGoneError as error:
                job = self._again(turn, error)
                (output,) = run_jobs(self._model, [job], shows=False)
            self._take(turn, job, output)
            return output

    async def agenerate(self, prompt: Prompt, sampling_params: Any = None, **options: Any) -> RequestOutput:
        """`generate` for an event loop, which it does not block."""
        return await asyncio.to_thread(partial(self.generate, prompt, sampling_params, **options))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str = "",
        add_special_tokens: bool | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the answer as it grows, as LLM.stream does."""
        with self._turn(prompt, sampling_params, adapter, add_special_tokens) as turn:
            job = self._job(turn)
            try:
                yield from self._streamed(turn, job)
            except SessionGoneError as error:  # instead of the first tokens
                yield from self._streamed(turn, self._again(turn, error))

    def close(self) -> None:
        """End the session; its memory in the engine is free at once."""
        if self._number is not None:
            self._model.end_session(self._number)
        self._number, self._room = None, 0

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ a round

    @contextlib.contextmanager
    def _turn(
        self, prompt: Prompt, params: SamplingParams | None, adapter: str, special: bool | None
    ) -> Iterator[_Turn]:
        if not self._room:
            raise RequestError("the session is closed")
        wanted = params or SamplingParams()
        if wanted.n != 1 or wanted.stop_words():
            found = f"n is {wanted.n}" if wanted.n != 1 else "stop has texts"
            raise RequestError(
                f"{found} in a session; wanted one answer, and stop_token_ids instead of texts"
            )
        if not self._busy.acquire(blocking=False):
            raise RequestError("a round of this session is running; wait for its end")
        try:
            parts = parts_of(prompt)
            ids = parts.ids
            if ids is None:
                first = special is None and not self._tokens
                ids = self._model.encode(parts.text or "", None if first else bool(special))
            if not ids:
                raise RequestError("a round of a session has no token; wanted one or more")
            yield _Turn(parts.text, ids, wanted, adapter)
        finally:
            self._busy.release()

    def _job(self, turn: _Turn) -> Job:
        """Return the job of a round; one that begins has all tokens so far as its prompt."""
        begins = self._number is None
        number = self._model.new_session() if self._number is None else self._number
        ids = self._tokens + turn.ids if begins else turn.ids
        history = [] if begins else list(self._tokens)
        place = Round(number, self._room, self._memory, self._idle_s, history, begins)
        return Job({"prompt_token_ids": ids}, turn.params, turn.adapter, False, None, place)

    def _again(self, turn: _Turn, error: SessionGoneError) -> Job:
        """Return the job that begins the session again in the engine. Raises the error where the tokens do
        not fit into memory_tokens.
        """
        if self._memory:
            raise error
        self._number = None
        return self._job(turn)

    def _streamed(self, turn: _Turn, job: Job) -> Iterator[RequestOutput]:
        for output in stream_job(self._model, job):
            if output.finished:
                self._take(turn, job, output)
            yield output

    def _take(self, turn: _Turn, job: Job, output: RequestOutput) -> None:
        """Store the tokens of a round that has ended."""
        assert job.round is not None
        (answer,) = output.outputs
        new = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
        self._number = job.round.session
        self._tokens += [*turn.ids, *new]
        output.prompt, output.prompt_token_ids = turn.text, turn.ids


@dataclass(frozen=True)
class _Turn:
    """The new part of a round. text: None where ids were given."""

    text: str | None
    ids: list[int]
    params: SamplingParams
    adapter: str
