"""/v1/batches: requests of a file that are answered later, when the engine has room."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tridecode.backend.front.batches import batch_records as records
from tridecode.backend.front.batches.files import page_of
from tridecode.backend.front.batches.objects import BatchList, BatchRequest
from tridecode.backend.front.json_body import parse, read_body
from tridecode.backend.front.routes.files import on_disk, read_limit, store_of
from tridecode.backend.front.routes.status import json_response
from tridecode.backend.front.service import FrontService

_USUAL_LIMIT, _MAX_LIMIT = 20, 100
_MAX_BODY_BYTES = 64 << 10


async def create(request: Request) -> Response:
    front, store = FrontService.of(request), store_of(request)
    call = front.call("batch")
    try:
        wanted = parse(await read_body(request, _MAX_BODY_BYTES), BatchRequest)
        made = await on_disk(records.create_batch, store, wanted)
    except Exception as error:
        raise front.failed(call, error, BatchRequest.__struct_fields__) from error
    front.ended(call)
    return json_response(made)


async def listed(request: Request) -> Response:
    store, query = store_of(request), request.query_params
    limit = read_limit(query.get("limit"), _USUAL_LIMIT, _MAX_LIMIT)
    found = await on_disk(records.all_batches, store)
    data, more = page_of(found[::-1], query.get("after"), limit)
    ends = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(BatchList(data=data, first_id=ends[0], last_id=ends[1], has_more=more))


async def retrieve(request: Request) -> Response:
    batch_id = request.path_params["batch_id"]
    return json_response(await on_disk(records.find_batch, store_of(request), batch_id))


async def cancel(request: Request) -> Response:
    batch_id = request.path_params["batch_id"]
    return json_response(await on_disk(records.cancel_batch, store_of(request), batch_id))
