"""/v1/files: uploads for batches, and the results of batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, BinaryIO, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tridecode.backend.front.batches import files
from tridecode.backend.front.batches.objects import Deleted, FileList
from tridecode.backend.front.batches.store import Store
from tridecode.backend.front.errors import ApiError, bad_request, shown
from tridecode.backend.front.routes.status import json_response
from tridecode.backend.front.service import FrontService

_MAX_LIMIT = 10_000
_PIECE_BYTES = 256 << 10
_T = TypeVar("_T")


def store_of(request: Request) -> Store:
    """Return the store. Raises ApiError where the service has none."""
    store = FrontService.of(request).store
    if store is None:
        text = "this service has no batches; `tridecode front --batch-dir` enables them"
        raise ApiError(404, text, code="batches_disabled")
    return store


async def on_disk(work: Callable[..., _T], *arguments: Any) -> _T:
    """Call it on a thread. Raises ApiError 503 for an error of the disk."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except OSError as error:
        raise disk_error(error) from error


def disk_error(error: OSError) -> ApiError:
    text = f"the store of files cannot be used: {error.strerror or type(error).__name__}"
    return ApiError(503, text, kind="server_error", code="storage_error")


async def upload(request: Request) -> Response:
    front = FrontService.of(request)
    call = front.call("file")
    try:
        store = store_of(request)
        from tridecode.backend.front.batches.form import (
            receive,  # only a service with a store needs its parser
        )

        found = await receive(request, store)
    except Exception as error:
        raise front.failed(call, disk_error(error) if isinstance(error, OSError) else error, ()) from error
    front.ended(call)
    return json_response(found)


async def listed(request: Request) -> Response:
    store, query = store_of(request), request.query_params
    limit, order = read_limit(query.get("limit"), _MAX_LIMIT, _MAX_LIMIT), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request(f"order is {shown(order)}; wanted asc or desc", "order")
    found = await on_disk(files.all_files, store, query.get("purpose"))
    data, more = files.page_of(found if order == "asc" else found[::-1], query.get("after"), limit)
    ends = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(FileList(data=data, first_id=ends[0], last_id=ends[1], has_more=more))


async def retrieve(request: Request) -> Response:
    return json_response(await on_disk(files.find_file, store_of(request), request.path_params["file_id"]))


async def delete(request: Request) -> Response:
    file_id = request.path_params["file_id"]
    await on_disk(files.delete_file, store_of(request), file_id)
    return json_response(Deleted(id=file_id))


async def content(request: Request) -> Response:
    found, file = await on_disk(files.open_file, store_of(request), request.path_params["file_id"])
    headers = {"content-length": str(found.bytes)}
    return StreamingResponse(_pieces(file, found.bytes), headers=headers, media_type="application/jsonl")


async def _pieces(file: BinaryIO, left: int) -> AsyncIterator[bytes]:
    with file:
        while left and (data := await asyncio.to_thread(file.read, min(left, _PIECE_BYTES))):
            left -= len(data)
            yield data


def read_limit(text: str | None, usual: int, most: int) -> int:
    """Return the number of the query parameter `limit`. Raises ApiError."""
    if text is None:
        return usual
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= most:
        raise bad_request(f"limit is {shown(text)}; wanted 1 to {most:,}", "limit")
    return limit
