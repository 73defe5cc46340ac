"""Dead and stopped doors are reloaded through Triton's repository calls."""

from __future__ import annotations

import contextlib
import mmap
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
from tridecode.backend.wire import taken_requests
from tridecode.tools.serve import door_watch
from tridecode.tools.serve.door_watch import DoorWatch

DOOR = """
import runpy, time
taken = runpy.run_path({path!r})["TakenRequests"]()
for number in range({counts}):
    taken.begin(number)
taken.returned()
time.sleep(600)
"""


@pytest.fixture
def counts() -> int | None:
    """Requests that the stub has taken; None: it counts nothing."""
    return None


@pytest.fixture
def stub(tmp_path, counts) -> Iterator[subprocess.Popen]:
    """A child of ours that looks like a python stub of a server with our pid."""
    script = tmp_path / "repo" / "toy" / "1" / "model.py"
    script.parent.mkdir(parents=True)
    script.write_text(
        "import time; time.sleep(600)"
        if counts is None
        else DOOR.format(counts=counts, path=taken_requests.__file__)
    )
    arguments = [
        str(tmp_path / "triton_python_backend_stub"),
        str(script),
        f"region-{uuid.uuid4().hex}",
        "1",
        "1",
    ]
    arguments += [str(os.getpid()), str(tmp_path), "1", "toy_0_0", "DEFAULT"]
    process = subprocess.Popen(arguments, executable=sys.executable)
    wait_until(lambda: processes.command_line(process.pid) == arguments, 60, "exec")
    process.counts = counts
    yield process
    process.kill()
    process.wait()


def watch(watcher: DoorWatch, condition, timeout_s: float = 60.0) -> None:
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
    assert stub.wait(60) == -signal.SIGKILL


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


@contextlib.contextmanager
def kept_by_triton(region: str) -> Iterator[Path]:
    """A region that this process, the server of these tests, has mapped."""
    path = Path("/dev/shm") / region
    path.write_bytes(bytes(4096))
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ):
            yield path
    finally:
        path.unlink(missing_ok=True)


def counted(watcher: DoorWatch, stub: subprocess.Popen) -> int | None:
    taken = watcher._watched[stub.pid].taken
    return None if taken is None else taken.read()


def orphans_after_death(triton, stub, unlinked: bool = False) -> tuple[DoorWatch, list[str]]:
    """The watch, and what it holds for open, once a killed door is loaded again."""
    watcher = DoorWatch(os.getpid(), triton.http)
    with kept_by_triton(processes.command_line(stub.pid)[2]) as region:
        watch(watcher, lambda: counted(watcher, stub) == stub.counts)
        if unlinked:
            region.unlink()
        stub.kill()
        watch(watcher, lambda: len(triton.calls) == 2 and not watcher.busy)
        later = time.monotonic() + door_watch.ORPHANS_S
        watcher.tick(later)
        return watcher, list(map(str, watcher.orphans(later)))


@pytest.mark.parametrize("counts", [None])
def test_a_door_that_counts_nothing_may_have_left_requests_while_triton_keeps_its_region(triton, stub):
    watcher, found = orphans_after_death(triton, stub)
    assert found == ["toy died, perhaps with requests open"]
    later = time.monotonic() + door_watch.ORPHANS_S
    watcher.tick(later)
    assert not watcher.orphans(later) and not watcher.has_orphans, "Triton has released the region"


@pytest.mark.parametrize("counts", [2])
@pytest.mark.parametrize("unlinked", [False, True])
def test_requests_that_a_dead_door_had_taken_are_known(triton, stub, unlinked):
    """Somebody else may unlink the region: its name is gone, its requests are not."""
    _, found = orphans_after_death(triton, stub, unlinked)
    assert found == ["toy died with 2 requests open"]


@pytest.mark.parametrize("counts", [0])
def test_a_door_without_open_requests_leaves_none_though_triton_keeps_its_region(triton, stub):
    watcher, found = orphans_after_death(triton, stub)
    assert found == [] and not watcher.has_orphans
