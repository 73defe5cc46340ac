"""Messages between a process and a child that limits itself: a length of 8 bytes, little end first, and JSON,
or TEXT and a text in UTF-8, which costs a tenth of the same text in JSON.

Standard library only: template_child.py loads this file by its path.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LENGTH = 8  # bytes of a frame's length
READ = 1 << 20  # bytes of one read
TEXT = b"\0"  # begins no JSON


def frame_of(message: Mapping[str, Any]) -> bytes:
    """Return the frame of a message. Raises TypeError, ValueError or RecursionError if it is not JSON."""
    return _framed(json.dumps(message).encode("ascii"))


def message_of(data: bytes | bytearray) -> dict[str, Any]:
    """Return the message of a frame without its length; {"text": ...} for a text. Raises EOFError if it is
    none: the other end is broken."""
    try:
        message = {"text": data[len(TEXT) :].decode("utf-8")} if data.startswith(TEXT) else json.loads(data)
    except (ValueError, RecursionError):
        raise EOFError from None
    if not isinstance(message, dict):
        raise EOFError
    return message


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH, "little") + data


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message; blocks as the socket does."""
    connection.sendall(frame_of(message))


def send_text(connection: socket.socket, text: bytes) -> None:
    """Send {"text": text}. text: UTF-8. Blocks as the socket does."""
    connection.sendall(_framed(TEXT + text))


def receive(
    connection: socket.socket, deadline: float | None = None, most: int | None = None
) -> dict[str, Any]:
    """Return the next message.

    deadline: on time.monotonic(); None: the socket's own limit. most: maximum bytes of a message. Raises
    TimeoutError at the deadline, OSError, and EOFError at the end and for bytes that are too many or no
    message.
    """
    length = int.from_bytes(_read(connection, LENGTH, deadline), "little")
    if most is not None and length > most:
        raise EOFError
    return message_of(_read(connection, length, deadline))


def requests(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the messages of a connection up to its end."""
    with suppress(EOFError):
        while True:
            yield receive(connection)


def start_child(
    script: Path,
    arguments: Sequence[str],
    fds: Sequence[int],
    environment: Mapping[str, str] | None = None,
    own_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a Python file as a child that inherits only the descriptors `fds`.

    -I keeps the working directory and PYTHONPATH out of its imports. environment: None: this
    process's. own_session: a terminal's Ctrl-C does not reach the child. Raises OSError.
    """
    return subprocess.Popen(
        [sys.executable, "-I", str(script), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=fds,
        env=environment,
        start_new_session=own_session,
    )


def memory_held() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def limit_memory(memory: int) -> None:
    """Let this process have `memory` bytes more than it has now, and write neither core dumps nor files."""
    held = memory_held()
    for kind, limit in (("RLIMIT_AS", held + memory), ("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0)):
        resource.setrlimit(getattr(resource, kind), (limit, limit))


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
        piece = connection.recv(min(READ, size - len(data)))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
