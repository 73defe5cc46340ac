"""Serves text requests: limits, tokenising, completions with stop words, submission to the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tridecode.backend.base.errors import RequestCancelled, RequestError, TridecodeError
from tridecode.backend.chat.chat_template import ChatTemplate
from tridecode.backend.chat.templates import TemplateFault
from tridecode.backend.service import learned_prompts
from tridecode.backend.service import limits as request_limits
from tridecode.backend.service.client_request import ClientRequest
from tridecode.backend.service.engine_service import EngineService, Submission
from tridecode.backend.service.error_texts import internal_error
from tridecode.backend.service.learned_prompts import RowPrompt
from tridecode.backend.service.limits import text_limits
from tridecode.backend.service.sampling_rules import model_ends
from tridecode.backend.service.structured_fields import check_output, renamed
from tridecode.backend.service.text_request import TextRequest, check_texts
from tridecode.backend.service.text_stream import TextStream
from tridecode.backend.service.text_tokenizer import TextTokenizer
from tridecode.backend.text.completion import Answer, Completion, Siblings
from tridecode.backend.text.encoding import bad_word_ids
from tridecode.backend.text.stop_words import StopAutomaton
from tridecode.backend.wire.messages import Event, Limits, SamplingParams, SequenceRequest
from tridecode.backend.wire.structured_output import StructuredOutput

_log = logging.getLogger("tridecode.service")


@dataclass(frozen=True)
class PreparedText:
    """A text request that is ready for the engine. rows: one for each sequence, texts in order."""

    rows: list[Completion]
    submissions: list[Submission]


class TextService:
    """Turns a request of B texts into B engine requests, so that each can be stopped independently."""

    def __init__(
        self,
        engine: EngineService,
        tokenizer: TextTokenizer,
        stop_ids: Sequence[int] = (),
        max_prompt_bytes: int | None = None,
        max_request_bytes: int | None = None,
        chat_template: Path | None = None,
    ):
        """stop_ids: ids that end a text in addition to the model's. max_prompt_bytes, max_request_bytes:
        limits of `submit`; None: see text_limits. chat_template: a file, instead of the tokenizer folder's.
        """
        self.engine, self.tokenizer = engine, tokenizer
        self._stop_ids = tuple(stop_ids)
        self._max_prompt_bytes, self._max_request_bytes = max_prompt_bytes, max_request_bytes
        self._chat_file = chat_template
        self._chat: ChatTemplate | None = None

    def end_ids(self, limits: Limits) -> list[int]:
        """Return the tokens that end a text by default: the engine's, else the tokenizer's, and stop_ids."""
        first = limits.end_id if limits.end_id >= 0 else self.tokenizer.end_id
        return model_ends(limits, self._stop_ids, first)

    def bad_word_ids(self, rows: Sequence[tuple[str, ...]]) -> list[list[list[int]]]:
        """Return SamplingParams.bad_words for each row's words."""
        return bad_word_ids(self.tokenizer.tokenizer, rows)

    def check_texts(self, asked: TextRequest, limits: Limits | None) -> int:
        """Return the bytes of a request's texts. Raises RequestError if they are too large."""
        return check_texts(asked, text_limits(limits, self._max_prompt_bytes, self._max_request_bytes))

    def prepare(self, asked: TextRequest, client: ClientRequest, limits: Limits) -> PreparedText:
        """Tokenise and check a request, whose events go to client.put_row.

        Raises RequestError, and RequestCancelled as soon as the client's request has ended.
        """
        for words in set(asked.stop_words):
            request_limits.check_stop_words(words, asked.names.stop_words)
        request_limits.check_sequences(sum(one.num_slots for one in asked.params), limits)
        tables = asked.tables or [None] * len(asked.prompts)
        outputs = asked.structured_outputs or [None] * len(asked.prompts)
        for output in outputs:
            if output is not None:
                check_output(output, limits, asked.names.structured_output)
        prompts, placed, params = self._tokenise(asked, tables, limits, client)
        _check_logits(prompts, params, limits, asked.names.context_logits)
        automata = {words: StopAutomaton(words) for words in set(asked.stop_words)}
        rows: list[Completion] = []
        submissions = []
        for row, (prompt, one) in enumerate(zip(prompts, params)):
            words = asked.stop_words[row]
            if one.beam_width > 1:
                one = self._beam_params(one, words, limits, asked.names.stop_words)
            sink = partial(_put, client, len(rows), asked.names.structured_output)
            siblings = Siblings(one.num_sequences, partial(client.cancel_row, row))
            rows += self._completions(asked, row, prompt, one, automata[words], siblings)
            sequence = _sequence(placed[row], one, asked.lora_names[row], tables[row], outputs[row])
            submissions.append(Submission([sequence], sink, asked.priorities[row]))
        return PreparedText(rows, submissions)

    def submit(
        self,
        asked: TextRequest,
        sink: Callable[[TextStream], None],
        *,
        label: str = "",
        timeout_s: float = 0.0,
        resume: bool = True,
        together: bool = False,
    ) -> TextStream:
        """Begin a request and return the stream of its answer; other threads prepare it.

        sink: see TextStream. label: the client's id. timeout_s, resume: see EngineService.submit. together:
        see Answer. Raises RequestError for texts that are too large, CapacityError if too many requests are
        being prepared, EngineDownError before the first engine was ready; later errors come from the stream.
        """
        limits = self.engine.limits()
        size = self.check_texts(asked, limits)
        stream = TextStream(self.engine.link, sink, request_limits.check_label(label))

        def begin() -> None:
            try:
                if stream.ended:
                    return
                prepared = self.prepare(asked, stream, limits)
                stream.begin(Answer(prepared.rows, asked.streaming, together=together, ends=True))
                self.engine.submit(stream, prepared.submissions, timeout_s=timeout_s, resume=resume)
            except TridecodeError as error:
                stream.fail(error)
            except Exception as error:
                _log.exception("request %r: it could not be prepared", label)
                stream.fail(internal_error(error, label))

        self.engine.preparation.put(size, begin)
        return stream

    def chat_template(self) -> ChatTemplate | None:
        """None for a model without one. Raises CheckpointError if it cannot be read."""
        if self._chat is None:
            self._chat = ChatTemplate.find(self.tokenizer.folder, self._chat_file)
        return self._chat

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """Return the prompt of a chat, for a TextRequest without add_special_tokens. values: see
        ChatTemplate.

        Takes up to RenderLimits.seconds. Raises RequestError for a model without a chat template and for
        messages that its template refuses, CheckpointError if the template cannot be read.
        """
        template = self.chat_template()
        if template is None:
            raise RequestError("this model has no chat template; send a prompt instead of messages")
        try:
            return template.render(messages, **values)
        except TemplateFault as fault:
            raise RequestError(f"the model's chat template does not accept the messages: {fault}") from None

    def _tokenise(
        self, asked: TextRequest, tables: Sequence[RowPrompt | None], limits: Limits, client: ClientRequest
    ) -> tuple[list[list[int]], list[np.ndarray], list[SamplingParams]]:
        """Return the prompts' token ids, the engine's ids (with virtual tokens) and the parameters, all
        checked to fit.
        """
        prompts, placed, params = [], [], []
        name = asked.names.prompt
        found_ids = self.tokenizer.ids(asked.prompts, asked.add_special_tokens)
        for row, (ids, one, table) in enumerate(zip(found_ids, asked.params, tables)):
            if client.ended:
                raise RequestCancelled("the request ended while it was being prepared")
            if table is not None:
                where, sent = f"row {row} of {name}", np.array(ids, np.int64)
                seen, found = learned_prompts.place(sent, table, limits.start_id, limits, where)
                ids = seen.tolist()
            if isinstance(asked.prompts[row], str):
                _check_tokenized(ids, limits.vocab_size, name)
            else:
                _check_sent(ids, limits.vocab_size, f"row {asked.first_row + row} of {name}")
            ids = ids[-asked.keep_last :]
            if table is None:
                found = np.array(ids or [limits.start_id])
            params.append(_fit(len(found), one, asked, limits, asked.row_name(row)))
            prompts.append(ids)
            placed.append(found)
        return prompts, placed, params

    def _beam_params(
        self, params: SamplingParams, words: tuple[str, ...], limits: Limits, name: str
    ) -> SamplingParams:
        """Return the parameters of a beam search.

        It compares ended beams, so the engine needs the stop words, too.
        """
        (ids,) = self.bad_word_ids([words])
        stop_words = params.stop_words + ids
        request_limits.check_word_tokens(name, stop_words, limits.max_stop_word_tokens)
        return msgspec.structs.replace(params, stop_words=stop_words, beam_pool=True)

    def _completions(
        self,
        asked: TextRequest,
        row: int,
        prompt: list[int],
        params: SamplingParams,
        stop_words: StopAutomaton,
        siblings: Siblings,
    ) -> list[Completion]:
        """Return one completion for each sequence of a text."""
        completions = []
        for index in range(params.num_sequences):
            one = Completion(
                self.tokenizer.view_of(asked.skip_special, asked.shown_tokens),
                prompt,
                stop_words,
                siblings.stopped,
                "" if asked.streaming or asked.exclude else self.tokenizer.text(asked.prompts[row]),
                asked.show_stop,
                asked.min_tokens,
                stops_by_id=params.beam_width > 1,
                ended=siblings.ended,
            )
            one.place = row, index
            completions.append(one)
        return completions


def _put(client: ClientRequest, first: int, field: str, event: Event) -> None:
    """Add an event of a text whose sequences are the rows from `first` on. field: the client's name of its
    structured output."""
    if event.error:
        event = msgspec.structs.replace(event, error=renamed(event.error, field))
    client.put_row(first + event.sequence, event)


def _sequence(
    ids: np.ndarray,
    params: SamplingParams,
    lora_name: str,
    table: RowPrompt | None,
    output: StructuredOutput | None,
) -> SequenceRequest:
    learned = None if table is None else table.learned
    return SequenceRequest(ids.astype("<i4").tobytes(), params, lora_name, learned, output)


def _fit(
    prompt: int, params: SamplingParams, asked: TextRequest, limits: Limits, where: str
) -> SamplingParams:
    """Return the parameters for a prompt of this many tokens. where: its field, for errors.

    Raises RequestError if the answer has no room.
    """
    name = asked.names.max_tokens
    if asked.cut:
        return request_limits.cut_to_room(prompt or 1, params, limits, where, name)
    request_limits.check_length(prompt or 1, params.max_tokens, limits, where, name)
    return params


def _check_logits(
    prompts: list[list[int]], params: list[SamplingParams], limits: Limits, context_name: str
) -> None:
    sizes = [
        (len(prompt) or 1, one.max_tokens)
        for prompt, one in zip(prompts, params)
        for _ in range(one.num_sequences)
    ]
    request_limits.check_logits(
        any(one.return_context_logits for one in params),
        any(one.return_generation_logits for one in params),
        [prompt for prompt, _ in sizes],
        [count for _, count in sizes],
        limits,
        context_name,
    )


def _check_tokenized(ids: list[int], vocab_size: int, name: str) -> None:
    if max(ids, default=0) >= vocab_size:
        found = f"the tokenizer gives the id {max(ids)} for {name}"
        raise RequestError(
            f"{found}; the model's vocabulary has {vocab_size:,} ids, so tokenizer and model do not belong "
            f"together"
        )


def _check_sent(ids: list[int], vocab_size: int, where: str) -> None:
    wrong = next((i for i in ids if not (type(i) is int and 0 <= i < vocab_size)), None)
    if wrong is not None:
        raise RequestError(f"{where} has the token id {wrong!r}; wanted whole numbers below {vocab_size}")
