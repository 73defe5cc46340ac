"""One run of `tridecode serve`, without tritonserver; for that see integration/test_supervision.py."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools.serve.fakes import executable, repository
from tests.waiting import wait_until
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.supervisor import processes
from tridecode.tools.serve import drain
from tridecode.tools.serve import serving as serving_module
from tridecode.tools.serve.options import ServeOptions
from tridecode.tools.serve.server_process import ServerProcess
from tridecode.tools.serve.serving import Deaths, Serving

HANGING = "#!/bin/sh\ntrap '' TERM\necho loading\nwhile :; do sleep 1; done\n"


@pytest.fixture
def fake_triton_on_path(tmp_path, monkeypatch) -> Iterator[Path]:
    """Yield the path of a shell script that `serve` runs as tritonserver."""
    base = Path(tempfile.mkdtemp(prefix="tdserve"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    executable(tmp_path / "backends" / "python" / "triton_python_backend_stub", f"libpython{version}.so")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(base))
    yield tmp_path / "bin" / "tritonserver"
    base.rmdir()


def test_a_server_that_ends_by_itself_is_reported_with_its_log(tmp_path, fake_triton_on_path):
    executable(fake_triton_on_path, "#!/bin/sh\necho no models; exit 3\n")
    server = ServerProcess(repository(tmp_path / "repo"), tmp_path / "log")
    with pytest.raises(TridecodeError, match="(?s)serve ended with 1:.*no models"):
        server.wait_ready(20)
    assert "ended with exit code 3 before it was ready" in server.log().splitlines()[-1]


def test_a_start_without_progress_ends_with_what_it_waited_for(tmp_path, fake_triton_on_path):
    executable(fake_triton_on_path, HANGING)
    server = ServerProcess(
        repository(tmp_path / "repo"), tmp_path / "log", options=["--start-timeout-s", "1"]
    )
    assert server.process.wait(20) == 1
    last = server.log().splitlines()[-1]
    assert "no progress for 1 s" in last and "loading models; python processes so far: none" in last


#: aborts the first times, as Triton has done under load, then runs
ABORTING = """#!/bin/sh
echo x >> "$0.starts"
test $(wc -l < "$0.starts") -le {aborts} && kill -ABRT $$
trap '' TERM
echo loading
while :; do sleep 1; done
"""


def test_a_server_that_aborts_before_it_was_ready_is_started_again(tmp_path, fake_triton_on_path):
    executable(fake_triton_on_path, ABORTING.format(aborts=2))
    server = ServerProcess(repository(tmp_path / "repo"), tmp_path / "log")
    wait_until(lambda: "loading\n" in server.log(), 30, "the third start")
    assert "was killed by SIGABRT before it was ready: starting it again in 0.4 s (death 2" in server.log()
    assert server.stop() == 0


def test_a_server_that_always_aborts_before_it_was_ready_is_given_up(tmp_path, fake_triton_on_path):
    executable(fake_triton_on_path, ABORTING.format(aborts=99))
    server = ServerProcess(repository(tmp_path / "repo"), tmp_path / "log", options=["--give-up-after", "3"])
    assert server.process.wait(30) == 1
    last = server.log().splitlines()[-1]
    assert "SIGABRT before it was ready; that was death 3 within 300 s: giving up" in last


def dying(tmp_path, monkeypatch, give_up_after: str, signals=None) -> tuple[Serving, RunningServer]:
    """A server that was ready once, and is dead whenever `serve` looks."""
    server = RunningServer(tmp_path)
    options = ServeOptions(tmp_path, drain_s=0, give_up_after=give_up_after)
    serving = Serving(options, server, signals or SimpleNamespace(count=0, name=""), ["toy"])
    monkeypatch.setattr(serving_module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(serving, "_first_start", lambda: None)
    monkeypatch.setattr(server, "running", lambda: False)
    return serving, server


@pytest.mark.parametrize("limit", [1, 10])
def test_a_server_that_dies_too_often_is_given_up(tmp_path, monkeypatch, limit):
    serving, server = dying(tmp_path, monkeypatch, str(limit))
    said = f"was killed by SIGABRT; that was death {limit} within 300 s: giving up"
    with pytest.raises(TridecodeError, match=said):
        serving.run()
    assert server.restarts == limit - 1


def test_a_server_is_never_given_up_if_so_set(tmp_path, monkeypatch, caplog):
    signals = SimpleNamespace(count=0, name="SIGTERM")
    serving, server = dying(tmp_path, monkeypatch, "never", signals)

    def restart() -> None:
        server.restarts += 1
        if server.restarts == 1500:
            signals.count = 1
        if server.restarts % 2:
            raise OSError("no space left on device")

    monkeypatch.setattr(server, "restart", restart)
    assert serving.run() == 0
    assert server.restarts == 1500
    assert "death 1500 within 300 s)" in caplog.text and "no space left" in caplog.text


def test_pauses_before_a_start_grow_to_a_limit_and_deaths_are_forgotten(tmp_path, monkeypatch, caplog):
    serving, _ = dying(tmp_path, monkeypatch, "never", SimpleNamespace(count=1, name="SIGTERM"))
    monkeypatch.setattr(serving_module, "FIRST_PAUSE_S", 0.2)
    for now in range(9):
        serving._wait_after_death("died", now)
    pauses = [record.getMessage().split(" in ")[1].split(" s ")[0] for record in caplog.records]
    assert pauses == ["0.2", "0.4", "0.8", "1.6", "3.2", "6.4", "12.8", "15.0", "15.0"]
    deaths = Deaths()
    assert [deaths.add(now) for now in (0.0, 1.0, serving_module.DEATHS_WITHIN_S + 0.5)] == [1, 2, 2]


class RunningServer:
    """What `serve` uses of a GuardedServer, without a process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pid, self.terminated = folder, os.getpid(), False
        self.restarts = 0

    def ending(self) -> str:
        return "was killed by SIGABRT"

    def restart(self) -> None:
        self.restarts += 1

    def running(self) -> bool:
        return not self.terminated

    def terminate(self) -> None:
        self.terminated = True

    def kill(self) -> None: ...

    def wait_cleaned(self) -> None: ...


@pytest.mark.parametrize("state, calls", [("READY", ["toy unload"]), ("LOADING", [])])
def test_a_signal_before_serve_has_seen_readiness_drains_what_is_ready(triton, tmp_path, state, calls):
    triton.state = state
    options = ServeOptions(tmp_path, http_port=triton.server.server_port, address="127.0.0.1")
    signals = SimpleNamespace(count=1, name="SIGTERM")
    assert Serving(options, RunningServer(tmp_path), signals).run() == 0
    assert triton.calls == calls


def test_a_server_ends_with_the_process_that_started_it(tmp_path, fake_triton_on_path):
    executable(fake_triton_on_path, HANGING)
    code = "import pathlib, sys, time; from tridecode.tools.serve.server_process import ServerProcess\n"
    code += "path = pathlib.Path(sys.argv[1]); server = ServerProcess(path / 'repo', path / 'log')\n"
    code += "print(server.process.pid, flush=True); time.sleep(60)"
    repository(tmp_path / "repo")
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        pid = int(starter.stdout.readline())
        wait_until(lambda: "loading\n" in (tmp_path / "log").read_text(), 20, "the start")
        starter.kill()
    wait_until(lambda: processes.identify(pid) is None, 60, "the end of serve")
    runtime_base = Path(os.environ["TRIDECODE_RUNTIME_DIR"])
    wait_until(lambda: not list(runtime_base.iterdir()), 20, "the guard's work")


def test_a_server_that_hangs_while_it_loads_is_not_waited_for(tmp_path, fake_triton_on_path):
    executable(fake_triton_on_path, HANGING)
    server = ServerProcess(repository(tmp_path / "repo"), tmp_path / "log", drain_s=60)
    wait_until(lambda: "loading\n" in server.log(), 60, "the start")
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < drain.END_S + 10, "of the sixty seconds for requests"
