"""Answers jobs with an OpenAI service of this project."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from tridecode.backend.base.errors import (
    ConfigError,
    RequestCancelled,
    RequestError,
    TridecodeError,
    UnsupportedError,
)
from tridecode.tools.llm.jobs import Job, Messages, Notify, last_tokens, parts_of
from tridecode.tools.llm.outputs import CompletionOutput, RequestOutput, keep_best
from tridecode.tools.llm.params import PoolingParams, SamplingParams
from tridecode.tools.llm.service_bodies import (
    add_choices,
    check_params,
    embedding_body,
    generate_body,
    read_embedding,
)
from tridecode.tools.llm.service_client import ServiceClient

_GENERATE = "/inference/v1/generate"
#: requests at a time: the service's sequences and a quarter more, within these
_LEAST_ROOM, _MOST_ROOM, _USUAL_SEQUENCES = 4, 1024, 64


class ServiceRunning:
    """Collects what comes of a job; `take` adds it to its RequestOutput."""

    def __init__(self, output: RequestOutput, notify: Notify):
        self.output, self._notify = output, notify
        self.task: Future[Any] | None = None
        self.chosen: SamplingParams | None = None  # params of an answer with best_of
        self._news: deque[Any] = deque()
        self._failure: TridecodeError | None = None
        self._woken = False

    def put(self, news: Any) -> None:
        """Called in the client's loop. news: ids of the prompt, an answer, a vector, or an error; None: the
        end.
        """
        self._news.append(news)
        if not self._woken:
            self._woken = True
            self._notify(self)

    def fail(self, error: TridecodeError) -> None:
        """End it with an error; nothing more is taken."""
        self._failure = error

    def take(self) -> bool:
        self._woken = False  # before the news are read: later ones notify again
        changed = False
        while self._news and self._failure is None:
            news = self._news.popleft()
            changed = True
            if isinstance(news, TridecodeError):
                self._failure = news
            elif isinstance(news, list):
                self.output.prompt_token_ids = news
                changed = False
            elif isinstance(news, np.ndarray):
                self.output.embedding = news
            elif news is None:
                if self.chosen is not None and self.chosen.num_answers > self.chosen.n:
                    keep_best(self.output, self.chosen.n, self.chosen.logprobs is not None)
                self.output.finished = True
            else:
                add_choices(self.output, news)
        if self._failure is not None:
            raise self._failure
        return changed


class ServiceModel:
    """A model that a service serves. Used by any thread."""

    def __init__(self, url: str, api_key: str, model: str, timeout_s: float):
        """model: "": the service's first. Raises ConfigError and EngineDownError."""
        self._client = ServiceClient(url, api_key, timeout_s, _MOST_ROOM)
        self._ids, self._sessions = itertools.count(), itertools.count(1)
        try:
            card = self._card(model)
            self._name = str(card["id"])
            self._length = int(card["max_model_len"])
            sequences = int(card.get("max_num_seqs") or _USUAL_SEQUENCES)
            self._has_template = self._renders()
        except (KeyError, TypeError, ValueError):
            self.close()
            raise ConfigError(f"{url} is not a service of Tridecode: it names no max_model_len") from None
        except BaseException:
            self.close()
            raise
        self._room = max(_LEAST_ROOM, min(_MOST_ROOM, sequences + sequences // 4))

    @property
    def name(self) -> str:
        return self._name

    @property
    def has_chat_template(self) -> bool:
        return self._has_template

    @property
    def max_model_len(self) -> int:
        return self._length

    def room(self) -> int:
        return self._room

    def begin(self, job: Job, notify: Notify, streaming: bool = False) -> ServiceRunning:
        params, prompt = job.params, parts_of(job.prompt)
        check_params(params)
        if job.table is not None:
            raise UnsupportedError("a service takes no prompt tables; run the model with LLM(…) instead")
        if job.round is not None and job.round.memory_tokens:
            raise UnsupportedError("a service has no memory_tokens; run the model with LLM(…) instead")
        count = params.num_answers if isinstance(params, SamplingParams) else 1
        if streaming and isinstance(params, SamplingParams) and count > params.n:
            raise RequestError("best_of chooses among whole answers; wanted no stream with it")
        answers = [CompletionOutput(index) for index in range(count)]
        output = RequestOutput(str(next(self._ids)), prompt.text, prompt.ids or [], answers)
        running = ServiceRunning(output, notify)
        running.task = self._client.start(self._answer(job, running, streaming))
        return running

    def end(self, running: ServiceRunning) -> None:
        assert running.task is not None
        if not running.output.finished:
            running.fail(RequestCancelled("the request was cancelled"))
            running.task.cancel()

    def new_session(self) -> int:
        return next(self._sessions)

    def end_session(self, number: int) -> None:
        """The service keeps none: a round sends all tokens, whose keys and values its prefix cache has."""

    def encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        found: list[int] = self._client.call("/tokenize", _text_body(text, add_special_tokens))["tokens"]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        body = {"tokens": list(ids), "skip_special_tokens": True}
        return str(self._client.call("/detokenize", body)["prompt"])

    def render(self, messages: Messages, **values: Any) -> dict[str, Any]:
        tools = values.pop("tools", None)
        body = {"messages": list(messages), "chat_template_kwargs": values, "tools": tools}
        ids = self._client.call("/tokenize", body)["tokens"]
        text = self._client.call("/detokenize", {"tokens": ids})["prompt"]
        return {"prompt": text, "prompt_token_ids": ids}

    def close(self) -> None:
        self._client.close()

    # ------------------------------------------------------------ one job

    async def _answer(self, job: Job, running: ServiceRunning, streaming: bool) -> None:
        """Send a job's requests and put what comes. Runs in the client's loop."""
        try:
            ids = await self._prompt_ids(job)
            running.put(ids)
            model, params = job.adapter or self._name, job.params
            if isinstance(params, PoolingParams):
                body = embedding_body(ids, params, model)
                running.put(read_embedding(await self._client.send("/v1/embeddings", body)))
            else:
                assert isinstance(params, SamplingParams)
                room = self._length if job.round is None else job.round.room
                body = generate_body(ids, params, model, room - len(ids), streaming)
                if streaming:
                    async for event in self._client.stream(_GENERATE, body):
                        running.put(event)
                else:
                    running.put(await self._client.send(_GENERATE, body))
                    running.chosen = params
            running.put(None)
        except asyncio.CancelledError:
            running.put(RequestCancelled("the request was cancelled"))
            raise
        except TridecodeError as error:
            running.put(error)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            running.put(TridecodeError(f"{self._client.url} sent an answer without {error}"))

    async def _prompt_ids(self, job: Job) -> list[int]:
        prompt = parts_of(job.prompt)
        ids = prompt.ids
        if ids is None:
            body = _text_body(prompt.text or "", job.add_special_tokens)
            ids = (await self._client.send("/tokenize", body))["tokens"]
        ids = last_tokens(ids, job.params)
        if job.round is None:
            return ids
        ids = job.round.history + ids
        wanted = job.params.max_tokens or 1
        if len(ids) + wanted > job.round.room:
            found = f"the session has {len(ids):,} tokens with its new ones, and max_tokens is {wanted:,}"
            raise RequestError(f"{found}; this session has room for {job.round.room:,} in all")
        return ids

    def _card(self, model: str) -> dict[str, Any]:
        cards: list[dict[str, Any]] = self._client.call("/v1/models")["data"]
        names = [str(card["id"]) for card in cards]
        if model and model not in names:
            raise ConfigError(
                f"the model {model!r} is not served; {self._client.url} serves {', '.join(names)}"
            )
        return cards[names.index(model) if model else 0]

    def _renders(self) -> bool:
        """Return whether the service renders chats; a template may refuse this one, too."""
        try:
            self._client.call("/tokenize", {"messages": [{"role": "user", "content": "a"}]})
        except RequestError:
            return False
        return True


def _text_body(text: str, special: bool | None) -> dict[str, Any]:
    return {"prompt": text, "add_special_tokens": special}
