"""`LLM`: a checkpoint or a model repository as a Python object, with the names of vLLM's class."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.build_repo.cache import Conversion
from tridecode.tools.build_repo.find_repository import find_repository
from tridecode.tools.llm.local_engine import LocalEngine, logging_to
from tridecode.tools.llm.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from tridecode.tools.llm.params import BeamSearchParams, PoolingParams, SamplingParams
from tridecode.tools.llm.running import Running
from tridecode.tools.llm.submitter import Job, Params, Prompt, Submitter, is_one_prompt, params_of_each

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """Generates texts with one model, in processes that end with this one.

    model: a model repository, or a checkpoint, which is converted on first use: a folder, a .gguf file or a
    hub id. tensor_parallel_size: GPUs that share each layer. quantization: as `build-repo --quantize`.
    max_model_len: tokens of prompt and answer; max_num_seqs: sequences at a time; None: the engine's own
    choice. cache: folder of converted repositories. chat_template: a file that replaces the checkpoint's.
    log: a file for the lines of the engine's processes; None: stderr. start_timeout_s: longest wait for the
    engine.

    Methods may be called from several threads at once. Raises ConfigError and CheckpointError for a wrong
    argument, EngineDownError where the engine does not start.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tensor_parallel_size: int = 1,
        quantization: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        cache: str | Path | None = None,
        chat_template: str | Path | None = None,
        log: str | Path | None = None,
        start_timeout_s: float = 900.0,
    ):
        settings = {"max_sequence_tokens": max_model_len, "max_sequences": max_num_seqs}
        conversion = Conversion(
            quantization,
            tensor_parallel_size,
            settings=tuple(f"{name}={value}" for name, value in settings.items() if value is not None),
        )
        template = None if chat_template is None else Path(chat_template)
        if template is not None and not template.is_file():
            raise ConfigError(f"chat_template is {template}; wanted a file that exists")
        repository = find_repository(str(model), conversion, None if cache is None else Path(cache))
        self._repository = repository
        with logging_to(log):
            self._engine = LocalEngine(repository, template, start_timeout_s)
        self._submitter = Submitter(self._engine)
        self._closing = weakref.finalize(self, self._engine.close)  # at the latest when Python ends

    # ------------------------------------------------------------ whole answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str = "",
        add_special_tokens: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts together; the results have their order.

        sampling_params: of all prompts, or one for each; None: SamplingParams(). use_tqdm: show the progress
        on a terminal. adapter: name of a LoRA adapter. add_special_tokens: None: as the repository says.
        Raises the TridecodeError of the first prompt that fails; the others are cancelled.
        """
        items: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        params = params_of_each(sampling_params, len(items))
        jobs = [self._job(item, one, adapter, add_special_tokens) for item, one in zip(items, params)]
        return self._submitter.run(jobs, use_tqdm)

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
        is_one = len(messages) == 0 or isinstance(messages[0], Mapping)
        chats: list[Any] = [messages] if is_one else list(messages)
        values = {**(chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
        prompts: list[Prompt] = [self._render(chat, **values) for chat in chats]
        return self.generate(
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

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Any = None, **options: Any
    ) -> list[RequestOutput]:
        """`generate` for an event loop, which it does not block."""
        call = partial(self.generate, prompts, sampling_params, **{"use_tqdm": False, **options})
        return await asyncio.to_thread(call)

    async def achat(self, messages: Any, sampling_params: Any = None, **options: Any) -> list[RequestOutput]:
        """`chat` for an event loop, which it does not block."""
        call = partial(self.chat, messages, sampling_params, **{"use_tqdm": False, **options})
        return await asyncio.to_thread(call)

    # ------------------------------------------------------------ streams

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        adapter: str = "",
        add_special_tokens: bool | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the answer as it grows: the same RequestOutput each time, with all text so far.

        A caller that stops early, closes the generator or lets it go cancels the request.
        """
        news: queue.SimpleQueue[Running] = queue.SimpleQueue()
        job = self._job(prompt, sampling_params or SamplingParams(), adapter, add_special_tokens)
        running = self._submitter.begin(job, news.put, streaming=True)
        try:
            while not running.output.finished:
                news.get()
                if running.take():
                    yield running.output
        finally:
            self._submitter.end(running)

    def stream_chat(
        self, messages: Messages, sampling_params: Params | None = None, *, adapter: str = ""
    ) -> Iterator[RequestOutput]:
        """`stream` for a conversation."""
        return self.stream(self._render(messages), sampling_params, adapter=adapter, add_special_tokens=False)

    async def astream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        adapter: str = "",
        add_special_tokens: bool | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for an event loop."""
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Running] = asyncio.Queue()

        def notify(one: Running) -> None:
            loop.call_soon_threadsafe(news.put_nowait, one)

        job = self._job(prompt, sampling_params or SamplingParams(), adapter, add_special_tokens)
        running = await asyncio.to_thread(partial(self._submitter.begin, job, notify, streaming=True))
        try:
            while not running.output.finished:
                await news.get()
                if running.take():
                    yield running.output
        finally:
            self._submitter.end(running)

    # ------------------------------------------------------------ the rest

    @property
    def model_name(self) -> str:
        return self._engine.limits.model_name or self._repository.name

    @property
    def has_chat_template(self) -> bool:
        return self._engine.texts[0].chat_template() is not None

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self._engine.limits.max_sequence_tokens

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a text."""
        return next(self._engine.tokenizer.ids([text], self._special(add_special_tokens)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self._engine.tokenizer.text(list(token_ids))

    def close(self) -> None:
        """Disconnect from the engine, whose processes end."""
        self._closing()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _job(self, prompt: Prompt, params: Params, adapter: str, special: bool | None) -> Job:
        return Job(prompt, params, adapter, self._special(special))

    def _special(self, given: bool | None) -> bool:
        return self._engine.adds_special_tokens if given is None else given

    def _render(self, messages: Messages, **values: Any) -> str:
        return self._engine.texts[0].render(messages, **values)


def _embedding(found: RequestOutput, normalize: bool) -> EmbeddingRequestOutput:
    vector = found.embedding
    assert vector is not None
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return EmbeddingRequestOutput(
        found.request_id, found.prompt, found.prompt_token_ids, EmbeddingOutput(vector)
    )
