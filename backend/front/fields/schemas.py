"""JSON schemas of fields whose parts are checked behind the structs, for the OpenAPI document.

The structs take any value of the right kind there, so that errors name the part that is wrong.
"""

from __future__ import annotations

from typing import Any

_OBJECT = {"type": "object"}
_NULL = {"type": "null"}
_FUNCTION_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}
_LABEL = {"anyOf": [{"type": "string", "pattern": "^[ -~]*$", "maxLength": 1024}, _NULL]}
_MESSAGES = {"type": "array", "items": {"$ref": "#/components/schemas/ChatMessage"}, "minItems": 1}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {**_object(required, **properties), "additionalProperties": False}


_FUNCTION = _object(
    ["name"],
    name=_FUNCTION_NAME,
    description={"type": "string"},
    parameters=_OBJECT,
    strict={"type": "boolean"},
)
_TOOLS = {
    "type": "array",
    "maxItems": 128,
    "items": _object(
        ["type", "function"],
        type={"const": "function"},
        function={**_FUNCTION, "additionalProperties": False},
    ),
}
_CHOICE = _object(
    ["type", "function"], type={"const": "function"}, function=_object(["name"], name=_FUNCTION_NAME)
)
_CALLED = _object(["name", "arguments"], name=_FUNCTION_NAME, arguments={"type": "string"})
_CALLS = {
    "type": "array",
    "items": _object(
        ["id", "function"],
        id={"type": "string", "minLength": 1},
        type={"const": "function"},
        function=_CALLED,
    ),
}

_ALLOWED = _object(
    ["type", "allowed_tools"],
    type={"const": "allowed_tools"},
    allowed_tools=_object(
        ["mode", "tools"], mode={"enum": ["auto", "required"]}, tools={"type": "array", "items": _CHOICE}
    ),
)
_TEXT = {"type": "string", "minLength": 1}
_TAGS: dict[str, Any] = {"structures": {"type": "array"}, "triggers": {"type": "array"}}
_TAG = _closed([*_TAGS], **_TAGS)
_SCHEMA = _closed(
    ["name", "schema"],
    name={"type": "string"},
    description={"type": "string"},
    schema=_OBJECT,
    strict={"type": "boolean"},
)
_FORMAT = {
    "oneOf": [
        _closed(["type"], type={"const": "text"}),
        _closed(["type"], type={"const": "json_object"}, schema=_OBJECT),
        _closed(["type", "json_schema"], type={"const": "json_schema"}, json_schema=_SCHEMA),
        _closed(["type", *_TAGS], type={"const": "structural_tag"}, **_TAGS),
    ]
}
_CHOICES = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 4096}
_OUTPUTS = _closed(
    [],
    json={"anyOf": [_OBJECT, _TEXT]},
    json_object={"type": "boolean"},
    regex=_TEXT,
    choice=_CHOICES,
    grammar=_TEXT,
    structural_tag={"anyOf": [_TAG, _TEXT]},
)

#: "STRUCT.FIELD" -> schema, instead of the one that follows from the type
SCHEMAS: dict[str, dict[str, Any]] = {
    "CompletionRequest.prompt": _PROMPTS,
    "EmbeddingRequest.input": _PROMPTS,
    "EmbeddingRequest.request_id": _LABEL,
    "Sampled.request_id": _LABEL,
    "Sampled.response_format": {"anyOf": [_FORMAT, _NULL]},
    "Sampled.structured_outputs": {"anyOf": [_OUTPUTS, _TEXT, _NULL]},
    "Sampled.guided_json": {"anyOf": [_OBJECT, _TEXT, _NULL]},
    "Sampled.guided_regex": {"anyOf": [_TEXT, _NULL]},
    "Sampled.guided_choice": {"anyOf": [_CHOICES, _NULL]},
    "Sampled.guided_grammar": {"anyOf": [_TEXT, _NULL]},
    "Sampled.structural_tag": {"anyOf": [_TAG, _TEXT, _NULL]},
    "GenerateRequest.request_id": _LABEL,
    "ChatRequest.messages": _MESSAGES,
    "ChatRequest.tools": {"anyOf": [_TOOLS, _NULL]},
    "ChatRequest.tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, _CHOICE, _ALLOWED]},
    "ChatFields.messages": _MESSAGES,
    "ChatMessage.role": {"type": "string", "pattern": "^[A-Za-z0-9_ .-]{1,64}$"},
    "ChatMessage.tool_calls": {"anyOf": [_CALLS, _NULL]},
    "ChatMessage.audio": _NULL,
    "ChatMessage.function_call": _NULL,
    "ContentPart.type": {"enum": ["text", "refusal"]},
    "GenerateRequest.token_ids": _TOKEN_IDS,
    "GenerateRequest.sampling_params": {"$ref": "#/components/schemas/SamplingFields"},
    "TokenizeRequest.messages": {"anyOf": [_MESSAGES, _NULL]},
    "TokenizeRequest.tools": {"anyOf": [_TOOLS, _NULL]},
    "DetokenizeRequest.tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
}
