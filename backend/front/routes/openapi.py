"""/openapi.json: describes the service, generated from the structs of its bodies."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tridecode.backend.front.errors import ErrorBody
from tridecode.backend.front.fields.chat import ChatCompletion, ChatMessage, ChatRequest, ContentPart
from tridecode.backend.front.fields.completions import Completion, CompletionRequest
from tridecode.backend.front.fields.embeddings import EmbeddingList, EmbeddingRequest
from tridecode.backend.front.fields.meanings import described
from tridecode.backend.front.fields.sampling import StreamOptions
from tridecode.backend.front.routes import adapters, colossal, generate, status, tokens
from tridecode.backend.front.routes.openapi_batches import BATCH_KINDS, batch_paths
from tridecode.backend.front.service import FrontService

#: (request, answer, summary) by path
_POSTS: dict[str, tuple[Any, Any, str]] = {
    "/v1/completions": (CompletionRequest, Completion, "Continue a prompt"),
    "/v1/chat/completions": (ChatRequest, ChatCompletion, "Answer messages"),
    "/v1/embeddings": (EmbeddingRequest, EmbeddingList, "One vector for each input"),
    "/inference/v1/generate": (generate.GenerateRequest, generate.Generated, "Token ids to token ids"),
    "/tokenize": (tokens.TokenizeRequest, tokens.Tokenized, "Token ids of a text"),
    "/detokenize": (tokens.DetokenizeRequest, tokens.Detokenized, "Text of token ids"),
    "/generate": (colossal.GenerateFields, colossal.Text, "Colossal-Inference's completion"),
    "/completion": (colossal.GenerateFields, colossal.CompletionText, "The same, with an id"),
    "/chat": (colossal.ChatFields, colossal.ChatText, "Colossal-Inference's chat"),
    "/v1/load_lora_adapter": (adapters.LoadAdapter, None, "Add an adapter"),
    "/v1/unload_lora_adapter": (adapters.UnloadAdapter, None, "Remove an adapter"),
}
_GETS: dict[str, tuple[Any, str]] = {
    "/v1/models": (status.ModelList, "The model and its adapters"),
    "/health": (None, "Whether an engine serves"),
    "/metrics": (None, "Metrics in Prometheus' text format"),
}
_STREAMED = {
    "/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate", "/completion", "/chat",
}  # fmt: skip
_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 503, 504)


async def document(request: Request) -> Response:
    has_batches = FrontService.of(request).store is not None
    return Response(encoded(has_batches), media_type="application/json")


@cache
def encoded(has_batches: bool) -> bytes:
    return msgspec.json.encode(openapi(has_batches))


def openapi(has_batches: bool = False) -> dict[str, Any]:
    """Return the document in OpenAPI 3.1. has_batches: with the routes of files and batches."""
    kinds = [ErrorBody, *(kind for post in _POSTS.values() for kind in post[:2] if kind is not None)]
    kinds += [kind for kind, _ in _GETS.values() if kind is not None]
    kinds = list(dict.fromkeys([*kinds, *(BATCH_KINDS if has_batches else ())]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in (*(post[0] for post in _POSTS.values()), StreamOptions, ChatMessage, ContentPart):
        components[kind.__name__] = described(components[kind.__name__], kind)
    components["SamplingFields"] = _of_token_ids(components["CompletionRequest"])
    by_kind = dict(zip(kinds, schemas))
    errors = {str(code): _answer("an error", by_kind[ErrorBody]) for code in _ERRORS}
    paths: dict[str, Any] = {}
    for path, (kind, found, summary) in _POSTS.items():
        answer = _answer("the answer", by_kind[found] if found is not None else None)
        if path in _STREAMED:
            answer["content"]["text/event-stream"] = {}  # a schema would be that of the whole stream
        body = {"required": True, "content": {"application/json": {"schema": by_kind[kind]}}}
        paths[path] = {
            "post": {"summary": summary, "requestBody": body, "responses": {"200": answer, **errors}}
        }
    for path, (found, summary) in _GETS.items():
        answer = _answer("the answer", by_kind[found] if found is not None else None)
        paths[path] = {"get": {"summary": summary, "responses": {"200": answer, **errors}}}
    if has_batches:
        paths.update(batch_paths(by_kind, errors))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tridecode", "version": version("tridecode")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _of_token_ids(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a completion's fields that /inference/v1/generate takes."""
    left_out = (*generate.NOT_SAMPLING, "best_of")
    properties = {name: value for name, value in schema["properties"].items() if name not in left_out}
    return {**schema, "title": "SamplingFields", "required": [], "properties": properties}


def _answer(text: str, schema: Any) -> dict[str, Any]:
    if schema is None:
        return {"description": text}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
