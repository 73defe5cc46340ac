"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tridecode.backend.front.errors import bad_request
from tridecode.backend.front.fields.chat import ChatMessage, ChatRequest
from tridecode.backend.front.model import ServedModel
from tridecode.backend.front.routes.status import json_response
from tridecode.backend.front.sampling import check_text
from tridecode.backend.front.service import FrontService
from tridecode.backend.service.text_request import FieldNames, TextRequest
from tridecode.backend.wire.sampling_params import SamplingParams

_FIELDS = FieldNames("prompt")
_OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """prompt: a text; else messages, as of a chat with these fields. return_token_strs: the answer also has
    each token's text."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class Detokenized(msgspec.Struct):
    prompt: str


async def tokenize(request: Request) -> Response:
    front = FrontService.of(request)
    call, wanted = await front.begin(request, "tok", TokenizeRequest)
    model = front.model
    try:
        model.find(wanted.model)
        limits = model.known_limits
        prompt = await _prompt(model, wanted)
        asked = TextRequest([prompt], [SamplingParams()], [()], [""], [0], False, True, names=_FIELDS)
        check_text(prompt, "prompt")
        model.texts.check_texts(asked, limits)
        special = wanted.add_special_tokens
        if special is None:  # a chat template writes them itself
            special = wanted.messages is None and front.settings.add_special_tokens
        ids = await model.run(True, lambda: next(model.tokenizer.ids([prompt], bool(special))))
    except Exception as error:
        raise front.failed(call, error, TokenizeRequest.__struct_fields__) from error
    texts = [model.token_texts(False)[token] for token in ids] if wanted.return_token_strs else None
    call.prompt_tokens = len(ids)
    front.ended(call)
    return json_response(Tokenized(len(ids), limits.max_sequence_tokens if limits else None, ids, texts))


async def _prompt(model: ServedModel, wanted: TokenizeRequest) -> str:
    """Return the text to tokenise. Raises ApiError and TridecodeErrors."""
    if (wanted.prompt is None) == (wanted.messages is None):
        found = "neither is" if wanted.prompt is None else "both are"
        raise bad_request(f"{found} sent of prompt and messages; wanted one of them", "prompt")
    of_chats = {name: value for name in _OF_CHATS if (value := getattr(wanted, name)) is not None}
    if wanted.messages is not None:
        return (await model.chats.prompt(ChatRequest(messages=wanted.messages, **of_chats)))[0]
    for name in of_chats:
        raise bad_request(f"{name} is sent without messages; leave it out", name)
    return wanted.prompt or ""


async def detokenize(request: Request) -> Response:
    front = FrontService.of(request)
    call, wanted = await front.begin(request, "detok", DetokenizeRequest)
    model = front.model
    try:
        model.find(wanted.model)
        size = model.tokenizer.tokenizer.get_vocab_size(with_added_tokens=True)
        wrong: Any = next((token for token in wanted.tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise bad_request(f"tokens has the id {wrong}; the tokenizer has ids below {size}", "tokens")
        view = model.tokenizer.view_of(bool(wanted.skip_special_tokens))
        text = await model.run(True, lambda: view.text(view.shown(list(wanted.tokens))))
    except Exception as error:
        raise front.failed(call, error, DetokenizeRequest.__struct_fields__) from error
    front.ended(call)
    return json_response(Detokenized(text))
