"""The count of accepted requests, read by another process, even after a SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.waiting import wait_until
from tridecode.backend.wire import taken_requests
from tridecode.backend.wire.taken_requests import TakenCount, TakenRequests, find_count


@pytest.fixture
def taken() -> TakenRequests:
    return TakenRequests()


def count(taken: TakenRequests) -> int:
    """Return the count stored in shared memory, not the object's own."""
    return taken_requests._LAYOUT.unpack_from(taken._memory, 0)[1]


def test_a_request_counts_from_the_return_of_execute_to_its_final_response(taken):
    for name in "ab":
        taken.begin(name)
    assert count(taken) == 0, "Triton answers it if the process dies inside execute"
    taken.end("a")
    taken.returned()
    assert count(taken) == 1, "a was answered inside execute"
    taken.begin("c")
    assert count(taken) == 1
    taken.returned()
    assert count(taken) == 2
    for name in "bbca":
        taken.end(name)
    assert count(taken) == 0


def test_the_count_survives_a_kill():
    code = "import sys, time; from tridecode.backend.wire.taken_requests import TakenRequests\n"
    code += "taken = TakenRequests(); [taken.begin(n) for n in range(3)]; taken.returned(); taken.end(1)\n"
    code += "print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        found = find_count(process.pid)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert found.read() == 2
    assert find_count(process.pid) is None


def test_a_process_that_counts_nothing_has_no_count():
    with subprocess.Popen(["sleep", "60"]) as process:
        wait_until(lambda: os.listdir(f"/proc/{process.pid}/fd"))
        assert find_count(process.pid) is None
        process.kill()


def test_threads_that_take_and_end_requests_lose_none(taken):
    def serve(thread: int) -> None:
        for number in range(2000):
            taken.begin((thread, number))
            taken.returned()
            if number % 100:
                taken.end((thread, number))

    threads = [threading.Thread(daemon=True, target=serve, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(taken) == 4 * 20


def test_without_memfd_a_door_serves_and_counts_nothing(monkeypatch, caplog):
    monkeypatch.setattr(taken_requests._libc, "memfd_create", lambda name, flags: -1)
    taken = TakenRequests()
    taken.begin("a")
    taken.returned()
    taken.end("a")
    assert taken._memory is None and "cannot be counted" in caplog.text


def test_a_descriptor_is_not_left_open(taken):
    found = find_count(os.getpid())
    assert isinstance(found, TakenCount)
    before = len(os.listdir("/proc/self/fd"))
    del found
    assert len(os.listdir("/proc/self/fd")) == before - 1
