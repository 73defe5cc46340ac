"""A stand-in for tritonserver, an engine directory, and doors that listen to a real supervisor."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.waiting import wait_until
from tridecode.backend.supervisor import launch, processes
from tridecode.backend.wire import messages as m

FAKE_RANK = Path(__file__).with_name("fake_rank.py")


def pids_with(argument: str) -> list[int]:
    """Living processes whose command line holds `argument` as a part of some argument."""
    return [
        pid
        for pid in processes.all_pids()
        if pid != os.getpid() and any(argument in part for part in processes.command_line(pid))
    ]


class Door:
    """A door's side of the connection: sends Hello and pings, and keeps every EngineState."""

    def __init__(self, control: str, server_pid: int, pid: int, shm_region: str = "") -> None:
        self.states: list[m.EngineState] = []
        self._closing = threading.Event()
        self._goodbye = False
        self._hello = m.Hello(f"test:{pid}", pid, server_pid, shm_region)
        self._thread = threading.Thread(target=self._run, args=(control,), daemon=True)
        self._thread.start()

    def _run(self, control: str) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.connect(control)
        socket.send(m.encode(self._hello))
        pinged = time.monotonic()
        while not self._closing.is_set():
            if socket.poll(20):
                self.states.append(m.decode(socket.recv(), m.FromSupervisor))
            if time.monotonic() - pinged > m.PING_S:
                pinged = time.monotonic()
                socket.send(m.encode(m.Ping()))
        if self._goodbye:
            socket.send(m.encode(m.Goodbye()))
        socket.close()
        context.term()

    def close(self, goodbye: bool = True) -> None:
        self._goodbye = goodbye
        self._closing.set()
        self._thread.join(5)

    def wait(self, phase: str, epoch: int = 0, timeout_s: float = 60.0) -> m.EngineState:
        """The first state of that phase and of `epoch` or a later one."""

        def found() -> list[m.EngineState]:
            return [state for state in list(self.states) if state.phase == phase and state.epoch >= epoch]

        wait_until(found, timeout_s, f"{phase} {epoch}; states: {self.states[-3:]}")
        return found()[0]


class World:
    """One engine directory, one stand-in server, and what runs for them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine_dir = root / "repo" / "fastertransformer"
        (self.engine_dir / "1").mkdir(parents=True)
        self.configure()
        self.server = subprocess.Popen(["sleep", "600"])
        self.processes = [self.server]
        self.doors: list[Door] = []

    def configure(self, more: str = "", **parameters: object) -> None:
        """more: fields of config.pbtxt besides the parameters."""
        lines = [
            f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
            for key, value in parameters.items()
        ]
        (self.engine_dir / "config.pbtxt").write_text(
            'name: "fastertransformer"\n' + "\n".join([more, *lines])
        )

    def behave(self, behaviour: str) -> None:
        (self.engine_dir / "behaviour").write_text(behaviour)

    def ensure(self, number: int = 0) -> str:
        return launch.ensure(str(self.engine_dir), self.server.pid, number)

    def door(self, number: int = 0, **options) -> Door:
        """A door of an engine in the name of a process of its own."""
        process = subprocess.Popen(["sleep", "600"])
        self.processes.append(process)
        self.doors.append(Door(self.ensure(number), self.server.pid, process.pid, **options))
        return self.doors[-1]

    @property
    def folder(self) -> Path:
        """The one runtime folder."""
        (folder,) = [path for path in (self.root / "run").iterdir() if path.is_dir()]
        return folder

    def supervisors(self) -> list[int]:
        return [
            pid for pid in pids_with(str(self.root / "run")) if "--lock-fd" in processes.command_line(pid)
        ]

    def ranks(self, epoch: int = 0) -> list[int]:
        """Pids of the living ranks, by rank; of one epoch, or of all."""
        found = [
            pid for pid in pids_with(str(FAKE_RANK)) if str(self.engine_dir) in processes.command_line(pid)
        ]
        if epoch:
            found = [pid for pid in found if _option(pid, "--epoch") == epoch]
        return sorted(found, key=lambda pid: _option(pid, "--rank"))

    def close(self) -> None:
        for door in self.doors:
            door.close()
        for process in self.processes:
            process.kill()
            process.wait()
        wait_until(lambda: not pids_with(str(self.root)), 60, f"an end of {pids_with(str(self.root))}")


def _option(pid: int, name: str) -> int:
    """The option's number; -1 for a process that has just ended."""
    arguments = processes.command_line(pid)
    return int(arguments[arguments.index(name) + 1]) if name in arguments else -1


@pytest.fixture
def world(monkeypatch) -> Iterator[World]:
    root = Path(tempfile.mkdtemp(prefix="tdsup"))  # pytest's own folders are too long for a socket
    monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(root / "run"))
    monkeypatch.setenv("TRIDECODE_ENGINE_PYTHON", sys.executable)
    monkeypatch.setenv("TRIDECODE_RANK_COMMAND", shlex.join([sys.executable, str(FAKE_RANK)]))
    made = World(root)
    yield made
    made.close()
    left = list((root / "run").iterdir()) if (root / "run").exists() else []
    shutil.rmtree(root)
    assert not left, f"runtime folders are left: {left}"
