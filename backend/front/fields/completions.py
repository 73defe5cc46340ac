"""/v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tridecode.backend.front.fields.answers import Usage
from tridecode.backend.front.fields.sampling import Sampled
from tridecode.backend.wire.sampling_params import MAX_BEAMS, MAX_TOP_LOG_PROBS


class CompletionRequest(Sampled, kw_only=True):
    """The request. prompt: a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOG_PROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_BEAMS)] | None = None
    suffix: Any = None


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities, one item per token. top_logprobs: by text; None if not requested."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """A whole answer, or a chunk of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
    object: str = "text_completion"
