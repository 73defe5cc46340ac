"""Messages to and from children that limit themselves, and the properties of such a child."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tridecode.backend.base import child_frames

_REPORT = """
import json, os, resource, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
found = {
    "fds": sorted(int(name) for name in os.listdir("/proc/self/fd")),
    "isolated": sys.flags.isolated,
    "session": os.getsid(0),
    "streams": [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)],
    "values": [os.environ.get("CHILD_FRAMES_TEST"), sys.argv[2]],
}
data = json.dumps(found).encode()
connection.sendall(len(data).to_bytes(8, "little") + data)
"""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    mine, theirs = socket.socketpair()
    yield mine, theirs
    mine.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    """Larger ones than a socket holds, and texts beyond ASCII."""
    mine, theirs = pair
    messages = [{"text": "é\n" * size, "n": size} for size in (0, 1, 100_000, 2_000_000)]
    sending = lambda: [child_frames.send(mine, one) for one in messages]  # noqa: E731
    sender = threading.Thread(target=sending, daemon=True)
    sender.start()
    assert [child_frames.receive(theirs, time.monotonic() + 60) for _ in messages] == messages
    sender.join()


def test_a_frame_is_a_length_of_eight_bytes_and_json() -> None:
    frame = child_frames.frame_of({"a": [1, "é"]})
    assert frame[:8] == (len(frame) - 8).to_bytes(8, "little")
    assert json.loads(frame[8:]) == {"a": [1, "é"]} and frame.isascii()


@pytest.mark.parametrize("text", ["", "{}", "\0", "é\n" * 100_000])
def test_a_text_arrives_as_it_is(pair: tuple[socket.socket, socket.socket], text: str) -> None:
    mine, theirs = pair
    sending = lambda: child_frames.send_text(mine, text.encode())  # noqa: E731
    sender = threading.Thread(target=sending, daemon=True)
    sender.start()
    assert child_frames.receive(theirs, time.monotonic() + 60) == {"text": text}
    sender.join()


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"1", b"[]", b"\0\xff", b"[" * 200_000])
def test_what_is_no_message_ends_the_connection(
    pair: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    mine, theirs = pair
    mine.sendall(len(data).to_bytes(8, "little") + data)
    with pytest.raises(EOFError):
        child_frames.receive(theirs, time.monotonic() + 60)


def test_a_connection_that_ends_or_says_nothing_is_named(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    mine.sendall(b"\5\0\0")
    with pytest.raises(TimeoutError):
        child_frames.receive(theirs, time.monotonic() + 0.02)
    with pytest.raises(TimeoutError):
        child_frames.receive(theirs, time.monotonic() - 1.0)
    mine.close()
    with pytest.raises(EOFError):
        child_frames.receive(theirs, time.monotonic() + 60)


def test_a_message_beyond_its_limit_is_not_read(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    child_frames.send(mine, {"a": "x" * 100})
    with pytest.raises(EOFError):
        child_frames.receive(theirs, time.monotonic() + 60, most=100)


def test_requests_end_with_the_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    for number in range(3):
        child_frames.send(mine, {"n": number})
    mine.sendall(b"\5\0")  # the other end was killed
    mine.close()
    assert [one["n"] for one in child_frames.requests(theirs)] == [0, 1, 2]


@pytest.mark.parametrize("own_session", [False, True])
def test_a_child_has_its_connection_and_nothing_else(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path, own_session: bool
) -> None:
    mine, theirs = pair
    script = tmp_path / "child.py"
    script.write_text(_REPORT)
    with open(os.devnull) as other:
        os.set_inheritable(other.fileno(), True)
        fds = (theirs.fileno(),)
        child = child_frames.start_child(
            script, [str(fds[0]), "x y"], fds, {**os.environ, "CHILD_FRAMES_TEST": "1"}, own_session
        )
        found = child_frames.receive(mine, time.monotonic() + 60)
    assert child.wait(60) == 0
    listing = 1  # os.listdir's own descriptor
    assert len(found["fds"]) == 3 + 1 + listing and fds[0] in found["fds"]
    assert found["isolated"] == 1 and found["streams"] == [os.devnull] * 3 and found["values"] == ["1", "x y"]
    assert (found["session"] == child.pid) is own_session


def test_a_child_is_limited_beyond_what_it_has(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    mine, theirs = pair
    script = tmp_path / "child.py"
    script.write_text(f"""
import importlib.util, os, resource, socket, sys
spec = importlib.util.spec_from_file_location("frames", {child_frames.__file__!r})
frames = importlib.util.module_from_spec(spec)
spec.loader.exec_module(frames)
frames.limit_memory(64 << 20)
held = bytearray(32 << 20)
try:
    more, fault = bytearray(64 << 20), ""
except MemoryError:
    fault = "MemoryError"
limits = [resource.getrlimit(one) for one in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)]
ours = [name for name in sys.modules if name.startswith("tridecode")]
frames.send(socket.socket(fileno=int(sys.argv[1])), {{"fault": fault, "limits": limits, "ours": ours}})
""")
    child = child_frames.start_child(script, [str(theirs.fileno())], (theirs.fileno(),))
    found = child_frames.receive(mine, time.monotonic() + 60)
    assert child.wait(60) == 0
    assert found == {"fault": "MemoryError", "limits": [[0, 0], [0, 0]], "ours": []}
