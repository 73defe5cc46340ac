"""Answers jobs with an engine of this machine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from tridecode.backend.base.errors import ContextLengthError, RequestError, UnsupportedError
from tridecode.backend.service.engine_service import Submission
from tridecode.backend.service.prompt_scores import PromptScores
from tridecode.backend.service.text_request import FieldNames, TextRequest
from tridecode.backend.text.completion import Answer
from tridecode.backend.text.token_texts import TokenTexts
from tridecode.backend.wire.messages import SamplingParams as EngineParams
from tridecode.backend.wire.messages import SessionRound
from tridecode.tools.llm.jobs import Job, Messages, Notify, Round, last_tokens, parts_of
from tridecode.tools.llm.local_engine import LocalEngine
from tridecode.tools.llm.outputs import CompletionOutput, RequestOutput, keep_best
from tridecode.tools.llm.params import SamplingParams
from tridecode.tools.llm.prompt_table import row_prompt
from tridecode.tools.llm.running import Running

_FIELDS = FieldNames("prompt", "max_tokens", "stop", "structured_outputs", context_logits="prompt_logprobs")


class LocalModel:
    """Submits jobs to an engine, and counts those that run. Used by any thread.

    name: of a model whose config.ini names none.
    """

    def __init__(self, engine: LocalEngine, name: str):
        self.engine = engine
        self._name = name
        self._ids, self._sessions = itertools.count(), itertools.count(1)
        self._texts: dict[bool, TokenTexts] = {}

    @property
    def name(self) -> str:
        return self.engine.limits.model_name or self._name

    @property
    def has_chat_template(self) -> bool:
        return self.engine.texts[0].chat_template() is not None

    @property
    def max_model_len(self) -> int:
        return self.engine.limits.max_sequence_tokens

    def room(self) -> int:
        return self.engine.room()

    def begin(self, job: Job, notify: Notify, streaming: bool = False) -> Running:
        # a session stays with its engine
        number = self.engine.choose(None if job.round is None else job.round.session)
        try:
            return self._submit(job, notify, streaming, number)
        except BaseException:
            self.engine.ended(number)
            raise

    def end(self, running: Running) -> None:
        running.cancel()
        self.engine.ended(running.engine)

    def new_session(self) -> int:
        return next(self._sessions)

    def end_session(self, number: int) -> None:
        self.engine.end_session(number)

    def encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        return next(self.engine.tokenizer.ids([text], self._special(add_special_tokens)))

    def decode(self, ids: Sequence[int]) -> str:
        return self.engine.tokenizer.text(list(ids))

    def render(self, messages: Messages, **values: Any) -> str:
        return self.engine.texts[0].render(messages, **values)

    def close(self) -> None:
        self.engine.close()

    # ------------------------------------------------------------ one job

    def _submit(self, job: Job, notify: Notify, streaming: bool, number: int) -> Running:
        texts, params = self.engine.texts[number], job.params
        limits = texts.engine.limits()
        self.engine.check_adapter(job.adapter)
        text, ids = self._text_and_ids(job)
        scored = params.prompt_logprobs is not None
        chosen = params.n if isinstance(params, SamplingParams) and params.num_answers > params.n else 0
        if chosen and streaming:
            raise RequestError("best_of chooses among whole answers; wanted no stream with it")
        if scored and job.table is not None:
            raise UnsupportedError("prompt_logprobs is set and a prompt table is given; wanted one of them")
        words, wanted = params.stop_words(), params.engine_params(texts, limits)
        if job.round is not None:
            wanted = _within(job.round, wanted, len(ids), params.max_tokens is None)
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
            log_probs=wanted.top_log_probs >= 0,
            tables=() if job.table is None else (row_prompt(job.table, limits),),
            cut=params.max_tokens is None,
            structured_outputs=[params.output()],
            names=_FIELDS,
        )
        texts.check_texts(asked, limits)
        answers = [CompletionOutput(index) for index in range(wanted.num_sequences)]
        output = RequestOutput(str(next(self._ids)), text, ids, answers)
        shown = None
        if scored or wanted.top_log_probs >= 0:
            shown = self._token_texts(params.skip_special_tokens)
        scores = PromptScores(ids, params.prompt_logprobs or 0, limits.vocab_size) if scored else None
        keep = partial(keep_best, n=chosen, shows=params.logprobs is not None) if chosen else _keep_all
        follows = streaming or scored or bool(words)
        running = Running(texts.engine.link, output, notify, follows, shown, number, scores, keep)
        prepared = texts.prepare(asked, running, limits)
        submissions = prepared.submissions
        if job.round is not None:
            submissions = [_in_session(job.round, one) for one in submissions]
        running.begin(Answer(prepared.rows, streaming, ends=True))
        texts.engine.submit(running, submissions, timeout_s=params.timeout_s)
        return running

    def _text_and_ids(self, job: Job) -> tuple[str | None, list[int]]:
        prompt = parts_of(job.prompt)
        ids = prompt.ids
        if ids is None:
            ids = self.encode(prompt.text or "", job.add_special_tokens)
        return prompt.text, last_tokens(ids, job.params)

    def _special(self, given: bool | None) -> bool:
        return self.engine.adds_special_tokens if given is None else given

    def _token_texts(self, skip_special: bool) -> TokenTexts:
        if skip_special not in self._texts:
            self._texts[skip_special] = TokenTexts(self.engine.tokenizer.view_of(skip_special))
        return self._texts[skip_special]


def _keep_all(output: RequestOutput) -> None:
    """Leave all answers as they are."""


def _within(round_: Round, wanted: EngineParams, new: int, cut: bool) -> EngineParams:
    """Return the parameters of a round. new: tokens of its prompt. cut: max_tokens may be reduced.

    Raises RequestError for a round that does not fit into the session.
    """
    if not new:
        raise RequestError("a round of a session has no token; wanted one or more")
    room = round_.room - len(round_.history) - new
    if room < (1 if cut else wanted.max_tokens):
        found = f"the session has {len(round_.history):,} tokens, prompt has {new:,}"
        more = "" if cut else f" and max_tokens is {wanted.max_tokens:,}"
        raise ContextLengthError(f"{found}{more}; this session has room for {round_.room:,} in all")
    return msgspec.structs.replace(wanted, max_tokens=min(room, wanted.max_tokens))


def _in_session(round_: Round, submission: Submission) -> Submission:
    session = SessionRound(
        round_.session,
        round_.room,
        [] if round_.begins else [len(round_.history)],
        round_.memory_tokens,
        round_.idle_s,
    )
    return replace(submission, session=session, history=[] if round_.begins else [round_.history])
