"""A server under its guard: whichever of the two is killed, nothing is left, and it can be started again."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from tests.tools.serve.fakes import executable
from tests.waiting import wait_until
from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.supervisor import processes, runtime_dir
from tridecode.tools.serve import guarded_server, triton_access, triton_install
from tridecode.tools.serve.guarded_server import GuardedServer
from tridecode.tools.serve.triton_install import TritonInstall

FAKE_SERVER = f"""#!{sys.executable}
import os, pathlib, subprocess, sys, threading, time
prefix = [a for a in sys.argv if "shm-region-prefix-name" in a][0].split("=")[-1]
pathlib.Path("/dev/shm/" + prefix + "toy").touch()
subprocess.Popen(["sleep", "600"], start_new_session=True)
subprocess.Popen(["sleep", "600"])
threading.Thread(target=time.sleep, args=(600,)).start()
pathlib.Path(os.environ["FAKE_READY"]).touch()
time.sleep(600)
"""


@pytest.fixture
def fake_install(tmp_path, monkeypatch) -> Path:
    """The runtime base; tritonserver is a program that leaves a region and a process of another session."""
    base = Path(tempfile.mkdtemp(prefix="tdguard"))
    binary = executable(tmp_path / "tritonserver", FAKE_SERVER)
    environment = {**os.environ, "FAKE_READY": str(tmp_path / "ready")}
    monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(base))
    monkeypatch.setattr(
        triton_install, "prepare", lambda folder, python=None: TritonInstall(binary, (), environment)
    )
    return base


def traces(server: GuardedServer) -> list[str]:
    mark = f"TRIDECODE_RUNTIME_DIR={server.folder}"
    left = [str(pid) for pid in processes.all_pids() if processes.has_environment(pid, mark)]
    regions = [name for name in os.listdir("/dev/shm") if name.startswith(server.shm_prefix)]
    return left + regions + [str(path) for path in server.folder.parent.iterdir()]


@pytest.mark.parametrize("victim", ["server", "guard"])
def test_the_guard_leaves_nothing_of_a_killed_server(fake_install, tmp_path, victim):
    with GuardedServer([]) as server:
        wait_until((tmp_path / "ready").exists, 60, "the fake server")
        wait_until(lambda: len(traces(server)) == 5, what="server, its two children, region, folder")
        guard = processes.parent(server.pid)
        os.kill(server.pid if victim == "server" else guard, signal.SIGKILL)
        wait_until(lambda: not server.running(), 60, "the end of the server")
        expected = "was killed by SIGKILL" if victim == "server" else "was killed together with its guard"
        assert server.ending() == expected
    assert traces(server) == []
    fake_install.rmdir()


def test_a_dead_server_is_started_again_without_what_it_left_and_with_its_engine(fake_install, tmp_path):
    with GuardedServer([]) as server:
        for _ in range(2):
            wait_until((tmp_path / "ready").exists, 60, "the fake server")
            (tmp_path / "ready").unlink()
            before, (child,) = server.pid, processes.children(server.pid)[-1:]
            guard = processes.parent(server.pid)
            engines = [pid for pid in processes.children(server.pid) if os.getsid(pid) == pid]
            owner = processes.identify(guard)
            assert processes.has_environment(before, f"TRIDECODE_OWNER={owner.pid}:{owner.start}")
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: not server.running(), 60, "the end of the server")
            server.restart()
            assert server.running() and server.pid != before and processes.parent(server.pid) == guard
            assert processes.identify(child) is None, "of the dead server's own session"
            assert engines and all(processes.identify(pid) for pid in engines)
    assert traces(server) == []
    fake_install.rmdir()


def test_a_server_whose_guard_was_killed_is_started_anew(fake_install, tmp_path):
    with GuardedServer([]) as server:
        wait_until((tmp_path / "ready").exists, 60, "the fake server")
        (tmp_path / "ready").unlink()
        folder = server.folder
        os.kill(processes.parent(server.pid), signal.SIGKILL)
        wait_until(lambda: not server.running(), 60, "the end of the server")
        server.restart()
        wait_until((tmp_path / "ready").exists, 60, "the next server")
        assert server.running() and not folder.exists()
    assert traces(server) == []
    fake_install.rmdir()


def test_a_frozen_guard_does_not_hide_the_death_of_its_server(fake_install, tmp_path, monkeypatch):
    monkeypatch.setattr(guarded_server, "SILENT_S", 0.5)
    with GuardedServer([]) as server:
        wait_until((tmp_path / "ready").exists, 60, "the fake server")
        os.kill(processes.parent(server.pid), signal.SIGSTOP)
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.running(), 60, "the end of the server")
        server.restart()
        assert server.running()
    assert traces(server) == []


def test_shared_memory_and_key_are_hidden_from_other_users(fake_install, tmp_path):
    with GuardedServer(["--flag=aSecret,aSecret", "--other"], secret="aSecret") as server:
        wait_until((tmp_path / "ready").exists, 60, "the fake server")
        wait_until(lambda: processes.command_line(server.pid)[-2:] == ["--flag=*******,*******", "--other"])
        region = Path("/dev/shm") / (server.shm_prefix + "toy")
        wait_until(lambda: stat.S_IMODE(region.stat().st_mode) == 0o600, what="a private region")
        assert "Umask:\t0077" in Path(f"/proc/{server.pid}/status").read_text()


def test_a_removed_runtime_folder_is_laid_out_again(fake_install, tmp_path, monkeypatch):
    def prepare(folder: Path, python=None) -> TritonInstall:
        (folder / "backends").mkdir(exist_ok=True)
        triton_install.link(folder / "backends" / "stub", tmp_path / "tritonserver")
        return TritonInstall(
            tmp_path / "tritonserver", (), dict(os.environ, FAKE_READY=str(tmp_path / "ready"))
        )

    monkeypatch.setattr(triton_install, "prepare", prepare)
    with GuardedServer([]) as server:
        assert not server.mend()
        (server.folder / "backends" / "stub").unlink()
        assert server.mend() and (server.folder / "backends" / "stub").exists()
        shutil.rmtree(fake_install)
        assert server.mend() and (server.folder / "backends" / "stub").exists()
        assert runtime_dir.read_owner(server.folder).shm_prefix == server.shm_prefix
        assert runtime_dir.sweep(fake_install) == [], "it is locked again"
        assert not server.mend()
    fake_install.rmdir()


def test_a_repository_that_bash_would_execute_is_reached_through_a_link(fake_install, tmp_path):
    unsafe = tmp_path / "a $(touch broken) b"
    unsafe.mkdir()
    with GuardedServer([f"--model-repository={unsafe}"]) as server:
        given = triton_access.values_of(processes.command_line(server.pid), "model-repository")[0]
        assert Path(given).parent == server.folder and Path(given).resolve() == unsafe


def test_a_runtime_folder_that_bash_would_execute_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(tmp_path / "a b"))
    with pytest.raises(ConfigError, match=r"the runtime folder is '.*/a b/serve-.*TRIDECODE_RUNTIME_DIR"):
        GuardedServer([])


def test_leaving_the_context_kills_everything(fake_install, tmp_path):
    with GuardedServer([]) as server:
        wait_until((tmp_path / "ready").exists, 60, "the fake server")
    assert traces(server) == []
    fake_install.rmdir()


def test_a_server_that_cannot_be_started_is_an_error_and_leaves_nothing(fake_install, monkeypatch):
    monkeypatch.setattr(
        triton_install, "prepare", lambda folder, python=None: TritonInstall(Path("/no/tritonserver"), (), {})
    )
    with pytest.raises(TridecodeError, match="could not be started"):
        GuardedServer([])
    fake_install.rmdir()


def test_a_server_that_could_not_be_started_again_can_be_later(fake_install, tmp_path, monkeypatch):
    with GuardedServer([]) as server:
        wait_until((tmp_path / "ready").exists, 60, "the fake server")
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.running(), 60, "the end of the server")
        monkeypatch.setattr(guarded_server, "START_S", 0.0)  # as on a starved machine
        for _ in range(2):
            with pytest.raises(TridecodeError, match="could not be started"):
                server.restart()
            assert not server.running() and server.ending() == "could not be started"
        monkeypatch.setattr(guarded_server, "START_S", 30.0)
        (tmp_path / "ready").unlink()
        server.restart()
        assert server.running()
        wait_until((tmp_path / "ready").exists, 60, "the fake server")
    assert traces(server) == []
    fake_install.rmdir()
