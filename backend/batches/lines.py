"""Lines of the input: read one at a time, checked, and made into requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.batches.id_set import IdSet
from tridecode.backend.batches.records import LineError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
#: bytes of a line: the largest body of the OpenAI service, and the names around it
MAX_LINE_BYTES = (32 << 20) + (64 << 10)
_SKIP_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True)
class Request:
    """line: its number in the input, from 1. body: JSON."""

    line: int
    custom_id: str
    url: str
    body: bytes


class InputLines:
    """The requests of a file.

    priority: added to bodies without one; None: to none. overrides: whether it replaces that of the others.
    """

    priority: int | None = None
    overrides = False

    def __init__(self, path: Path, urls: Sequence[str] = URLS):
        """urls: those that lines may have. Raises ConfigError for what is not a file with lines, OSError for
        what cannot be opened."""
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a regular file; wanted a file of JSON lines")
        self._urls = urls
        self._file: BinaryIO = path.open("rb")
        self._number = 0
        self.num_empty = 0
        self._seen = IdSet()

    def next(self) -> Request | None:
        """Return the next request; None at the end. Empty lines are skipped, and counted in `num_empty`.

        Raises LineError for a line that is not a request; the line after it comes next.
        """
        while data := self._read_line():
            if data.strip():
                return self._request(data)
            self.num_empty += 1
        return None

    def close(self) -> None:
        self._file.close()

    def _read_line(self) -> bytes:
        data = self._file.readline(MAX_LINE_BYTES + 1)
        self._number += bool(data)
        if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            total = len(data)
            while not data.endswith(b"\n") and (data := self._file.readline(_SKIP_BYTES)):
                total += len(data)
            text = f"line {self._number} has {total:,} bytes; the limit is {MAX_LINE_BYTES:,}"
            raise LineError(self._number, "line_too_long", text)
        return data.removeprefix(_BOM) if self._number == 1 else data

    def _request(self, data: bytes) -> Request:
        try:
            line = _decode(data)
        except msgspec.ValidationError:
            raise self._error("invalid_json_line", "is not a JSON object") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._error("invalid_json_line", f"is not valid JSON: {error}") from None
        custom_id = line.custom_id
        if not isinstance(custom_id, str) or not custom_id:
            text = f"has the custom_id {_shown(custom_id)}; wanted a text"
            raise self._error("missing_required_parameter", text, "custom_id")
        try:
            return self._checked(custom_id, line)
        except LineError as error:
            error.custom_id = custom_id
            raise

    def _checked(self, custom_id: str, line: _Line) -> Request:
        if not self._seen.add(custom_id):
            text = f"has the custom_id {_shown(custom_id)} of a line before it"
            raise self._error("duplicate_custom_id", text, "custom_id")
        if line.method != "POST":
            raise self._error(
                "invalid_method", f"has the method {_shown(line.method)}; wanted POST", "method"
            )
        if line.url not in self._urls:
            text = f"has the url {_shown(line.url)}; wanted {', '.join(self._urls)}"
            raise self._error("invalid_url", text, "url")
        return Request(self._number, custom_id, line.url, self._body(line.body))

    def _body(self, found: msgspec.Raw) -> bytes:
        try:
            fields = _decode_body(found)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise self._error("invalid_body", "has no JSON object as body", "body") from None
        if bytes(fields.get("stream", b"null")) not in (b"false", b"null"):
            raise self._error("invalid_body", "wants a stream; wanted stream false or omitted", "stream")
        if self.priority is None or ("priority" in fields and not self.overrides):
            return bytes(found)
        return msgspec.json.encode({**fields, "priority": self.priority})

    def _error(self, code: str, text: str, param: str | None = None) -> LineError:
        return LineError(self._number, code, f"line {self._number} {text}", param=param)


def _shown(value: Any) -> str:
    """A value as JSON, at most 60 characters."""
    if value is None:
        return "null or none"
    text = msgspec.json.encode(value).decode("utf-8", "replace")
    return text if len(text) <= 60 else f"{text[:57]}..."


def count_lines(path: Path, should_stop: Callable[[], bool] = lambda: False) -> int:
    """Return the number of lines, empty ones included; of the part read so far if it should stop."""
    count, last = 0, b"\n"
    with path.open("rb", buffering=0) as file:
        while not should_stop() and (data := file.read(1 << 20)):
            count += data.count(b"\n")
            last = data[-1:]
    return count + (last != b"\n")
