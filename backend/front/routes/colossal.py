"""/generate, /completion and /chat, as Colossal-Inference's server has them.

Source: colossalai/inference/server/api_server.py. The fields are those of transformers' GenerationConfig; a
`stream` that is true makes JSON objects with a zero byte behind each, whose text is the whole one so far.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tridecode.backend.front.answering import answer
from tridecode.backend.front.calls import Call
from tridecode.backend.front.fields.chat import ChatMessage, ChatRequest
from tridecode.backend.front.fields.completions import CompletionRequest
from tridecode.backend.front.fields.sampling import Count, NgramSize, Repetition, Share, Temperature, TopK
from tridecode.backend.front.model import ServedModel
from tridecode.backend.front.reading import Pieces
from tridecode.backend.front.routes.completions import text_request
from tridecode.backend.front.sampling import refuse_unsupported
from tridecode.backend.front.service import FrontService
from tridecode.backend.service.text_request import FieldNames

#: max_new_tokens of Colossal-Inference's InferenceConfig
_DEFAULT_MAX_TOKENS = 256


class ColossalFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """stream: true, false, or a text that says so. do_sample false: greedy, whatever the other fields say."""

    stream: bool | str | None = None
    max_new_tokens: Count | None = None
    max_tokens: Count | None = None
    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Share | None = None
    repetition_penalty: Repetition | None = None
    no_repeat_ngram_size: NgramSize | None = None
    forced_eos_token_id: Any = None
    model: str | None = None

    @property
    def streams(self) -> bool:
        return str(self.stream).lower() == "true"


class GenerateFields(ColossalFields, kw_only=True):
    prompt: str


class ChatFields(ColossalFields, kw_only=True):
    messages: list[ChatMessage]


class Text(msgspec.Struct):
    text: str


class CompletionText(msgspec.Struct):
    request_id: str
    text: str


class ChatText(msgspec.Struct):
    role: str
    text: str


async def generate(request: Request) -> Response:
    return await _complete(request, lambda call, text: Text(text))


async def completion(request: Request) -> Response:
    return await _complete(request, lambda call, text: CompletionText(call.id, text))


async def _complete(request: Request, body: Any) -> Response:
    front = FrontService.of(request)
    call, wanted = await front.begin(request, "colossal", GenerateFields)
    try:
        asked = text_request(
            front.model,
            CompletionRequest(prompt=wanted.prompt, **_sampling(wanted)),
            front.model.find(wanted.model)[1],
            _names(wanted, "prompt"),
        )
    except Exception as error:
        raise front.failed(call, error, GenerateFields.__struct_fields__) from error
    return await _answer(front, request, call, asked, wanted, body)


async def chat_answer(request: Request) -> Response:
    front = FrontService.of(request)
    call, wanted = await front.begin(request, "colossal", ChatFields)
    try:
        adapter = front.model.find(wanted.model)[1]
        prompt, _ = await front.model.chats.prompt(ChatRequest(messages=wanted.messages))
        asked = text_request(
            front.model,
            CompletionRequest(prompt=prompt, add_special_tokens=False, **_sampling(wanted)),
            adapter,
            _names(wanted, "messages"),
        )
    except Exception as error:
        raise front.failed(call, error, ChatFields.__struct_fields__) from error
    return await _answer(front, request, call, asked, wanted, lambda call, text: ChatText("assistant", text))


def _sampling(wanted: ColossalFields) -> dict[str, Any]:
    refuse_unsupported(wanted)
    count = wanted.max_new_tokens if wanted.max_tokens is None else wanted.max_tokens
    return {
        "max_tokens": _DEFAULT_MAX_TOKENS if count is None else count,
        "temperature": 0.0 if wanted.do_sample is not True else wanted.temperature,
        "top_k": wanted.top_k,
        "top_p": wanted.top_p,
        "repetition_penalty": wanted.repetition_penalty,
        "no_repeat_ngram_size": wanted.no_repeat_ngram_size,
        "stream": wanted.streams,
    }


def _names(wanted: ColossalFields, prompt: str) -> FieldNames:
    return FieldNames(prompt, "max_new_tokens" if wanted.max_tokens is None else "max_tokens")


async def _answer(
    front: FrontService, request: Request, call: Call, asked: Any, wanted: ColossalFields, body: Any
) -> Response:
    writer = _Writer(front.model, call, wanted.streams, body)
    names = type(wanted).__struct_fields__
    return await answer(front, request, call, asked, writer, streaming=wanted.streams, names=names)


class _Writer:
    """The text so far, in a body of the route's own."""

    heavy = False

    def __init__(self, model: ServedModel, call: Call, streaming: bool, body: Any):
        self._call, self._streaming, self._body = call, streaming, body
        self._text = ""

    def take(self, pieces: Pieces) -> bytes:
        for group in pieces:
            for piece in group.values():
                self._text += piece.text
                self._call.prompt_tokens = piece.num_prompt_tokens
        return self.whole() + b"\0" if self._streaming else b""

    def end(self) -> bytes:
        return b""

    def whole(self) -> bytes:
        return msgspec.json.encode(self._body(self._call, self._text))
