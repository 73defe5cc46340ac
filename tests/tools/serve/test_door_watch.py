"""Dead and stopped doors are reloaded through Triton's repository calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tridecode.backend.supervisor import processes
from tridecode.tools.serve import door_watch
from tridecode.tools.serve.door_watch import DoorWatch


@pytest.fixture
def stub(tmp_path) -> Iterator[subprocess.Popen]:
    """A child of ours that looks like a python stub of a server with our pid."""
    script = tmp_path / "repo" / "toy" / "1" / "model.py"
    script.parent.mkdir(parents=True)
    script.write_text("import time; time.sleep(600)")
    arguments = [
        str(tmp_path / "triton_python_backend_stub"),
        str(script),
        f"region-{uuid.uuid4().hex}",
        "1",
        "1",
    ]
    arguments += [str(os.getpid()), str(tmp_path), "1", "toy_0_0", "DEFAULT"]
    process = subprocess.Popen(arguments, executable=sys.executable)
    wait_until(lambda: processes.command_line(process.pid) == arguments, 5, "exec")
    yield process
    process.kill()
    process.wait()


def watch(watcher: DoorWatch, condition, timeout_s: float = 5.0) -> None:
    def tick() -> bool:
        watcher.tick(time.monotonic())
        return condition()

    wait_until(tick, timeout_s, "the watch's work")


def test_a_dead_door_is_unloaded_and_loaded(triton, stub):
    watcher = DoorWatch(os.getpid(), triton.http)
    watcher.tick(time.monotonic())
    assert triton.calls == []
    stub.kill()
    watch(watcher, lambda: len(triton.calls) == 2)
    assert triton.calls == ["toy unload", "toy load"]


def test_a_stopped_door_is_killed_before_it_can_wake(triton, stub, monkeypatch):
    monkeypatch.setattr(door_watch, "STOPPED_S", 0.3)
    watcher = DoorWatch(os.getpid(), triton.http)
    watcher.tick(time.monotonic())
    stub.send_signal(signal.SIGSTOP)
    watch(watcher, lambda: len(triton.calls) == 2)
    assert stub.wait(5) == -signal.SIGKILL


def test_a_door_that_cannot_be_loaded_is_tried_again(triton, stub, monkeypatch):
    monkeypatch.setattr(door_watch, "FIRST_PAUSE_S", 0.05)
    triton.failing_loads = 2
    watcher = DoorWatch(os.getpid(), triton.http)
    watcher.tick(time.monotonic())
    stub.kill()
    watch(watcher, lambda: len(triton.calls) == 4)
    assert triton.calls == ["toy unload", "toy load", "toy load", "toy load"]
    assert triton.state == "READY"


def test_a_door_that_was_unloaded_stays_so(triton, stub):
    watcher = DoorWatch(os.getpid(), triton.http)
    watcher.tick(time.monotonic())
    triton.state = "UNLOADING"
    stub.kill()
    end = time.monotonic() + 1.0
    watch(watcher, lambda: time.monotonic() > end)
    assert triton.calls == []


def test_requests_that_a_dead_door_left_are_known_by_the_region_that_triton_keeps(triton, stub):
    region = Path("/dev/shm") / processes.command_line(stub.pid)[2]
    region.touch()
    watcher = DoorWatch(os.getpid(), triton.http)
    watcher.tick(time.monotonic())
    stub.kill()
    watch(watcher, lambda: len(triton.calls) == 2 and not watcher.busy)
    later = time.monotonic() + door_watch.ORPHANS_S
    assert list(watcher.orphaned(later)) == ["toy"]
    region.unlink()
    watcher.tick(later)
    assert not watcher.orphaned(later)
