"""Distinguishes a thread that hangs asleep from one that computes, waits for a core, or waits for other
threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tridecode.backend.supervisor import loop_watch
from tridecode.backend.supervisor.loop_watch import LoopWatch, place_of

LOOK_S, SECONDS = 0.05, 0.6

#: state of a loop's thread -> its code, and whether it sleeps forever; run in a separate process
LOOPS = {
    "a lock that nobody releases": ("threading.Lock().acquire(); threading.Event().wait()", True),
    "a long sleep": ("time.sleep(60)", True),
    "a socket that is silent": ("pair = socket.socketpair(); pair[0].recv(1)", True),
    "an endless loop": ("\nwhile True: pass", False),
    "a long product": ("a = numpy.ones((1500, 1500))\nwhile True: a @ a", False),
    "a short nap now and then": ("\nwhile True: time.sleep(0.02)", False),
    "another thread computes for it": ("thread(compute).join()", False),
}
PROGRAM = """
import hashlib, socket, sys, threading, time, numpy
from tridecode.backend.supervisor.loop_watch import LoopWatch, place_of

def thread(run):
    made = threading.Thread(target=run, daemon=True)
    made.start()
    return made

def compute():
    while True:
        hashlib.sha256(bytes(1 << 24))

def loop():
    exec(sys.argv[1])

watched, watch, longest = thread(loop), LoopWatch(), 0.0
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    time.sleep(float(sys.argv[2]))
    longest = max(longest, watch.look(time.monotonic(), watched))
print(longest, place_of(watched), flush=True)
import os; os._exit(0)
"""


@pytest.mark.parametrize("name", LOOPS)
def test_only_a_thread_that_nothing_wakes_is_asleep(name: str) -> None:
    code, sleeps = LOOPS[name]
    command = [sys.executable, "-c", PROGRAM, code, str(LOOK_S), str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    longest, _, place = done.stdout.strip().partition(" ")
    assert done.returncode == 0, done.stderr
    assert (float(longest) > 0.5 * SECONDS) == sleeps, (name, longest, place)


def test_a_thread_s_line_of_python_is_named() -> None:
    gate = threading.Event()

    def wait_for_ever() -> None:
        gate.wait()

    thread = threading.Thread(daemon=True, target=wait_for_ever)
    thread.start()
    time.sleep(0.05)
    assert "called by threading.py line " in place_of(thread)
    gate.set()
    thread.join()
    assert place_of(thread) == ""


@pytest.mark.parametrize("told", [None, "0 0 0\n"])
def test_a_kernel_that_does_not_tell_when_a_thread_ran_has_no_sleepers(told, tmp_path, monkeypatch) -> None:
    thread = threading.current_thread()
    task = tmp_path / str(thread.native_id)
    task.mkdir()
    (task / "stat").write_text("1 (python) S 1")
    monkeypatch.setattr(loop_watch, "_TASKS", tmp_path)
    watch = LoopWatch()
    (task / "schedstat").write_text("5 6 7\n")
    assert [watch.look(at, thread) for at in (10.0, 11.0, 13.0)] == [0.0, 0.0, 2.0]
    (task / "schedstat").unlink() if told is None else (task / "schedstat").write_text(told)
    assert [watch.look(at, thread) for at in (20.0, 21.0, 23.0)] == [0.0, 0.0, 0.0]


def test_a_pause_of_the_watcher_begins_a_new_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    words: dict[str, Callable] = {"_schedule": lambda native_id: "1 2 3", "_busy_others": set}
    for name, word in words.items():
        monkeypatch.setattr(loop_watch, name, word)
    watch, thread = LoopWatch(), threading.current_thread()
    assert [watch.look(at, thread) for at in (10.0, 11.0, 13.0)] == [0.0, 0.0, 2.0]
    watch.reset()
    assert [watch.look(at, thread) for at in (20.0, 21.0, 22.0)] == [0.0, 0.0, 1.0]
