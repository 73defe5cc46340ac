"""`LLM`: a checkpoint or a model repository as a Python object, with the names of vLLM's class."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.llm.jobs import (
    Job,
    Messages,
    Model,
    Params,
    Prompt,
    is_one_prompt,
    params_of_each,
    tables_of_each,
)
from tridecode.tools.llm.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from tridecode.tools.llm.params import BeamSearchParams, PoolingParams, SamplingParams
from tridecode.tools.llm.prompt_table import PromptTable
from tridecode.tools.llm.run_jobs import run_jobs, run_jobs_async
from tridecode.tools.llm.session import Session
from tridecode.tools.llm.streams import stream_job, stream_job_async

Table = PromptTable | str | None


class LLM:
    """Generates texts with one model, in processes that end with this one, or by a service (`connect`).

    model: a model repository, or a checkpoint, which is converted on first use: a folder, a .gguf file or a
    hub id. settings: see open_model. Methods may be called from several threads at once, and inside a running
    event loop, which those without an `a` in front block. A forked child needs an LLM of its own.

    Raises ConfigError and CheckpointError for a wrong argument, EngineDownError where the engine does not
    start.
    """

    def __init__(self, model: str | Path, **settings: Any):
        from tridecode.tools.llm.open_model import open_model  # not needed for a service

        self._use(open_model(model, **settings))

    @classmethod
    def connect(cls, url: str, *, api_key: str = "", model: str = "", timeout_s: float = 600.0) -> LLM:
        """Return an LLM whose answers come from a running service, `tridecode front` or `serve`.

        url: as http://localhost:9000. model: its name; "": the service's first. timeout_s: longest silence of
        the service. A service has no beam searches and no prompt tables. Raises ConfigError for a wrong
        argument or key, EngineDownError where nothing answers.
        """
        from tridecode.tools.llm.service_model import ServiceModel  # needs httpx

        connected = cls.__new__(cls)
        connected._use(ServiceModel(url, api_key, model, timeout_s))
        return connected

    def _use(self, model: Model) -> None:
        self._model, self._process = model, os.getpid()
        self._closing = weakref.finalize(self, _close, model, os.getpid())  # at the latest when Python ends

    # ------------------------------------------------------------ whole answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str = "",
        add_special_tokens: bool | None = None,
        prompt_table: Table | Sequence[Table] = None,
    ) -> list[RequestOutput]:
        """Answer prompts together; the results have their order.

        sampling_params: of all prompts, or one for each; None: SamplingParams(). use_tqdm: show the progress
        on a terminal. adapter: name of a LoRA adapter. add_special_tokens: None: as the repository says.
        prompt_table: trained vectors, or the name of a task of the repository; of all prompts, or one for
        each. Raises the TridecodeError of the first prompt that fails; the others are cancelled.
        """
        jobs = self._jobs(prompts, sampling_params, adapter, add_special_tokens, prompt_table)
        return run_jobs(self._model, jobs, use_tqdm)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = False,
        adapter: str = "",
        add_special_tokens: bool | None = None,
        prompt_table: Table | Sequence[Table] = None,
    ) -> list[RequestOutput]:
        """`generate` for an event loop, which it does not block. A task that is cancelled cancels its
        prompts."""
        jobs = self._jobs(prompts, sampling_params, adapter, add_special_tokens, prompt_table)
        return await run_jobs_async(self._model, jobs, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations by the checkpoint's chat template. messages: one conversation, or several."""
        prompts = self._rendered(messages, tools, chat_template_kwargs)
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, adapter=adapter, add_special_tokens=False
        )

    async def achat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = False,
        adapter: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`chat` for an event loop, which it does not block."""
        prompts = await asyncio.to_thread(self._rendered, messages, tools, chat_template_kwargs)
        return await self.agenerate(
            prompts, sampling_params, use_tqdm=use_tqdm, adapter=adapter, add_special_tokens=False
        )

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[RequestOutput]:
        """Search the most likely answers to each prompt; `outputs` are the beams, best first."""
        return self.generate(prompts, params, use_tqdm=False)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str = "",
        add_special_tokens: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector for each prompt, its pooled hidden state after the final norm."""
        wanted = pooling_params or PoolingParams()
        found = self.generate(
            prompts, wanted, use_tqdm=use_tqdm, adapter=adapter, add_special_tokens=add_special_tokens
        )
        return [_embedding(one, wanted.normalize) for one in found]

    async def aembed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """`embed` for an event loop, which it does not block."""
        wanted = pooling_params or PoolingParams()
        return [_embedding(one, wanted.normalize) for one in await self.agenerate(prompts, wanted, **options)]

    # ------------------------------------------------------------ streams

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        adapter: str = "",
        add_special_tokens: bool | None = None,
        prompt_table: Table = None,
    ) -> Iterator[RequestOutput]:
        """Yield the answer as it grows: the same RequestOutput each time, with all text so far.

        A caller that stops early, closes the generator or lets it go cancels the request.
        """
        return stream_job(
            self._model, self._job(prompt, sampling_params, adapter, add_special_tokens, prompt_table)
        )

    def astream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        adapter: str = "",
        add_special_tokens: bool | None = None,
        prompt_table: Table = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`stream` for an event loop."""
        return stream_job_async(
            self._model, self._job(prompt, sampling_params, adapter, add_special_tokens, prompt_table)
        )

    def stream_chat(
        self, messages: Messages, sampling_params: Params | None = None, *, adapter: str = ""
    ) -> Iterator[RequestOutput]:
        """`stream` for a conversation."""
        prompt = self._model.render(messages)
        return self.stream(prompt, sampling_params, adapter=adapter, add_special_tokens=False)

    async def astream_chat(
        self, messages: Messages, sampling_params: Params | None = None, *, adapter: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """`stream_chat` for an event loop."""
        prompt = await asyncio.to_thread(self._model.render, messages)
        stream = self.astream(prompt, sampling_params, adapter=adapter, add_special_tokens=False)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    def session(
        self, max_tokens: int | None = None, *, memory_tokens: int = 0, idle_s: float = 600.0
    ) -> Session:
        """Return a conversation whose rounds send their new tokens only.

        max_tokens: of all rounds; None: max_model_len. memory_tokens: number of last tokens that a token
        attends to; 0: all. idle_s: after this long without a round the engine frees its memory.
        """
        self._check_process()
        return Session(self._model, max_tokens or self.max_model_len, memory_tokens, idle_s)

    # ------------------------------------------------------------ the rest

    @property
    def model_name(self) -> str:
        return self._model.name

    @property
    def has_chat_template(self) -> bool:
        return self._model.has_chat_template

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self._model.max_model_len

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a text."""
        return self._model.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self._model.decode(token_ids)

    def close(self) -> None:
        """Disconnect. The processes of an engine that this process has started end."""
        self._closing()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _jobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None,
        adapter: str,
        special: bool | None,
        tables: Table | Sequence[Table],
    ) -> list[Job]:
        self._check_process()
        items: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        params = params_of_each(sampling_params, len(items))
        each = tables_of_each(tables, len(items))
        return [Job(item, one, adapter, special, table) for item, one, table in zip(items, params, each)]

    def _job(
        self, prompt: Prompt, params: Params | None, adapter: str, special: bool | None, table: Table
    ) -> Job:
        self._check_process()
        return Job(prompt, params or SamplingParams(), adapter, special, table)

    def _rendered(
        self,
        messages: Messages | Sequence[Messages],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any] | None,
    ) -> list[Prompt]:
        self._check_process()
        is_one = len(messages) == 0 or isinstance(messages[0], Mapping)
        chats: list[Any] = [messages] if is_one else list(messages)
        more = {**(values or {}), **({"tools": tools} if tools else {})}
        return [self._model.render(chat, **more) for chat in chats]

    def _check_process(self) -> None:
        """Raise ConfigError in a forked child, which has neither the threads nor the sockets of this LLM."""
        if os.getpid() != self._process:
            raise ConfigError(
                f"this LLM belongs to the process {self._process}, and {os.getpid()} is a fork of it; wanted "
                "an LLM of its own, and a start by multiprocessing's spawn"
            )


def _close(model: Model, process: int) -> None:
    if os.getpid() == process:  # a forked child leaves the engine to its parent
        model.close()


def _embedding(found: RequestOutput, normalize: bool) -> EmbeddingRequestOutput:
    vector = found.embedding
    assert vector is not None
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return EmbeddingRequestOutput(
        found.request_id, found.prompt, found.prompt_token_ids, EmbeddingOutput(vector)
    )
