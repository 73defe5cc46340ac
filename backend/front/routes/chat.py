"""/v1/chat/completions: messages in, by the checkpoint's template, a message out."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tridecode.backend.chat.tools import ToolPlan
from tridecode.backend.front.answering import answer
from tridecode.backend.front.calls import Call
from tridecode.backend.front.chats.tool_answers import chunks_of, message_of
from tridecode.backend.front.errors import bad_request
from tridecode.backend.front.fields.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from tridecode.backend.front.fields.sampling import INT32_MAX
from tridecode.backend.front.logprobs import chat_logprobs
from tridecode.backend.front.model import ServedModel
from tridecode.backend.front.prompt_scores import check_prompt_logprobs, with_ids
from tridecode.backend.front.reading import Pieces
from tridecode.backend.front.sampling import refuse_unsupported, sampled_request, sampling_params, stop_words
from tridecode.backend.front.service import FrontService
from tridecode.backend.front.structured import Constraint, chat_constraint
from tridecode.backend.front.tally import Row, Tally
from tridecode.backend.front.tally_writer import TallyWriter
from tridecode.backend.front.text_event import event
from tridecode.backend.service.prompt_scores import PromptScores
from tridecode.backend.service.text_request import FieldNames, TextRequest
from tridecode.backend.text.completion import Piece

NAMES = ChatRequest.__struct_fields__


async def chat_completions(request: Request) -> Response:
    front = FrontService.of(request)
    call, wanted = await front.begin(request, "chatcmpl", ChatRequest)
    try:
        silent = refuse_unsupported(wanted)
        name, adapter = front.model.find(wanted.model)
        limits = front.model.limits()
        prompt, plan = await front.model.chats.prompt(wanted)
        constraint = chat_constraint(wanted, plan, front.model.tokenizer, limits, silent)
        asked = _text_request(front.model, wanted, prompt, adapter, plan, constraint)
        if wanted.prompt_logprobs is not None:
            asked = await with_ids(front.model, asked)
    except Exception as error:
        raise front.failed(call, error, NAMES) from error
    return await answer(
        front,
        request,
        call,
        asked,
        ChatWriter(front.model, call, wanted, asked, name, plan),
        streaming=bool(wanted.stream),
        timeout_s=wanted.timeout_s or 0.0,
        names=NAMES,
        silent=silent,
    )


def _text_request(
    model: ServedModel,
    wanted: ChatRequest,
    prompt: str,
    adapter: str,
    plan: ToolPlan | None,
    constraint: Constraint,
) -> TextRequest:
    limits = model.limits()
    given = wanted.max_tokens if wanted.max_completion_tokens is None else wanted.max_completion_tokens
    if wanted.top_logprobs is not None and not wanted.logprobs:
        raise bad_request("top_logprobs is sent and logprobs is not true", "top_logprobs")
    check_prompt_logprobs(wanted)
    tops = (wanted.top_logprobs or 0) if wanted.logprobs else -1
    count = INT32_MAX if given is None else given
    names = FieldNames(
        "messages",
        "max_tokens" if wanted.max_completion_tokens is None else "max_completion_tokens",
        "stop",
        context_logits="prompt_logprobs",
    )
    params = sampling_params(wanted, model.texts, limits, count, wanted.n or 1, tops)
    if wanted.prompt_logprobs is not None:
        params = msgspec.structs.replace(params, return_context_logits=True)
    return sampled_request(
        wanted,
        limits,
        [prompt],
        [params],
        (*stop_words(wanted), *(() if plan is None else plan.stop)),
        adapter,
        names=names,
        constraint=constraint,
        shown_tokens=() if plan is None else plan.shown_tokens,
        log_probs=tops >= 0,
        add_special_tokens=bool(wanted.add_special_tokens),
        cut=given is None,
    )


def _text_choice(index: int, text: str) -> ChunkChoice:
    return ChunkChoice(index, Delta(content=text))


class ChatWriter(TallyWriter):
    """The answer of /v1/chat/completions."""

    def __init__(
        self,
        model: ServedModel,
        call: Call,
        wanted: ChatRequest,
        asked: TextRequest,
        name: str,
        plan: ToolPlan | None,
    ):
        super().__init__(model, call, Tally(1, wanted.n or 1), wanted.stream, wanted.stream_options)
        self._wanted, self._name = wanted, name
        self._parsers = [] if plan is None else [plan.parser() for _ in range(wanted.n or 1)]
        self._begun: set[int] = set()
        (prompt,), count = asked.prompts, wanted.prompt_logprobs
        self._scores = None
        if count is not None and not isinstance(prompt, str):
            self._scores = PromptScores(prompt, count, model.limits().vocab_size)
        self.heavy = self._scores is not None

    def take(self, pieces: Pieces) -> bytes:
        if self._scores is not None:
            for group in pieces:
                for _, extra in group[0].extras if 0 in group else ():
                    self._scores.add(extra.context_logits)
        return super().take(pieces)

    # ------------------------------------------------------------ a stream

    def _events(self, index: int, piece: Piece) -> bytes:
        found = b""
        if index not in self._begun:
            self._begun.add(index)
            found += self._chunk(ChunkChoice(index, Delta("assistant", "")))
        reason = piece.finish_reason
        if piece.text and not (reason or piece.tops or self._parsers):
            return found + self._text_event(index, partial(_text_choice, index), piece.text)
        if self._parsers:
            parser = self._parsers[index]
            deltas = parser.feed(piece.text)
            if reason:
                deltas += parser.end(reason == "length")
                reason = parser.finish_reason(reason)
            chunks = chunks_of(deltas)
        else:
            chunks = [Delta(content=piece.text)] if piece.text else []
        if piece.tops and not chunks:
            chunks = [Delta(content="")]
        logprobs = self._logprobs(piece.tops)
        for delta in chunks:
            found += self._chunk(ChunkChoice(index, delta, None, logprobs))
            logprobs = None
        if reason:
            found += self._chunk(ChunkChoice(index, Delta(), reason))
        return found

    def _chunk(self, choice: ChunkChoice) -> bytes:
        return event(self._body([choice], self._event_usage))

    def _body(self, choices: list[ChunkChoice], usage: Any) -> ChatChunk:
        fingerprint = self._model.settings.fingerprint
        return ChatChunk(self._call.id, self._call.created, self._name, fingerprint, choices, usage)

    # ------------------------------------------------------------ a whole answer

    def whole(self) -> bytes:
        choices = [self._choice(index, row) for index, row in enumerate(self._tally.rows)]
        answer = ChatCompletion(
            self._call.id,
            self._call.created,
            self._name,
            self._model.settings.fingerprint,
            choices,
            self._tally.usage,
        )
        if self._scores is not None:
            texts = self._model.token_texts()
            answer.prompt_logprobs = self._scores.alternatives(texts, self._scores.count)
        return msgspec.json.encode(answer)

    def _choice(self, index: int, row: Row) -> ChatChoice:
        message, reason = AnswerMessage(row.text), row.finish_reason
        if self._parsers:
            parser = self._parsers[index]
            message = message_of(parser, row.text, reason)
            reason = parser.finish_reason(reason)
        return ChatChoice(index, message, reason or None, self._logprobs(row.tops))

    def _logprobs(self, steps: Any) -> ChatLogprobs | None:
        if not self._wanted.logprobs:
            return None
        texts = self._model.token_texts(self._wanted.skip_special_tokens)
        return chat_logprobs(steps, self._wanted.top_logprobs or 0, texts)
