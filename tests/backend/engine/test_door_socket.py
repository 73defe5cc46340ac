"""Rank 0's socket: who is known, who is dropped, and what a deleted socket or a pause changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.fake_engine import LIMITS
from tests.waiting import wait_until
from tridecode.backend.engine import door_socket
from tridecode.backend.engine.cache.block_keys import BlockHasher
from tridecode.backend.engine.cache.prompt_keys import HashedSubmit, PromptHasher
from tridecode.backend.engine.door_socket import DoorSocket
from tridecode.backend.wire import messages as m

PING = m.encode(m.Ping())


class Door:
    """A bare DEALER that speaks the protocol by hand."""

    def __init__(self, endpoint: str, name: str = "test:1", pid: int = 0) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self._hello = m.Hello(name, pid or os.getpid(), os.getppid())

    def say(self, message) -> None:
        self.socket.send(m.encode(message))

    def hello(self) -> None:
        self.say(self._hello)
        self.expect(m.Welcome)

    def expect(self, wanted: type, timeout_s: float = 60.0):
        """The next message of that type; heartbeats and others are passed over."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.socket.poll(50):
                message = m.decode(self.socket.recv(), m.FromEngine)
                if isinstance(message, wanted):
                    return message
        raise AssertionError(f"no {wanted.__name__} within {timeout_s} s")


@pytest.fixture
def endpoint():
    with tempfile.TemporaryDirectory(prefix="tdfront") as folder:
        yield f"ipc://{folder}/engine.sock"


@pytest.fixture
def doors(endpoint):
    made = DoorSocket(endpoint, 3, LIMITS, lambda: m.EngineBeat(3, 0, 0, 0.0))
    yield made
    made.close()


@pytest.fixture
def connect(endpoint):
    doors = []

    def make(**options) -> Door:
        doors.append(Door(endpoint, **options))
        return doors[-1]

    yield make
    for door in doors:
        door.socket.close(0)


def arrived(doors: DoorSocket, kind: type) -> list:
    """The messages of that type that the loop would see next."""
    found: list = []

    def some() -> list:
        found.extend(message for _, message in doors.drain() if isinstance(message, kind))
        return found

    wait_until(some, what=kind.__name__)
    return found


def test_prompts_are_hashed_in_the_thread_in_which_they_arrive(endpoint, connect):
    threads = set()

    class Hasher(PromptHasher):
        def keys(self, submit):
            threads.add(threading.current_thread().name)
            return super().keys(submit)

    doors = DoorSocket(
        endpoint, 3, LIMITS, lambda: m.EngineBeat(3, 0, 0, 0.0), hasher=Hasher(BlockHasher(), 4, "all", 100)
    )
    try:
        door = connect()
        door.hello()
        prompt = np.arange(11, dtype=np.int32).tobytes()
        off = m.SequenceRequest(prompt, m.SamplingParams(cache="off"))
        door.say(m.Submit(1, [m.SequenceRequest(prompt), off, m.SequenceRequest(b"\1\2\3")]))
        (hashed,) = arrived(doors, HashedSubmit)
    finally:
        doors.close()
    assert hashed.submit.request == 1 and threads == {"doors"}
    first, second, odd = hashed.keys
    assert len(first.keys) == 2 and second is None and odd.keys == []


def test_large_views_arrive_whole_and_in_order(doors, connect):
    """Logits are views of arrays, and messages with them are sent without a copy."""
    door = connect()
    door.hello()
    identity = next(iter(doors._doors))
    logits = [
        np.random.default_rng(n).random((rows, 1000), np.float32) for n, rows in enumerate((600, 1, 900))
    ]
    for number, rows in enumerate(logits):
        extra = m.EventExtra(context_logits=rows.data.cast("B"))  # type: ignore[arg-type]
        doors.send([(identity, m.Event(number, 0, extra=extra))])
    for number, rows in enumerate(logits):
        (event,) = door.expect(m.Events).events
        assert event.request == number and event.extra.context_logits == rows.tobytes()


def test_a_door_without_hello_gets_unknown(doors, connect):
    door = connect()
    door.say(m.Ping())
    door.expect(m.Unknown)
    door.say(m.Submit(1, []))
    door.expect(m.Unknown)
    door.hello()
    door.say(m.Submit(2, []))
    assert [submit.request for submit in arrived(doors, m.Submit)] == [2]


def test_a_second_connection_of_a_door_cancels_what_the_first_one_left(doors, connect):
    first, second = connect(), connect()
    first.hello()
    second.hello()
    arrived(doors, m.Goodbye)
    first.say(m.Ping())
    first.expect(m.Unknown)
    second.say(m.Submit(5, []))
    arrived(doors, m.Submit)


def test_a_silent_door_is_dropped_and_told_so(doors, connect, monkeypatch):
    monkeypatch.setattr(door_socket, "DOOR_SILENCE_S", 0.5)
    door = connect()
    door.hello()
    arrived(doors, m.Goodbye)
    door.expect(m.Unknown)


def test_a_dead_door_is_dropped_without_waiting_for_its_silence(doors, connect):
    process = subprocess.Popen(["sleep", "60"])
    connect(pid=process.pid).hello()
    process.kill()
    process.wait()
    arrived(doors, m.Goodbye)


def test_a_deleted_socket_is_there_again_and_old_connections_go_on(doors, connect, endpoint):
    old = connect(name="old:1")
    old.hello()
    path = Path(endpoint.removeprefix("ipc://"))
    path.unlink()
    wait_until(path.exists, 60, "the socket")
    connect(name="new:1").hello()
    old.say(m.Submit(7, []))
    assert [submit.request for submit in arrived(doors, m.Submit)] == [7]


def test_what_does_not_follow_the_protocol_is_dropped(doors, connect):
    door = connect()
    door.hello()
    for frame in (b"", b"\xc1", b"\x00" * 100, m.encode(m.Stop()), b"\x81\xa4type\xa6submit"):
        door.socket.send(frame)
    door.socket.send_multipart([b"two", b"frames"])
    door.say(m.Submit(8, []))
    assert [submit.request for submit in arrived(doors, m.Submit)] == [8]


def test_a_failure_of_the_thread_is_told(endpoint):
    failures = []

    def beat() -> m.EngineBeat:
        raise RuntimeError("no beat")

    DoorSocket(endpoint, 3, LIMITS, beat, failures.append)
    wait_until(lambda: failures)
    assert failures == ["the thread that serves the doors failed: RuntimeError: no beat"]


def test_a_pause_of_the_engine_counts_against_no_door(connect, endpoint):
    code = textwrap.dedent(
        """
        import sys, time
        from tests.fake_engine import LIMITS
        from tridecode.backend.engine import door_socket
        from tridecode.backend.wire import messages as m
        door_socket.DOOR_SILENCE_S = 1.5
        served = door_socket.DoorSocket(sys.argv[1], 3, LIMITS, lambda: m.EngineBeat(3, 0, 0, 0.0))
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code, endpoint], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    door = connect()
    door.hello()
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.2)  # the first turn after the pause must not drop the door, though nothing was heard for 3 s
    door.say(m.Ping())
    with pytest.raises(AssertionError, match="no Unknown"):
        door.expect(m.Unknown, 1.0)
    process.kill()
    process.wait()
    process.stdout.close()
