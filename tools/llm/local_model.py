"""Turns prompts of `LLM` into running requests."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from tridecode.backend.base.errors import RequestError
from tridecode.backend.service.text_request import FieldNames, TextRequest
from tridecode.backend.text.completion import Answer
from tridecode.backend.text.token_texts import TokenTexts
from tridecode.tools.llm.local_engine import LocalEngine
from tridecode.tools.llm.outputs import CompletionOutput, RequestOutput
from tridecode.tools.llm.params import BeamSearchParams, PoolingParams, SamplingParams
from tridecode.tools.llm.progress import PromptProgress
from tridecode.tools.llm.running import Running

#: a text, its token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}
Prompt = Union[str, Sequence[int], Mapping[str, Any]]
Params = Union[SamplingParams, BeamSearchParams, PoolingParams]
Notify = Callable[[Running], None]
_FIELDS = FieldNames("prompt", "max_tokens", "stop", "structured_outputs")


@dataclass(frozen=True)
class Job:
    """One prompt with its parameters. adapter: name of a LoRA adapter; "": none."""

    prompt: Prompt
    params: Params
    adapter: str
    add_special_tokens: bool


class Submitter:
    """Submits jobs to an engine, and counts those that run. Used by any thread."""

    def __init__(self, engine: LocalEngine):
        self._engine = engine
        self._ids = itertools.count()
        self._texts: dict[bool, TokenTexts] = {}

    def begin(self, job: Job, notify: Notify, streaming: bool = False) -> Running:
        """Submit a job, whose end `end` must follow. notify: see Running. Raises RequestError."""
        number = self._engine.choose()
        try:
            return self._submit(job, notify, streaming, number)
        except BaseException:
            self._engine.ended(number)
            raise

    def end(self, running: Running) -> None:
        """Note that a request has ended; one that has not is cancelled."""
        running.cancel()
        self._engine.ended(running.engine)

    def run(self, jobs: Sequence[Job], shows: bool) -> list[RequestOutput]:
        """Run jobs, as many at once as the engine queues. shows: the progress, on a terminal.

        Raises the error of the first one that fails; the others are cancelled.
        """
        news: queue.SimpleQueue[Running] = queue.SimpleQueue()
        waiting = iter(jobs)
        running: set[Running] = set()
        results: list[RequestOutput] = []

        def fill() -> None:
            while len(running) < self._engine.room() and (job := next(waiting, None)) is not None:
                one = self.begin(job, news.put)
                running.add(one)
                results.append(one.output)

        with PromptProgress(len(jobs), shows) as bar:
            try:
                fill()
                while running:
                    one = news.get()
                    if one in running and one.take() and one.output.finished:
                        running.remove(one)
                        self.end(one)
                        bar.add(sum(len(answer.token_ids) for answer in one.output.outputs))
                        fill()
            finally:
                for one in running:
                    self.end(one)
        return results

    def _submit(self, job: Job, notify: Notify, streaming: bool, number: int) -> Running:
        texts, params = self._engine.texts[number], job.params
        limits = texts.engine.limits()
        self._engine.check_adapter(job.adapter)
        text, ids = self._text_and_ids(job)
        words, wanted = params.stop_words(), params.engine_params(texts, limits)
        asked = TextRequest(
            [ids],
            [wanted],
            [words],
            [job.adapter],
            [params.priority],
            streaming=streaming,
            exclude=True,
            show_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special=params.skip_special_tokens,
            log_probs=params.logprobs is not None,
            cut=params.max_tokens is None,
            structured_outputs=[params.output()],
            names=_FIELDS,
        )
        texts.check_texts(asked, limits)
        answers = [CompletionOutput(index) for index in range(wanted.num_sequences)]
        output = RequestOutput(str(next(self._ids)), text, ids, answers)
        shown = None if params.logprobs is None else self._token_texts(params.skip_special_tokens)
        running = Running(texts.engine.link, output, notify, streaming or bool(words), shown, number)
        prepared = texts.prepare(asked, running, limits)
        running.begin(Answer(prepared.rows, streaming, ends=True))
        texts.engine.submit(running, prepared.submissions, timeout_s=params.timeout_s)
        return running

    def _text_and_ids(self, job: Job) -> tuple[str | None, list[int]]:
        text, ids = _parts(job.prompt)
        if ids is None:
            ids = next(self._engine.tokenizer.ids([text or ""], job.add_special_tokens))
        keep = job.params.truncate_prompt_tokens or 0
        return text, ids[-keep:] if keep > 0 else ids

    def _token_texts(self, skip_special: bool) -> TokenTexts:
        if skip_special not in self._texts:
            self._texts[skip_special] = TokenTexts(self._engine.tokenizer.view_of(skip_special))
        return self._texts[skip_special]


def is_one_prompt(prompts: Any) -> bool:
    """Return whether it is one prompt, not a list of some."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return len(prompts) > 0 and all(type(item) is int for item in prompts)


def params_of_each(params: Params | Sequence[Params] | None, count: int) -> list[Params]:
    """Return the parameters of each prompt. Raises RequestError if their number is wrong."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, (SamplingParams, BeamSearchParams, PoolingParams)):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; wanted one, or one for each")
    return list(params)


def _parts(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Return a prompt's text and its ids; one of them may be None."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, _ids(prompt)
    if not prompt or set(prompt) - {"prompt", "prompt_token_ids"}:
        raise RequestError(f"a prompt has the keys {sorted(prompt)}; wanted prompt or prompt_token_ids")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt is {type(text).__name__}; wanted a text")
    return text, None if ids is None else _ids(ids)


def _ids(values: Any) -> list[int]:
    ids = list(values)
    wrong = next((value for value in ids if type(value) is not int), None)
    if wrong is not None or not ids:
        raise RequestError(f"a prompt has the token id {wrong!r}; wanted one whole number or more")
    return ids
