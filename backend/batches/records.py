"""Lines of the files that a batch writes: answers, and errors with OpenAI's names."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

#: every line that a batch writes begins so; a file whose last line begins otherwise is not cut off
LINE_START = b'{"id":"batch_req_'

#: codes of lines that were never sent. Such a line is known by its number: it has no custom_id, or not one of
#: its own, and once it is corrected the same command sends it.
NOT_SENT = frozenset(
    {
        "invalid_json_line",
        "line_too_long",
        "missing_required_parameter",
        "duplicate_custom_id",
        "invalid_method",
        "invalid_url",
        "invalid_body",
    }
)


class Response(msgspec.Struct, frozen=True):
    """body: the service's JSON on one line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class ErrorFields(msgspec.Struct, frozen=True):
    """The fields of openai.types.BatchError. line: its number in the input, from 1."""

    code: str | None
    message: str
    param: str | None
    line: int


class _Record(msgspec.Struct, frozen=True):
    id: str
    custom_id: str | None
    response: Response | None
    error: ErrorFields | None


class LineError(Exception):
    """A line of the input has no answer. custom_id: None where it has none. response: a refusal's."""

    def __init__(
        self,
        line: int,
        code: str | None,
        message: str,
        *,
        custom_id: str | None = None,
        param: str | None = None,
        response: Response | None = None,
    ):
        super().__init__(message)
        self.custom_id, self.response = custom_id, response
        self.fields = ErrorFields(code, message, param, line)


def answer_line(custom_id: str, response: Response) -> bytes:
    return _line(custom_id, response, None)


def error_line(error: LineError) -> bytes:
    return _line(error.custom_id, error.response, error.fields)


def one_line(body: bytes) -> msgspec.Raw | None:
    """Return a JSON text without line breaks, its numbers as they are; None if it is not JSON in UTF-8."""
    try:
        body.decode("utf-8")
        return msgspec.Raw(msgspec.json.format(body, indent=-1))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _line(custom_id: str | None, response: Response | None, error: ErrorFields | None) -> bytes:
    record: Any = _Record(f"batch_req_{uuid.uuid4().hex}", custom_id, response, error)
    return msgspec.json.encode(record) + b"\n"
