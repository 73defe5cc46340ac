"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect

from tridecode.backend.base.errors import (
    CapacityError,
    ContextLengthError,
    DeadlineError,
    EngineDownError,
    RequestCancelled,
    RequestError,
    SessionGoneError,
    TridecodeError,
    UnsupportedError,
)
from tridecode.backend.service.error_texts import public_text

#: the client has closed its connection: for the log, because nobody reads the answer (nginx's number)
CLIENT_LEFT = 499
_INVALID = "invalid_request_error"


class _Kind(NamedTuple):
    """The answer to errors of a class. retry_s: seconds until the client should try again; 0: never."""

    error: type[TridecodeError]
    status: int
    type: str
    code: str
    retry_s: int = 0


#: the first one that fits counts
_KINDS = (
    _Kind(ContextLengthError, 400, _INVALID, "context_length_exceeded"),
    _Kind(UnsupportedError, 400, _INVALID, "unsupported_parameter"),
    _Kind(RequestError, 400, _INVALID, "invalid_value"),
    _Kind(EngineDownError, 503, "service_unavailable_error", "engine_not_ready", 2),
    _Kind(CapacityError, 429, "rate_limit_error", "queue_full", 1),
    _Kind(DeadlineError, 504, "timeout_error", "deadline_exceeded"),
    _Kind(RequestCancelled, CLIENT_LEFT, _INVALID, "client_left"),
    _Kind(SessionGoneError, 404, _INVALID, "not_found"),
    _Kind(TridecodeError, 500, "server_error", "internal_error"),
)
_FIRST_WORD = re.compile(r"[a-z_]+")


class ErrorFields(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorFields


class ApiError(Exception):
    """An error that a client reads."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.fields = ErrorFields(_utf8(message), kind, param and _utf8(param), code)

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.fields))


def _utf8(text: str) -> str:
    """Replace halves of surrogate pairs, which a client can send in JSON."""
    return text.encode("utf-8", "replace").decode("utf-8")


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def api_error(error: Exception, names: Iterable[str] = ()) -> ApiError:
    """Return any error as an ApiError. names: fields of the request, for `param`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientDisconnect):
        return ApiError(CLIENT_LEFT, "the client left before it had sent the request", code="client_left")
    if not isinstance(error, TridecodeError):
        return ApiError(
            500, "the service failed; its log says more", kind="server_error", code="internal_error"
        )
    kind = next(kind for kind in _KINDS if isinstance(error, kind.error))
    text = public_text(str(error))
    param = getattr(error, "param", None) or (param_of(text, set(names)) if kind.status == 400 else None)
    headers = {"retry-after": str(kind.retry_s)} if kind.retry_s else {}
    return ApiError(kind.status, text, kind=kind.type, param=param, code=kind.code, headers=headers)


def param_of(text: str, names: set[str]) -> str | None:
    """The first word of a text that is one of the names."""
    return next((word for word in _FIRST_WORD.findall(text) if word in names), None)


def shown(value: Any) -> str:
    """A value as JSON, at most 60 characters."""
    if isinstance(value, (list, dict)) and len(value) > 8:
        return f"a {'list' if isinstance(value, list) else 'JSON object'} of {len(value):,} items"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 100:
        return f"a number of {value.bit_length()} bits"
    try:
        text = msgspec.json.encode(value).decode("utf-8", "replace")
    except (msgspec.MsgspecError, OverflowError, RecursionError, TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
