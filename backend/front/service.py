"""The parts that the routes of one worker share: the model, the keys, the log and the counters."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request

from tridecode.backend.base.errors import RequestError
from tridecode.backend.front.access import Keys
from tridecode.backend.front.batches.store import Store
from tridecode.backend.front.calls import Call
from tridecode.backend.front.errors import ApiError, api_error, bad_request
from tridecode.backend.front.json_body import parse, read_body
from tridecode.backend.front.model import ServedModel
from tridecode.backend.front.process.counts import Counts
from tridecode.backend.front.settings import FrontSettings
from tridecode.backend.service.limits import check_label
from tridecode.backend.service.monitoring.request_log import RequestLog

_T = TypeVar("_T", bound=msgspec.Struct)
_random = random.Random()  # of ids; seeded by the system once, because asking it costs each request 16 us


@dataclass
class FrontService:
    settings: FrontSettings
    model: ServedModel
    keys: Keys
    log: RequestLog
    counts: Counts
    store: Store | None = None  # of files and batches

    @classmethod
    def of(cls, request: Request) -> FrontService:
        return request.app.state.front

    def call(self, prefix: str) -> Call:
        return Call(f"{prefix}-{_random.getrandbits(128):032x}", "")

    async def begin(self, request: Request, prefix: str, kind: type[_T]) -> tuple[Call, _T]:
        """A new call, and the body as a struct of this kind. The call's label is the client's id: that of the
        field request_id, else of the header. Raises ApiError, once the call has ended."""
        call = self.call(prefix)
        try:
            self.model.check_open()
            call.label = _label(request.headers.get("x-request-id", ""), None)
            wanted = parse(await read_body(request, self.settings.max_body_bytes), kind)
            call.label = _label(getattr(wanted, "request_id", None) or call.label, "request_id")
        except Exception as error:
            raise self.failed(call, error, ()) from None
        return call, wanted

    def ended(self, call: Call) -> None:
        """The request has been answered."""
        call.end()
        self.log.put(call.line())
        self.counts.count(call)

    def failed(self, call: Call, error: Exception, names: tuple[str, ...]) -> ApiError:
        """The request has ended with an error, which is logged and counted."""
        found = api_error(error, names)
        call.fail(found.status, str(found))
        self.ended(call)
        return found


def _label(label: str, param: str | None) -> str:
    """The label, once checked. param: the field that it comes from; None: the header."""
    try:
        check_label(label)
    except RequestError as error:
        raise bad_request(str(error), param) from None
    if not label.isprintable() or not label.isascii():
        raise bad_request("the request id has characters that a header cannot have", param)
    return label
