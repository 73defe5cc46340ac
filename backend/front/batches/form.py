"""The form of an upload (multipart/form-data), parsed as it arrives and written to the disk in pieces.

Every part is bounded: its headers, the text fields, and the file, which is never in memory as a whole.
"""

from __future__ import annotations

import asyncio
import difflib
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from tridecode.backend.front.batches.files import Upload
from tridecode.backend.front.batches.objects import BATCH, FileObject
from tridecode.backend.front.batches.store import Store
from tridecode.backend.front.errors import ApiError, bad_request, shown
from tridecode.backend.front.json_body import check_encoding
from tridecode.backend.front.process.http_protocol import CONNECTION

#: of the form around the file: boundaries, headers, text fields
FORM_BYTES = 64 << 10
_MAX_HEADERS = 8 << 10  # bytes, of a part
_MAX_TEXT = 256  # bytes, of a text field
_PIECE_BYTES = 1 << 20
#: bytes after which a slow sender gets the time of a whole body again
_ALIVE_BYTES = 256 << 10
_FIELDS = ("purpose", "file")


async def receive(request: Request, store: Store) -> FileObject:
    """Read the form and keep its file. Raises ApiError, ClientDisconnect, OSError; nothing remains then."""
    check_encoding(request)
    length = request.headers.get("content-length", "")
    expected = int(length) if length.isdigit() else 0
    if expected > store.max_file_bytes + FORM_BYTES:
        text = f"the form has {expected:,} bytes; this service accepts files of {store.max_file_bytes:,}"
        raise _closing(413, text, "file_too_large")
    form = _Form(_boundary(request))
    upload = await asyncio.to_thread(Upload, store, max(0, expected - FORM_BYTES))
    try:
        await _read(request, form, upload)
        form.check_whole()
        return await asyncio.to_thread(upload.finish, form.filename, form.purpose)
    except BaseException as error:
        await asyncio.shield(asyncio.to_thread(upload.abandon))
        if isinstance(error, ApiError):
            error.headers.setdefault("connection", "close")  # the rest of the body is not read
        raise


async def _read(request: Request, form: _Form, upload: Upload) -> None:
    since = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        body, more = message.get("body", b""), message.get("more_body", False)
        form.feed(body)
        since += len(body)
        if since >= _ALIVE_BYTES and more:
            since = 0
            request.scope[CONNECTION].body_goes_on()
        if form.held >= _PIECE_BYTES or not more:
            await asyncio.to_thread(upload.write, form.take())


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        found = shown(request.headers.get("content-type", ""))
        text = f"the content-type is {found}; wanted multipart/form-data with a boundary"
        raise _closing(415, text, "unsupported_content_type")
    return boundary


def _closing(status: int, text: str, code: str) -> ApiError:
    return ApiError(status, text, code=code, headers={"connection": "close"})


class _Form:
    """The fields purpose and file, in any order, each once. held: bytes of the file that `take` returns."""

    def __init__(self, boundary: bytes):
        self.purpose = self.filename = ""
        self.held = 0
        self._pieces: list[bytes] = []
        self._name, self._text = "", b""
        self._header, self._headers, self._header_bytes = [b"", b""], dict[bytes, bytes](), 0
        self._seen: set[str] = set()
        self._ended = False
        self._around = 0
        callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": lambda data, start, end: self._data(data[start:end]),
            "on_part_end": self._close,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as error:
            raise _wrong(str(error)) from None

    def feed(self, data: bytes) -> None:
        """Raises ApiError for what is not a form with these fields."""
        before = self.held
        if data and not self._ended:  # data after the end is ignored, as in RFC 2046
            try:
                self._parser.write(data)
            except FormParserError as error:
                raise _wrong(str(error)) from None
        self._around += len(data) - (self.held - before)
        if self._around > FORM_BYTES:
            raise _wrong(f"it has more than {FORM_BYTES:,} bytes around the file")

    def take(self) -> bytes:
        """Return the bytes of the file that have come since the last call."""
        data = b"".join(self._pieces)
        self._pieces, self.held = [], 0
        return data

    def check_whole(self) -> None:
        if not self._ended:
            raise _wrong("it ends too early")
        for name in _FIELDS:
            if name not in self._seen:
                raise bad_request(f"the form has no field {name}", name, "missing_required_parameter")

    # ------------------------------------------------------------ the parser's callbacks

    def _begin(self) -> None:
        self._name, self._text, self._headers, self._header_bytes = "", b"", {}, 0
        self._header = [b"", b""]

    def _add_header(self, which: int, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > _MAX_HEADERS:
            raise _wrong(f"a part has more than {_MAX_HEADERS:,} bytes of headers")
        self._header[which] += data

    def _end_header(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]
        self._header = [b"", b""]

    def _open(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name not in _FIELDS:
            close = difflib.get_close_matches(self._name, _FIELDS, 1)
            hint = f"; similar: {close[0]}" if close else ""
            text = f"the form has the field {shown(self._name)}; wanted purpose and file{hint}"
            raise bad_request(text, self._name or None, "unknown_parameter")
        if self._name in self._seen:
            raise bad_request(f"the form has the field {self._name} twice", self._name)
        self._seen.add(self._name)
        if self._name == "file":
            if b"filename" not in options:
                raise bad_request("the field file has no filename; wanted a file", "file")
            self.filename = options[b"filename"].decode("utf-8", "replace")

    def _data(self, data: bytes) -> None:
        if self._name == "file":
            self._pieces.append(data)
            self.held += len(data)
            return
        self._text += data
        if len(self._text) > _MAX_TEXT:
            raise bad_request(f"{self._name} has more than {_MAX_TEXT} bytes", self._name)

    def _close(self) -> None:
        if self._name == "purpose":
            self.purpose = self._text.decode("utf-8", "replace")
            if self.purpose != BATCH:
                raise bad_request(f"purpose is {shown(self.purpose)}; wanted {BATCH}", "purpose")

    def _end(self) -> None:
        self._ended = True


def _wrong(text: str) -> ApiError:
    return bad_request(f"the form cannot be read: {text}", code="invalid_form")
