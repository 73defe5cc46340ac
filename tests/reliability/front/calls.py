"""Requests to the OpenAI service as bytes on a socket, so that they may be malformed in any way.

Every request has `connection: close`, so an answer ends where the connection does.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 60.0  # a client's own limit

Address = tuple[str, int]


@dataclass
class Reply:
    """The answer to one request. Times are monotonic seconds.

    hang: the client's own limit was reached. broken: why the connection ended before the answer did; "" if it
    did not.
    """

    start: float = field(default_factory=time.monotonic)
    raw: bytearray = field(default_factory=bytearray)
    times: list[float] = field(default_factory=list)  # at which something came
    end: float = 0.0
    hang: bool = False
    broken: str = ""

    @property
    def _parts(self) -> tuple[bytes, bytes]:
        """Head and body of the answer, which may follow a `100 Continue`."""
        head, _, body = bytes(self.raw).partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100 "):
            head, _, body = body.partition(b"\r\n\r\n")
        return head, body

    @property
    def head(self) -> str:
        return self._parts[0].decode("latin-1")

    @property
    def status(self) -> int:
        """Return the status of the answer; 0 without one."""
        found = re.match(r"HTTP/1\.1 (\d{3}) ", self.head)
        return int(found.group(1)) if found else 0

    @property
    def headers(self) -> dict[str, str]:
        lines = [line.partition(":") for line in self.head.split("\r\n")[1:]]
        return {name.strip().lower(): value.strip() for name, _, value in lines}

    @property
    def body(self) -> bytes:
        """The body, as far as it has come."""
        body = self._parts[1]
        if self.headers.get("transfer-encoding", "") != "chunked":
            return body
        return b"".join(_chunks(body))

    @property
    def whole(self) -> bool:
        """Return whether the body has come to its end."""
        headers, body = self.headers, self._parts[1]
        if headers.get("transfer-encoding", "") == "chunked":
            return body.endswith(b"0\r\n\r\n")
        return len(body) == int(headers.get("content-length", "0"))

    @property
    def is_stream(self) -> bool:
        return "event-stream" in self.headers.get("content-type", "")

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of a stream, as far as they have come. Raises ValueError for one that is not JSON."""
        lines = self.body.split(b"\n\n")[:-1]
        return [json.loads(one[6:]) for one in lines if one.startswith(b"data: ") and one != b"data: [DONE]"]

    @property
    def done(self) -> bool:
        """Return whether a stream has come to its end."""
        return self.body.endswith(b"data: [DONE]\n\n")

    @property
    def error(self) -> dict[str, Any]:
        """The error, of an answer or of a stream's last event; {} where there is none."""
        if self.is_stream:
            events = self.events
            return events[-1].get("error", {}) if events else {}
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found.get("error", {}) if isinstance(found, dict) else {}

    @property
    def text(self) -> str:
        """The generated text of all choices of a completion, a chat or a stream of either."""
        bodies = self.events if self.is_stream else [json.loads(self.body)]
        found = ""
        for body in bodies:
            for choice in body.get("choices", ()):
                part = choice.get("message") or choice.get("delta") or choice
                found += part.get("content" if part is not choice else "text") or ""
        return found


def _chunks(data: bytes) -> Iterator[bytes]:
    while data:
        size, _, rest = data.partition(b"\r\n")
        count = int(size or b"0", 16)
        if not count:
            return
        yield rest[:count]
        data = rest[count + 2 :]


def request(path: str, body: bytes, method: str = "POST", headers: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body


def post(path: str, body: Any, headers: str = "") -> bytes:
    """The request of a JSON body, which may have NaN and halves of surrogate pairs."""
    return request(path, json.dumps(body).encode(), headers=headers)


async def call(
    address: Address,
    sent: bytes,
    limit_s: float = LIMIT_S,
    half_close: bool = False,
    reply: Reply | None = None,
) -> Reply:
    """Send bytes and read to the end of the connection. reply: filled meanwhile, for a caller that looks."""
    reply = reply or Reply()
    try:
        await asyncio.wait_for(_exchange(address, sent, half_close, reply), limit_s)
    except asyncio.TimeoutError:
        reply.hang = True
    except OSError as error:
        reply.broken = f"{type(error).__name__}: {error}"
    reply.end = time.monotonic()
    if not reply.hang and not reply.broken and not (reply.status and reply.whole):
        reply.broken = "the connection was closed before the answer's end"
    return reply


async def _exchange(address: Address, sent: bytes, half_close: bool, reply: Reply) -> None:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(sent)
        if half_close:
            writer.write_eof()
        while piece := await reader.read(1 << 16):
            reply.raw += piece
            reply.times.append(time.monotonic())
    finally:
        writer.close()
