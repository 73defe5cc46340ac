"""Routes of files and batches in the OpenAPI document of a service that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tridecode.backend.front.batches.objects import (
    BATCH,
    Batch,
    BatchList,
    BatchRequest,
    Deleted,
    FileList,
    FileObject,
)

BATCH_KINDS = (FileObject, FileList, Deleted, BatchRequest, Batch, BatchList)
_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "additionalProperties": False,
    "properties": {"purpose": {"const": BATCH}, "file": {"type": "string", "format": "binary"}},
}
_AFTER = {"name": "after", "in": "query", "schema": {"type": "string"}}


def batch_paths(schemas: Mapping[Any, Any], errors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paths. schemas: of BATCH_KINDS. errors: answers that every route may give."""
    conflict = {**errors, "409": errors["400"]}

    def route(summary: str, kind: Any, answers: Mapping[str, Any] = errors, **more: Any) -> dict[str, Any]:
        content = {"application/json": {"schema": schemas[kind]}}
        found = {"description": "the answer", "content": content}
        return {"summary": summary, "responses": {"200": found, **answers}, **more}

    def listed(most: int) -> list[dict[str, Any]]:
        limit = {"type": "integer", "minimum": 1, "maximum": most}
        return [_AFTER, {"name": "limit", "in": "query", "schema": limit}]

    def body(kind: str, schema: Any) -> dict[str, Any]:
        return {"required": True, "content": {kind: {"schema": schema}}}

    file, batch = _path("file_id"), _path("batch_id")
    order = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}
    purpose = {"name": "purpose", "in": "query", "schema": {"type": "string"}}
    content: dict[str, Any] = {"description": "the file", "content": {"application/jsonl": {}}}
    return {
        "/v1/files": {
            "post": route("Upload a file", FileObject, requestBody=body("multipart/form-data", _FORM)),
            "get": route("Files", FileList, parameters=[*listed(10_000), order, purpose]),
        },
        "/v1/files/{file_id}": {
            "get": route("One file", FileObject, parameters=file),
            "delete": route("Delete a file", Deleted, conflict, parameters=file),
        },
        "/v1/files/{file_id}/content": {
            "get": {
                "summary": "The content of a file",
                "parameters": file,
                "responses": {"200": content, **errors},
            },
        },
        "/v1/batches": {
            "post": route(
                "Answer the requests of a file",
                Batch,
                requestBody=body("application/json", schemas[BatchRequest]),
            ),
            "get": route("Batches", BatchList, parameters=listed(100)),
        },
        "/v1/batches/{batch_id}": {"get": route("One batch", Batch, parameters=batch)},
        "/v1/batches/{batch_id}/cancel": {
            "post": route("End a batch", Batch, conflict, parameters=batch),
        },
    }


def _path(name: str) -> list[dict[str, Any]]:
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
