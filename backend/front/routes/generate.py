"""/inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tridecode.backend.front.answering import answer
from tridecode.backend.front.calls import Call
from tridecode.backend.front.errors import ApiError, bad_request
from tridecode.backend.front.fields.answers import Usage
from tridecode.backend.front.fields.chat import ChatLogprobs
from tridecode.backend.front.fields.completions import CompletionRequest
from tridecode.backend.front.fields.sampling import StreamOptions
from tridecode.backend.front.json_body import convert
from tridecode.backend.front.logprobs import chat_logprobs, token_id_label
from tridecode.backend.front.model import ServedModel
from tridecode.backend.front.routes.completions import text_request
from tridecode.backend.front.sampling import refuse_unsupported
from tridecode.backend.front.service import FrontService
from tridecode.backend.front.tally import Row, Tally
from tridecode.backend.front.tally_writer import TallyWriter
from tridecode.backend.front.text_event import event
from tridecode.backend.service.text_request import FieldNames
from tridecode.backend.text.completion import Piece


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """sampling_params: the fields of a completion without its prompt. return_text: choices have text, too."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_text: bool | None = None
    priority: int | None = None
    request_id: str | None = None


class GenerateChoice(msgspec.Struct):
    """token_ids: the new ones, with those of an end token; in a stream those of this event.

    text, stop_reason: where the request has return_text; stop_reason is the text of `stop` that ended it.
    """

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    text: str | msgspec.UnsetType = msgspec.UNSET
    stop_reason: str | None | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct):
    request_id: str
    choices: list[GenerateChoice]
    usage: Usage | None = None


_FIELDS = FieldNames("token_ids", "max_tokens", "stop")
#: fields of a completion that sampling_params has not
NOT_SAMPLING = frozenset(("model", "stream", "stream_options", "prompt", "echo", "request_id"))
_AS_IDS = "return_tokens_as_token_ids"
NAMES = (*GenerateRequest.__struct_fields__, *CompletionRequest.__struct_fields__)


async def generate(request: Request) -> Response:
    front = FrontService.of(request)
    call, wanted = await front.begin(request, "gen", GenerateRequest)
    try:
        params = dict(wanted.sampling_params)
        for name in sorted(params.keys() & NOT_SAMPLING):
            text = f"the field {name} is none of sampling_params"
            raise bad_request(text, f"sampling_params.{name}", "unknown_parameter")
        count = params.pop("logprobs", None)
        as_completion = _completion(
            {
                **params,
                "prompt": wanted.token_ids,
                "stream": wanted.stream,
                "priority": params.get("priority") if wanted.priority is None else wanted.priority,
                "logprobs": 0 if count is None else count,  # the ids come with the log probabilities
            }
        )
        if (as_completion.best_of or 0) > (as_completion.n or 1):
            text = "sampling_params.best_of is above n, which this route does not implement; leave it out"
            raise bad_request(text, "sampling_params.best_of", "unsupported_parameter")
        if as_completion.prompt_logprobs is not None:
            text = (
                "sampling_params.prompt_logprobs is sent, which this route does not implement; leave it out"
            )
            raise bad_request(text, "sampling_params.prompt_logprobs", "unsupported_parameter")
        silent = [name for name in refuse_unsupported(as_completion) if name != _AS_IDS]
        n = as_completion.n or 1
        count = None if count is None else as_completion.logprobs
        _, adapter = front.model.find(wanted.model)
        asked = text_request(front.model, as_completion, adapter, _FIELDS)
    except Exception as error:
        raise front.failed(call, error, NAMES) from error
    writer = GenerateWriter(
        front.model, call, wanted, count, n, bool(as_completion.return_tokens_as_token_ids)
    )
    return await answer(
        front,
        request,
        call,
        asked,
        writer,
        streaming=bool(wanted.stream),
        timeout_s=as_completion.timeout_s or 0.0,
        names=NAMES,
        silent=silent,
    )


def _completion(fields: dict[str, Any]) -> CompletionRequest:
    """Raises ApiError that names a field within sampling_params."""
    try:
        return convert(fields, CompletionRequest)
    except ApiError as error:
        found = error.fields
        where = "token_ids" if found.param == "prompt" else f"sampling_params.{found.param}"
        raise bad_request(found.message, where, found.code or "") from None


class GenerateWriter(TallyWriter):
    """Writes the answer of /inference/v1/generate. count: number of alternatives; None: no log
    probabilities. as_ids: these name tokens by their ids."""

    def __init__(
        self, model: ServedModel, call: Call, wanted: GenerateRequest, count: int | None, n: int, as_ids: bool
    ):
        super().__init__(model, call, Tally(1, n), wanted.stream, wanted.stream_options)
        self._count, self._as_ids, self._with_text = count, as_ids, bool(wanted.return_text)

    def _events(self, index: int, piece: Piece) -> bytes:
        return event(self._body([self._choice(index, piece)]))

    def _choice(self, index: int, row: Piece | Row) -> GenerateChoice:
        logprobs = None
        if self._count is not None:
            texts = self._model.token_texts(False)
            label = token_id_label if self._as_ids else texts.label
            logprobs = chat_logprobs(row.tops, self._count, texts, label)
        choice = GenerateChoice(index, [token for token, _ in row.tops], row.finish_reason or None, logprobs)
        if self._with_text:
            choice.text, choice.stop_reason = row.text, row.stop_word or None
        return choice

    def _body(self, choices: list[GenerateChoice], usage: Usage | None = None) -> Generated:
        return Generated(self._call.label or self._call.id, choices, usage)

    def whole(self) -> bytes:
        choices = [self._choice(index, row) for index, row in enumerate(self._tally.rows)]
        return msgspec.json.encode(self._body(choices, self._tally.usage))
