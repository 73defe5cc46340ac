"""/v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tridecode.backend.front.fields.answers import Usage
from tridecode.backend.front.fields.sampling import Count, Sampled
from tridecode.backend.wire.sampling_params import MAX_TOP_LOG_PROBS


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message: type "text". The others are refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of a request; the template decides which roles there are."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class ChatRequest(Sampled, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOG_PROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    mm_processor_kwargs: Any = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: list[TokenLogprob] | None = None


class FunctionCall(msgspec.Struct):
    """arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class AnswerMessage(msgspec.Struct):
    """content: None where there are only tool calls."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET
    object: str = "chat.completion"


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """index: of the call in the message. id, type and the function's name come with its first part."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
    object: str = "chat.completion.chunk"
