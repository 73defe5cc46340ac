"""The processes of a run: the fake engine, the front, and the client; what the front's workers use."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tridecode.backend.base.errors import TridecodeError
from tridecode.tools.bench.front.engine import EngineCounts, EngineSettings

_START_S = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


class FakeEngine:
    """The engine process; `counts` is set once it has ended."""

    counts: EngineCounts

    def __init__(self, folder: Path, settings: EngineSettings):
        self.control = f"ipc://{folder}/control"
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "tridecode.tools.bench.front.engine",
                self.control, f"ipc://{folder}/engine", msgspec.json.encode(settings).decode(),
            ],
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def close(self) -> None:
        self._process.terminate()
        printed, _ = self._process.communicate(timeout=_START_S)
        self.counts = msgspec.json.decode(printed, type=EngineCounts)


@dataclass(frozen=True)
class Usage:
    """cpu_s, user_s: seconds of all workers and their template renderers so far. rss_mb: of workers, now."""

    cpu_s: float
    user_s: float
    rss_mb: float


def environment_of(tree: Path | None) -> dict[str, str]:
    """The environment of a Python whose package tridecode is a folder; None: the one that runs now."""
    if tree is None:
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": str(tree)}


class Front:
    """`tridecode front` with its workers.

    control: endpoint of a supervisor; "": the front starts the repository's engine. tree: a folder with the
    package tridecode; None: this one. ready_s: seconds within which /health must answer 200. options: further
    ones of the command.
    """

    def __init__(
        self,
        repository: Path,
        folder: Path,
        control: str,
        workers: int,
        tree: Path | None,
        ready_s: float = _START_S,
        options: Sequence[str] = (),
    ):
        environment = environment_of(tree)
        if control:
            environment["TRIDECODE_CONTROL_ENDPOINT"] = control
        environment.setdefault("TRIDECODE_ENGINE_PYTHON", sys.executable)
        environment["TRIDECODE_REQUEST_LOG"] = "off"
        self._log = folder / "front.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "tridecode.backend.front", str(repository),
                    "--port", "0", "--workers", str(workers), *options,
                ],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._workers = workers
        self.port = self._wait_ready(ready_s)
        self.pids = self._find_workers()

    def _wait_ready(self, ready_s: float) -> int:
        deadline = time.monotonic() + ready_s
        while time.monotonic() < deadline and self._process.poll() is None:
            found = re.search(r"port (\d+), with", self._log.read_text(errors="replace"))
            if found:
                port = int(found.group(1))
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    return port
            time.sleep(0.05)
        raise TridecodeError(f"the front did not start: {self._log.read_text(errors='replace')[-2000:]}")

    def _find_workers(self) -> list[int]:
        """The pids of all children, once each worker has an engine."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            children = _children(self._process.pid)
            if len(children) >= self._workers:
                time.sleep(1.0)
                return children
            time.sleep(0.05)
        raise TridecodeError(f"the front has not started {self._workers} workers")

    def usage(self) -> Usage:
        user = system = rss = 0.0
        for pid in self.pids:
            for process in [pid, *_children(pid)]:
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                user += int(fields[11]) / _TICKS
                system += int(fields[12]) / _TICKS
                if process == pid:
                    rss += int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        return Usage(user + system, user, rss)

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_START_S)


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


@contextlib.contextmanager
def running(
    repository: Path, engine: EngineSettings, workers: int = 1, tree: Path | None = None
) -> Iterator[tuple[Front, FakeEngine]]:
    """A front before a fake engine, both gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-front-") as name:
        folder = Path(name)
        fake = FakeEngine(folder, engine)
        try:
            front = Front(repository, folder, fake.control, workers, tree)
            try:
                yield front, fake
            finally:
                front.close()
        finally:
            fake.close()


class Client:
    """The client in C, with a body for its requests."""

    def __init__(self, program: Path, front: Front, path: str, body: dict[str, Any], *options: str):
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump(body, file)
        self._body = Path(file.name)
        self._process = subprocess.Popen(
            [str(program), str(front.port), path, file.name, *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def line(self) -> dict[str, Any]:
        """The next line that it prints."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def finish(self) -> list[dict[str, Any]]:
        """Let it end; the lines that it has printed, the totals last. Raises TridecodeError for failures."""
        printed, _ = self._process.communicate(timeout=600)
        self._body.unlink()
        lines = [json.loads(line) for line in printed.splitlines()]
        if not lines or lines[-1].get("failed"):
            raise TridecodeError(f"requests of the load client failed: {lines[-1:]}")
        return lines
