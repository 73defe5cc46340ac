"""The messages of a rank's link to the supervisor, and the conditions under which it ends the process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import zmq

from tests.backend.supervisor.conftest import FAKE_RANK
from tests.waiting import wait_until
from tridecode.backend.supervisor.rank_link import SUPERVISOR_SILENCE_S, RankLink
from tridecode.backend.wire import messages as m


@pytest.fixture
def control():
    """A bound ROUTER and its address."""
    folder = tempfile.mkdtemp(prefix="tdlink")
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{folder}/c")
    yield socket, f"ipc://{folder}/c"
    socket.close(0)
    context.term()
    shutil.rmtree(folder)


def receive(socket: zmq.Socket, wanted: type, timeout_s: float = 60.0):
    """The sender and the next message of that type."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if socket.poll(50):
            identity, frame = socket.recv_multipart()
            message = m.decode(frame, m.ToSupervisor)
            if isinstance(message, wanted):
                return identity, message
    raise AssertionError(f"no {wanted.__name__} within {timeout_s} s")


def test_beats_carry_what_the_loop_set(control):
    socket, address = control
    link = RankLink(address, epoch=4, rank=1)
    link.status.steps, link.status.running, link.status.free_blocks = 9, 3, 77
    link.status.metrics = {"tokens": 12.0}
    link.status.busy_since = time.monotonic() - 2.0
    receive(socket, m.EngineBeat)
    _, beat = receive(socket, m.EngineBeat)
    assert (beat.epoch, beat.rank, beat.steps, beat.running, beat.free_blocks) == (4, 1, 9, 3, 77)
    assert beat.metrics == {"tokens": 12.0}
    assert 2.0 <= beat.busy_s < 3.0
    link.status.busy_since = 0.0
    assert link.beat().busy_s == 0.0
    link.close()


class _Waits:
    waits = ""


def test_beats_say_where_the_loop_sleeps_unless_it_waits_for_others(control):
    socket, address = control
    link, gate, waits = RankLink(address, 1, 0), threading.Event(), _Waits()

    def wait_for_ever() -> None:
        gate.wait()

    loop = threading.Thread(daemon=True, target=wait_for_ever)
    loop.start()
    link.status.exchange, link.status.loop = waits, loop

    def beat() -> m.EngineBeat:
        return receive(socket, m.EngineBeat)[1]

    wait_until(lambda: beat().asleep_s > 0.2, 60, "a beat of a loop that sleeps")
    assert "(wait), called by" in beat().asleep_in
    waits.waits = "the sum over the tensor ranks"
    wait_until(lambda: beat().asleep_s == 0.0, 60, "a beat of a loop that waits for others")
    waits.waits, link.status.idles = "", True
    for _ in range(3):
        assert beat().asleep_s == 0.0, "between two steps a follower may sleep"
    link.status.busy_since = time.monotonic()
    wait_until(lambda: beat().asleep_s > 0.0, 60, "a beat of a follower that sleeps in a step")
    gate.set()
    loop.join()
    link.close()


def test_the_reason_of_a_failure_leaves_before_the_process_does(control):
    socket, address = control
    code = "import os, sys; from tridecode.backend.supervisor.rank_link import RankLink as R\n"
    code += "R(sys.argv[1], 1, 0).failed('no such file', fatal=True); os._exit(1)"
    process = subprocess.Popen([sys.executable, "-c", code, address])
    _, failed = receive(socket, m.RankFailed)
    assert (failed.error, failed.fatal) == ("no such file", True)
    assert process.wait(60) == 1


def test_stop_reaches_the_callback(control):
    socket, address = control
    stopped = threading.Event()
    link = RankLink(address, 1, 0)
    link.on_stop = stopped.set
    identity, _ = receive(socket, m.EngineBeat)
    socket.send_multipart([identity, m.encode(m.Stop())])
    assert stopped.wait(60)
    link.close()


def test_a_rank_whose_supervisor_falls_silent_ends_itself(control, tmp_path: Path):
    socket, address = control
    options = ["--engine-dir", str(tmp_path), "--control", address, "--endpoint", "", "--epoch", "1"]
    process = subprocess.Popen([sys.executable, str(FAKE_RANK), *options, "--rank", "0", "--world", "1"])
    identity, _ = receive(socket, m.RankReady)
    for _ in range(8):  # while it hears something it lives on
        socket.send_multipart([identity, m.encode(m.EngineState(1, "ready", "", ""))])
        time.sleep(0.25)
    start = time.monotonic()
    assert process.wait(SUPERVISOR_SILENCE_S + 3) == 1
    assert time.monotonic() - start > SUPERVISOR_SILENCE_S - 0.5
