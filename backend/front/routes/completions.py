"""/v1/completions: texts or token ids in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tridecode.backend.front.answering import answer
from tridecode.backend.front.calls import Call
from tridecode.backend.front.errors import bad_request
from tridecode.backend.front.fields.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from tridecode.backend.front.logprobs import completion_logprobs
from tridecode.backend.front.model import ServedModel
from tridecode.backend.front.prompt_scores import check_prompt_logprobs, echoed_logprobs, with_ids
from tridecode.backend.front.reading import Pieces
from tridecode.backend.front.sampling import (
    check_text,
    or_default,
    refuse_unsupported,
    sampled_request,
    sampling_params,
    stop_words,
)
from tridecode.backend.front.service import FrontService
from tridecode.backend.front.tally import Row, Tally
from tridecode.backend.front.tally_writer import TallyWriter
from tridecode.backend.front.text_event import event
from tridecode.backend.service.prompt_scores import PromptScores
from tridecode.backend.service.text_request import FieldNames, Prompt, TextRequest
from tridecode.backend.text.completion import Piece
from tridecode.backend.text.token_texts import TextOffsets

NAMES = CompletionRequest.__struct_fields__
FIELDS = FieldNames("prompt", "max_tokens", "stop")
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response:
    front = FrontService.of(request)
    call, wanted = await front.begin(request, "cmpl", CompletionRequest)
    try:
        silent = refuse_unsupported(wanted)
        name, adapter = front.model.find(wanted.model)
        asked = text_request(front.model, wanted, adapter)
        if scores_prompt(wanted):
            asked = await with_ids(front.model, asked)
    except Exception as error:
        raise front.failed(call, error, NAMES) from error
    return await answer(
        front,
        request,
        call,
        asked,
        CompletionWriter(front.model, call, wanted, asked, name),
        streaming=bool(wanted.stream),
        timeout_s=wanted.timeout_s or 0.0,
        names=NAMES,
        silent=silent,
    )


def scores_prompt(wanted: CompletionRequest) -> bool:
    """Return whether the answer has log probabilities of the prompt's tokens."""
    return echoes_scores(wanted) or wanted.prompt_logprobs is not None


def echoes_scores(wanted: CompletionRequest) -> bool:
    """Return whether `logprobs` of the answer begins with the prompt's tokens."""
    return bool(wanted.echo) and wanted.logprobs is not None


def read_prompts(prompt: str | list[Any], name: str = "prompt") -> list[Prompt]:
    """Return the prompts in a text, a list of texts, token ids, or lists of token ids. name: their field.

    Raises ApiError.
    """
    if isinstance(prompt, str):
        items: list[Any] = [prompt]
    elif prompt and all(type(item) is int for item in prompt):
        items = [prompt]
    else:
        items = prompt
    if not items:
        raise bad_request(f"{name} is an empty list; wanted a text or token ids", name)
    texts = all(isinstance(item, str) for item in items)
    ids = all(isinstance(item, list) and all(type(one) is int for one in item) for item in items)
    if not (texts or ids):
        raise bad_request(f"{name} mixes types; wanted texts, or lists of token ids", name, "invalid_type")
    for item in items:
        if not isinstance(item, str):
            if not item:
                raise bad_request(f"{name} has an empty list of token ids; wanted one id or more", name)
        else:
            check_text(item, name)
    return items


def text_request(
    model: ServedModel, wanted: CompletionRequest, adapter: str, names: FieldNames = FIELDS
) -> TextRequest:
    """Return the request of a completion. names: the client's. Raises ApiError and RequestErrors."""
    limits = model.limits()
    prompts = read_prompts(wanted.prompt, names.prompt)
    n = wanted.n or 1
    sequences = wanted.best_of or n
    if sequences < n:
        raise bad_request(f"best_of is {sequences} and n is {n}; wanted best_of of n or more", "best_of")
    most = limits.max_sequences + limits.max_queued_requests
    if len(prompts) * sequences > most:  # before anything is made for each of them
        found = f"{names.prompt} has {len(prompts):,} prompts of {sequences} sequence(s) each"
        raise bad_request(f"{found}; this model accepts {most:,} sequences in all", names.prompt)
    if sequences > n and wanted.stream:
        raise bad_request("best_of chooses among whole answers; wanted no stream with it", "best_of")
    check_prompt_logprobs(wanted)
    scored = scores_prompt(wanted)
    tops = -1 if wanted.logprobs is None else wanted.logprobs
    if sequences > n:
        tops = max(tops, 0)
    count = _DEFAULT_MAX_TOKENS if wanted.max_tokens is None else wanted.max_tokens
    count = max(count, wanted.min_tokens or 0) if wanted.max_tokens is None else count
    params = sampling_params(wanted, model.texts, limits, count, sequences, tops)
    if scored:
        params = msgspec.structs.replace(params, return_context_logits=True)
        names = replace(names, context_logits="echo" if echoes_scores(wanted) else "prompt_logprobs")
    return sampled_request(
        wanted,
        limits,
        prompts,
        [_seeded(params, row, sequences) for row in range(len(prompts))],
        stop_words(wanted),
        adapter,
        log_probs=tops >= 0,
        add_special_tokens=or_default(wanted.add_special_tokens, model.settings.add_special_tokens),
        cut=wanted.max_tokens is None,
        names=names,
    )


def _seeded(params: Any, row: int, sequences: int) -> Any:
    """Give each prompt of a request its own draws: sample i of a prompt has the seed plus i."""
    if row == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + row * sequences) % 2**64)


class CompletionWriter(TallyWriter):
    """Writes the answer of /v1/completions."""

    def __init__(
        self, model: ServedModel, call: Call, wanted: CompletionRequest, asked: TextRequest, name: str
    ):
        self._sequences = wanted.best_of or wanted.n or 1
        tally = Tally(len(asked.prompts), self._sequences)
        super().__init__(model, call, tally, wanted.stream, wanted.stream_options)
        self._wanted, self._name = wanted, name
        self._texts = model.token_texts(wanted.skip_special_tokens)
        self._echoes = self._prompt_texts(asked.prompts) if wanted.echo else []
        lengths = [len(text) for text in self._echoes] or [0] * len(self._tally.rows)
        self._offsets = [TextOffsets(self._texts, length) for length in lengths]
        self._unsent = set(range(len(self._echoes)))  # rows whose prompt a stream has not sent yet
        self.heavy = scores_prompt(wanted)
        self._echoes_scores = echoes_scores(wanted)
        count = max(wanted.prompt_logprobs or 0, (wanted.logprobs or 0) if self._echoes_scores else 0)
        self._scores = [
            PromptScores(prompt, count, model.limits().vocab_size)
            for prompt in asked.prompts
            if self.heavy and not isinstance(prompt, str)
        ]
        self._held: dict[int, list[Piece]] = {}  # of rows whose prompt has no scores yet

    def _prompt_texts(self, prompts: Sequence[Prompt]) -> list[str]:
        texts = [self._model.tokenizer.text(prompt) for prompt in prompts]
        return [text for text in texts for _ in range(self._sequences)]

    # ------------------------------------------------------------ a stream

    def take(self, pieces: Pieces) -> bytes:
        if self.heavy:
            self._score(pieces)
        found = super().take(pieces)
        for index in [one for one in self._held if self._scored(one)]:
            found += self._released(index)
        return found

    def _score(self, pieces: Pieces) -> None:
        for group in pieces:
            for index, piece in group.items():
                if index % self._sequences == 0:  # the prompt's logits come with its first sequence
                    for _, extra in piece.extras:
                        self._scores[index // self._sequences].add(extra.context_logits)

    def _scored(self, index: int) -> bool:
        """Return whether a row's prompt has all scores that the answer wants."""
        return not self.heavy or self._scores[index // self._sequences].complete

    def _events(self, index: int, piece: Piece) -> bytes:
        if not self._scored(index):  # they come with the prompt's first sequence
            self._held.setdefault(index, []).append(piece)
            return b""
        return self._released(index) + self._event(index, piece)

    def _released(self, index: int) -> bytes:
        return b"".join(self._event(index, piece) for piece in self._held.pop(index, ()))

    def _event(self, index: int, piece: Piece) -> bytes:
        text, logprobs, begins = piece.text, None, index in self._unsent
        if begins:
            self._unsent.discard(index)
            text = self._echoes[index] + text
        if self._wanted.logprobs is None and not piece.finish_reason:
            return self._text_event(index, partial(CompletionChoice, index), text)
        if begins and self._echoes_scores:
            logprobs = self._with_prompt(index, piece.tops)
        elif self._wanted.logprobs is not None:
            logprobs = self._logprobs(piece.tops, self._offsets[index])
        choice = CompletionChoice(index, text, logprobs, piece.finish_reason or None)
        return event(self._body([choice], self._event_usage))

    # ------------------------------------------------------------ a whole answer

    def whole(self) -> bytes:
        choices = [
            self._choice(number, index, self._tally.rows[index])
            for number, index in enumerate(self._chosen())
        ]
        return msgspec.json.encode(self._body(choices, self._tally.usage))

    def _chosen(self) -> list[int]:
        """Return the rows to send: with best_of, the n rows of each prompt with the highest log probability
        per token."""
        rows, each, n = self._tally.rows, self._sequences, self._wanted.n or 1
        chosen: list[int] = []
        for first in range(0, len(rows), each):
            group = range(first, first + each)
            if n < each:
                chosen += sorted(group, key=lambda i: -rows[i].log_prob / max(1, rows[i].num_tokens))[:n]
            else:
                chosen += group
        return chosen

    def _choice(self, number: int, index: int, row: Row) -> CompletionChoice:
        text = (self._echoes[index] if self._echoes else "") + row.text
        logprobs = None
        if self._echoes_scores:
            logprobs = self._with_prompt(index, row.tops)
        elif self._wanted.logprobs is not None:
            logprobs = self._logprobs(row.tops, self._offsets[index])
        choice = CompletionChoice(number, text, logprobs, row.finish_reason or None)
        if self._wanted.prompt_logprobs is not None:
            scores = self._scores[index // self._sequences]
            choice.prompt_logprobs = scores.alternatives(
                self._model.token_texts(), self._wanted.prompt_logprobs
            )
        return choice

    def _with_prompt(self, index: int, steps: Any) -> CompletionLogprobs:
        """Return the log probabilities of the prompt's tokens, then those of new ones."""
        scores, length = self._scores[index // self._sequences], len(self._echoes[index])
        found = echoed_logprobs(scores, self._model.token_texts(), length, self._wanted.logprobs or 0)
        new = self._logprobs(steps, self._offsets[index])
        top = None if found.top_logprobs is None else found.top_logprobs + (new.top_logprobs or [])
        return CompletionLogprobs(
            found.tokens + new.tokens,
            found.token_logprobs + new.token_logprobs,
            top,
            found.text_offset + new.text_offset,
        )

    def _logprobs(self, steps: Any, offsets: TextOffsets) -> CompletionLogprobs:
        return completion_logprobs(steps, self._wanted.logprobs or 0, self._texts, offsets)

    def _body(self, choices: list[CompletionChoice], usage: Any) -> Completion:
        fingerprint = self._model.settings.fingerprint
        return Completion(self._call.id, self._call.created, self._name, fingerprint, choices, usage)
