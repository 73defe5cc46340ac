"""The OpenAI service under a supervisor: started, started again, found again, ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tridecode.backend.supervisor import front_process, processes
from tridecode.backend.supervisor.door_book import LOST_GRACE_S, DoorBook
from tridecode.backend.supervisor.engine_settings import read_engine_settings
from tridecode.backend.supervisor.front_process import FIND_S, FrontOptions, FrontProcess
from tridecode.backend.wire.messages import Hello

#: stands for the service: it has a worker, and writes its options down
SERVICE = """
import subprocess, sys, time
open({log!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(60)
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in in the service's place; its starts are lines of this file."""
    path = tmp_path / "starts"
    (tmp_path / "service.py").write_text(SERVICE.format(log=str(path)))
    monkeypatch.setattr(front_process, "MODULE", "service")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return path


@pytest.fixture
def server() -> processes.ProcessId:
    found = processes.identify(os.getpid())
    assert found is not None
    return found


@pytest.fixture
def front(log: Path, server: processes.ProcessId) -> Iterator[FrontProcess]:
    front = FrontProcess("/models/toy", server, follows=False, now=0.0)
    yield front
    front.end()


def starts(log: Path, count: int) -> list[str]:
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= count, 60, "the start")
    return log.read_text().splitlines()


def test_it_starts_with_its_options_and_again_after_its_death(
    front: FrontProcess, log: Path, server: processes.ProcessId
) -> None:
    front.look(0.0)
    assert not log.exists()  # nobody wants it yet
    front.want(
        FrontOptions(9000, "127.0.0.1", 2, "mine", tool_call_parser="hermes", cors="http://a, http://b")
    )
    front.look(0.0)
    (line,) = starts(log, 1)
    assert line == (
        "/models/toy --host 127.0.0.1 --port 9000 --workers 2 --served-model-name mine "
        f"--tool-call-parser hermes --cors http://a --cors http://b --owner {server.pid}:{server.start}"
    )
    (pid,) = [pid for pid in processes.children(os.getpid()) if "service" in processes.command_line(pid)]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: processes.identify(pid) is None)
    front.look(1.0)
    front.look(1.1)
    assert len(starts(log, 2)) == 2


def test_one_that_is_stopped_by_a_signal_is_continued(front: FrontProcess, log: Path) -> None:
    front.want(FrontOptions(9000))
    front.look(0.0)
    starts(log, 1)
    (pid,) = [pid for pid in processes.children(os.getpid()) if "service" in processes.command_line(pid)]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: processes.state(pid) == "T")
    for now in (1.0, 3.9):
        front.look(now)
        assert processes.state(pid) == "T"
    front.look(4.0)
    wait_until(lambda: processes.state(pid) != "T")


def test_other_settings_start_it_again(front: FrontProcess, log: Path) -> None:
    front.want(FrontOptions(9000))
    front.look(0.0)
    starts(log, 1)
    front.want(FrontOptions(9001))

    def looked() -> bool:
        front.look(time.monotonic())
        return len(log.read_text().splitlines()) > 1

    wait_until(looked)
    assert "--port 9001" in starts(log, 2)[1]


@pytest.fixture
def running(front: FrontProcess, log: Path) -> int:
    """Start a service with port 9000 and a worker; return its pid."""
    front.want(FrontOptions(9000))
    front.look(0.0)
    starts(log, 1)
    (pid,) = [pid for pid in processes.children(os.getpid()) if "service" in processes.command_line(pid)]
    wait_until(lambda: processes.children(pid))
    return pid


@pytest.mark.parametrize("settings_first", [True, False])
def test_a_later_supervisor_finds_it_by_its_worker(
    running: int, log: Path, server: processes.ProcessId, settings_first: bool
) -> None:
    later = FrontProcess("/models/toy", server, follows=True, now=0.0)
    hello = Hello("openai:1", processes.children(running)[0], server.pid, guest=True)
    if settings_first:
        later.want(FrontOptions(9000))
        later.look(FIND_S / 2)
        later.hear(hello)
    else:
        later.hear(hello)
        later.look(FIND_S / 2)
        later.want(FrontOptions(9000))
    later.look(FIND_S + 1)
    assert len(starts(log, 1)) == 1
    time.sleep(0.5)  # a signal would have ended it by then
    assert processes.state(running) == "S"
    later.end()
    assert processes.identify(running) is None


@pytest.mark.parametrize("settings_first", [True, False])
@pytest.mark.parametrize("port", [0, 9001])
def test_a_later_supervisor_ends_one_with_other_options(
    running: int, server: processes.ProcessId, settings_first: bool, port: int
) -> None:
    later = FrontProcess("/models/toy", server, follows=True, now=0.0)
    hello = Hello("openai:1", processes.children(running)[0], server.pid, guest=True)
    if settings_first:
        later.want(FrontOptions(port))
    later.hear(hello)
    later.want(FrontOptions(port))
    wait_until(lambda: processes.state(running) in ("", "Z"))


def test_settings_that_are_read_again_do_not_signal_a_service_that_is_ending(
    running: int, front: FrontProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second signal would cut the open streams."""
    signals: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(processes, "kill", lambda process, signum: signals.append(signum))
        for _ in range(2):
            front.want(FrontOptions(9001))
    assert signals == [signal.SIGTERM]


def test_the_end_is_by_force_if_need_be(log: Path, server: processes.ProcessId, tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    (tmp_path / "service.py").write_text(deaf + SERVICE.format(log=str(log)))
    front = FrontProcess("/models/toy", server, follows=False, now=0.0)
    front.want(FrontOptions(9000))
    front.look(0.0)
    starts(log, 1)
    (pid,) = [pid for pid in processes.children(os.getpid()) if "service" in processes.command_line(pid)]
    wait_until(lambda: processes.children(pid))
    (worker,) = processes.children(pid)
    front.end()
    assert processes.identify(pid) is None
    wait_until(lambda: processes.identify(worker) is None, what="the worker's end")


def test_settings_of_the_repository_and_of_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(**parameters: str) -> FrontOptions:
        lines = [
            f'parameters {{ key: "{k}" value: {{ string_value: "{v}" }} }}' for k, v in parameters.items()
        ]
        (tmp_path / "config.pbtxt").write_text("\n".join(lines))
        return read_engine_settings(str(tmp_path)).front

    monkeypatch.delenv(front_process.PORT_VARIABLE, raising=False)
    assert read(device="cpu").port == 0
    found = read(device="cpu", openai_port="9000", openai_api_key_file="keys", openai_batch_dir="/batches")
    assert (found.port, found.api_key_file) == (9000, str(tmp_path / "keys"))
    assert "--batch-dir /batches" in " ".join(found.words())
    assert "--batch-dir" not in FrontOptions(9000).words()
    monkeypatch.setenv(front_process.PORT_VARIABLE, "9100")
    monkeypatch.setenv(front_process.ADDRESS_VARIABLE, "0.0.0.0")
    found = read(device="cpu")
    assert (found.port, found.address) == (9100, "0.0.0.0")


def test_the_engine_does_not_stay_for_a_guest() -> None:
    book = DoorBook(0.0)
    book.hello(b"guest", Hello("openai:1", os.getpid(), os.getpid(), guest=True), 0.0)
    assert len(book) == 0 and book.identities == [b"guest"]
    assert not book.abandoned(1.0) and book.abandoned(LOST_GRACE_S + 1)
    book.hello(b"door", Hello("door:1", os.getpid(), os.getpid()), 0.0)
    assert len(book) == 1 and not book.abandoned(LOST_GRACE_S + 1)
