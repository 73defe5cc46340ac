"""What `tridecode serve` is made of, without tritonserver; see integration/test_supervision.py for it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.waiting import wait_until
from tridecode.backend.errors import ConfigError, TridecodeError
from tridecode.backend.supervisor import processes
from tridecode.tools import (
    cli,
    door_watch,
    guarded_server,
    serve,
    triton_access,
    triton_install,
    tritonserver,
)
from tridecode.tools.door_watch import DoorWatch
from tridecode.tools.guarded_server import GuardedServer
from tridecode.tools.running_server import ServerProcess, free_ports
from tridecode.tools.triton_http import TritonHttp, TritonHttpError
from tridecode.tools.triton_install import TritonInstall


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---------------------------------------------------------------- finding and laying out Triton


def fake_python(path: Path, **differences) -> str:
    """A python that answers triton_install's questions as told."""
    answer = {
        "path": str(path),
        "version": "3.11",
        "libdir": None,
        "numpy": "1.26.4",
        "missing": [],
        "pytriton": None,
        **differences,
    }
    return str(executable(path, f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer)}\nEND\n"))


@pytest.fixture
def no_server_on_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path / 'nothing'}:/usr/bin:/bin")


def test_the_wheel_is_laid_out_for_this_python(tmp_path, no_server_on_path):
    install = triton_install.prepare(tmp_path / "run")
    assert os.access(install.binary, os.X_OK) and install.binary.name == "tritonserver"
    backend = Path(install.arguments[install.arguments.index("--backend-directory") + 1]) / "python"
    stub = backend / "triton_python_backend_stub"
    assert stub.is_symlink(), "a copied stub does not find its libraries"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert stub.resolve().parent.name == version
    assert (backend / "libtriton_python.so").exists()
    assert (backend / "triton_python_backend_utils.py").exists()
    first = install.environment["PATH"].split(os.pathsep)[0]
    assert os.path.realpath(f"{first}/python3") == os.path.realpath(sys.executable)


def test_the_engine_keeps_its_own_python_and_paths(tmp_path, no_server_on_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/engine/lib")
    environment = triton_install.prepare(tmp_path / "run").environment
    assert environment["TRIDECODE_ENGINE_PYTHON"] == sys.executable
    assert environment["TRIDECODE_ENGINE_PATH"] == os.environ["PATH"]
    assert environment["TRIDECODE_ENGINE_LD_LIBRARY_PATH"] == "/engine/lib"
    assert environment["LD_LIBRARY_PATH"].endswith("/engine/lib")


def test_a_python_without_a_python3_beside_it_gets_a_link(tmp_path, no_server_on_path):
    python = fake_python(tmp_path / "bin" / "python-of-doors")
    environment = triton_install.prepare(tmp_path / "run", python).environment
    first = environment["PATH"].split(os.pathsep)[0]
    assert (Path(first) / "python3").resolve() == Path(python)


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ({"numpy": "2.1.0"}, r"numpy 2\.1\.0.*numpy < 2.*python3\.11 -m venv.*--door-python"),
        ({"version": "3.7"}, r"stubs for 3\.10, 3\.11.*is 3\.7"),
        ({"missing": ["tridecode.backend"]}, "cannot import tridecode.backend.*pip install tridecode"),
    ],
)
def test_an_unfit_door_python_is_refused_with_the_fix(tmp_path, no_server_on_path, differences, said):
    python = fake_python(tmp_path / "python", **differences)
    with pytest.raises(ConfigError, match=said):
        triton_install.prepare(tmp_path / "run", python)


def test_a_door_python_that_does_not_exist_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIDECODE_DOOR_PYTHON", "/no/such/python")
    with pytest.raises(ConfigError, match="/no/such/python cannot be run.*TRIDECODE_DOOR_PYTHON"):
        triton_install.prepare(tmp_path / "run")


def test_a_server_on_path_is_used_with_its_own_backends_if_its_stub_fits(tmp_path, monkeypatch):
    binary = executable(tmp_path / "triton" / "bin" / "tritonserver", "#!/bin/sh\n")
    stub = executable(
        tmp_path / "triton" / "backends" / "python" / "triton_python_backend_stub", "\0libpython3.10.so.1.0\0"
    )
    monkeypatch.setenv("PATH", f"{binary.parent}:/usr/bin:/bin")
    fitting = fake_python(tmp_path / "a" / "python3", version="3.10", numpy="2.1.0")
    install = triton_install.prepare(tmp_path / "run", fitting)
    assert install.binary == binary
    assert install.arguments == ("--backend-directory", str(stub.parent.parent))
    with pytest.raises(ConfigError, match=r"built for python 3\.10.*is 3\.11"):
        triton_install.prepare(tmp_path / "run", fake_python(tmp_path / "b" / "python3"))


# ---------------------------------------------------------------- dead doors


class FakeTriton:
    """Answers the repository calls and keeps them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.keys: list[str | None] = []
        self.state = "READY"
        self.failing_loads = 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                fake.keys.append(self.headers.get(triton_access.HEADER))
                status, body = fake.answer(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                assert self.path == "/v2/health/ready"
                self.send_response(200 if fake.state == "READY" else 400)
                self.end_headers()

            def log_message(self, *_arguments) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str) -> tuple[int, bytes]:
        if path == "/v2/repository/index":
            return 200, json.dumps([{"name": "toy", "version": "1", "state": self.state}]).encode()
        self.calls.append(path.rsplit("/", 2)[-2] + " " + path.rsplit("/", 1)[-1])
        if path.endswith("/load") and self.failing_loads:
            self.failing_loads -= 1
            return 400, b'{"error": "failed to load toy"}'
        self.state = "READY" if path.endswith("/load") else "UNAVAILABLE"
        return 200, b""

    @property
    def http(self) -> TritonHttp:
        return TritonHttp(f"127.0.0.1:{self.server.server_port}")


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    fake = FakeTriton()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


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


def test_the_key_goes_with_calls_of_the_repository(triton):
    TritonHttp(f"127.0.0.1:{triton.server.server_port}", "secret").load("toy")
    triton.http.index()
    assert triton.keys == ["secret", None]


def test_the_server_s_text_is_part_of_an_error(triton):
    triton.failing_loads = 1
    with pytest.raises(TritonHttpError, match="400 failed to load toy"):
        triton.http.load("toy")
    with pytest.raises(TritonHttpError, match="refused"):
        TritonHttp(f"127.0.0.1:{free_ports(1)[0]}").index()


# ---------------------------------------------------------------- the guard


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
        wait_until((tmp_path / "ready").exists, 5, "the fake server")
        wait_until(lambda: len(traces(server)) == 5, what="server, its two children, region, folder")
        guard = processes.parent(server.pid)
        os.kill(server.pid if victim == "server" else guard, signal.SIGKILL)
        wait_until(lambda: not server.running(), 5, "the end of the server")
        expected = "was killed by SIGKILL" if victim == "server" else "was killed together with its guard"
        assert server.ending() == expected
    assert traces(server) == []
    fake_install.rmdir()


def test_a_dead_server_is_started_again_without_what_it_left_and_with_its_engine(fake_install, tmp_path):
    with GuardedServer([]) as server:
        for _ in range(2):
            wait_until((tmp_path / "ready").exists, 5, "the fake server")
            (tmp_path / "ready").unlink()
            before, (child,) = server.pid, processes.children(server.pid)[-1:]
            guard = processes.parent(server.pid)
            engines = [pid for pid in processes.children(server.pid) if os.getsid(pid) == pid]
            owner = processes.identify(guard)
            assert processes.has_environment(before, f"TRIDECODE_OWNER={owner.pid}:{owner.start}")
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: not server.running(), 5, "the end of the server")
            server.restart()
            assert server.running() and server.pid != before and processes.parent(server.pid) == guard
            assert processes.identify(child) is None, "of the dead server's own session"
            assert engines and all(processes.identify(pid) for pid in engines)
    assert traces(server) == []
    fake_install.rmdir()


def test_a_server_whose_guard_was_killed_is_started_anew(fake_install, tmp_path):
    with GuardedServer([]) as server:
        wait_until((tmp_path / "ready").exists, 5, "the fake server")
        (tmp_path / "ready").unlink()
        folder = server.folder
        os.kill(processes.parent(server.pid), signal.SIGKILL)
        wait_until(lambda: not server.running(), 5, "the end of the server")
        server.restart()
        wait_until((tmp_path / "ready").exists, 5, "the next server")
        assert server.running() and not folder.exists()
    assert traces(server) == []
    fake_install.rmdir()


def test_a_frozen_guard_does_not_hide_the_death_of_its_server(fake_install, tmp_path, monkeypatch):
    monkeypatch.setattr(guarded_server, "SILENT_S", 0.5)
    with GuardedServer([]) as server:
        wait_until((tmp_path / "ready").exists, 5, "the fake server")
        os.kill(processes.parent(server.pid), signal.SIGSTOP)
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.running(), 5, "the end of the server")
        server.restart()
        assert server.running()
    assert traces(server) == []


def test_shared_memory_and_key_are_hidden_from_other_users(fake_install, tmp_path):
    with GuardedServer(["--flag=aSecret,aSecret", "--other"], secret="aSecret") as server:
        wait_until((tmp_path / "ready").exists, 5, "the fake server")
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
        assert serve.runtime_dir.read_owner(server.folder).shm_prefix == server.shm_prefix
        assert serve.runtime_dir.sweep(fake_install) == [], "it is locked again"
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
        wait_until((tmp_path / "ready").exists, 5, "the fake server")
    assert traces(server) == []
    fake_install.rmdir()


def test_a_server_that_cannot_be_started_is_an_error_and_leaves_nothing(fake_install, monkeypatch):
    monkeypatch.setattr(
        triton_install, "prepare", lambda folder, python=None: TritonInstall(Path("/no/tritonserver"), (), {})
    )
    with pytest.raises(TridecodeError, match="could not be started"):
        GuardedServer([])
    fake_install.rmdir()


# ---------------------------------------------------------------- serve


def repository(path: Path, name: str = "toy", text: str = "") -> Path:
    (path / name).mkdir(parents=True, exist_ok=True)
    (path / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "python"\n{text}')
    return path


def test_a_missing_or_empty_repository_is_an_error(tmp_path, caplog):
    assert serve.main([str(tmp_path / "none")]) == 2
    assert "none is no directory" in caplog.text
    with pytest.raises(ConfigError, match="holds no model.*config.pbtxt"):
        serve.serve(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("to y", "", "model folder 'to y'"),
        ("$(touch x)", "", r"model folder '\$\(touch x\)'"),
        ("toy", 'default_model_filename: "`touch x`"', "default_model_filename is '`touch x`'"),
        ("toy", 'instance_group { name: "a;b" }', "instance_group name is 'a;b'"),
        (
            "toy",
            'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/a b" } }',
            "EXECUTION_ENV_PATH is '/a b'",
        ),
    ],
)
def test_what_triton_would_hand_to_bash_is_refused_by_name(tmp_path, name, text, said):
    with pytest.raises(ConfigError, match=said):
        serve.serve(repository(tmp_path, name, text))


def test_ports_are_checked_before_anything_starts(tmp_path):
    repository(tmp_path)
    http, grpc, metrics = free_ports(3)
    with pytest.raises(ConfigError, match=r"--http-port is 99999; wanted 1 to 65535"):
        serve.serve(tmp_path, 99999, grpc, metrics)
    with pytest.raises(ConfigError, match=rf"--http-port and --grpc-port are both {http}"):
        serve.serve(tmp_path, http, http, metrics)
    with socket.create_server(("127.0.0.1", metrics)):
        taken = rf"port {metrics} on 127\.0\.0\.1 is taken by process {os.getpid()} .*--metrics-port"
        with pytest.raises(ConfigError, match=taken):
            serve.serve(tmp_path, http, grpc, metrics)
    with pytest.raises(ConfigError, match="192.0.2.1"):
        serve.serve(tmp_path, http, grpc, metrics, address="192.0.2.1")


@pytest.mark.parametrize(
    "flag",
    [
        "--backend-config=python,shm-region-prefix-name=x",
        "--load-model=toy",
        "--http-port=1",
        "--model-control-mode=none",
        "--http-address=0.0.0.0",
    ],
)
def test_flags_of_triton_that_are_serve_s_own_are_refused(tmp_path, flag):
    with pytest.raises(ConfigError, match=flag.rpartition("=")[0].rpartition(",")[2]):
        serve.serve(repository(tmp_path), triton_args=[flag])


def test_one_more_port_with_a_control_api_is_warned_of(tmp_path, caplog):
    options = serve.ServeOptions(
        repository(tmp_path), *free_ports(3), triton_args=("--allow-sagemaker=true",)
    )
    options.check()
    assert "--allow-sagemaker opens one more HTTP port" in caplog.text


def test_everything_is_on_loopback_and_closed_by_default(tmp_path):
    arguments = serve.ServeOptions(tmp_path, key="k" * 16).server_arguments()
    for name in ("http", "grpc", "metrics"):
        assert f"--{name}-address=127.0.0.1" in arguments
    closed = f"model-repository,shared-memory,trace,logging:tridecode-control={'k' * 16}"
    assert f"--http-restricted-api={closed}" in arguments
    assert f"--grpc-restricted-protocol={closed}" in arguments
    opened = serve.ServeOptions(tmp_path, address="0.0.0.0", metrics_address="127.0.0.1").server_arguments()
    assert {"--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--metrics-address=127.0.0.1"} < set(opened)


def test_an_api_that_the_user_restricts_keeps_the_user_s_key(tmp_path):
    given = ("--http-restricted-api=health,trace:a=b",)
    arguments = serve.ServeOptions(tmp_path, triton_args=given).server_arguments()
    ours = triton_access.values_of(arguments, "http-restricted-api")[0]
    assert ours.startswith("model-repository,shared-memory,logging:")


def test_a_key_is_random_or_given_and_leaves_the_environment(monkeypatch):
    assert triton_access.control_key() != triton_access.control_key()
    monkeypatch.setenv("TRIDECODE_CONTROL_KEY", "0123456789abcdef")
    assert triton_access.control_key() == "0123456789abcdef"
    assert "TRIDECODE_CONTROL_KEY" not in os.environ
    monkeypatch.setenv("TRIDECODE_CONTROL_KEY", "a:b=c,")
    with pytest.raises(ConfigError, match="TRIDECODE_CONTROL_KEY holds 6 characters"):
        triton_access.control_key()


def test_the_drop_in_closes_what_its_command_line_leaves_open():
    arguments = tritonserver.with_defaults(["--model-repository", "m", "--http-address=0.0.0.0"], "k" * 16)
    assert "--grpc-address=127.0.0.1" in arguments and "--http-address=127.0.0.1" not in arguments
    assert len(triton_access.values_of(arguments, "http-restricted-api")) == 1
    assert arguments[-3:] == ["--model-repository", "m", "--http-address=0.0.0.0"]


@pytest.mark.parametrize(
    "flags", [["serve", "NONE"], ["tritonserver", "--model-repository", "NONE", "--id=x"]]
)
def test_the_command_line_says_a_wrong_setting_in_one_line_and_ends_with_2(tmp_path, flags, caplog):
    arguments = [flag.replace("NONE", str(tmp_path / "none")) for flag in flags]
    result = CliRunner().invoke(cli.app, arguments)
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("tridecode")]
    said = [line for line in result.stderr.splitlines() if line.startswith("error:")] + logged
    assert result.exit_code == 2
    assert (
        len(said) == 1
        and "Traceback" not in result.stderr.partition("error:")[2].partition("\n")[0]
        and "none is no directory" in said[0]
    )


@pytest.mark.parametrize("value", ["never", "-1", "nan"])
def test_a_wrong_orphan_rule_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match="--orphans is"):
        serve.serve(repository(tmp_path), orphans=value)


def test_arguments_of_triton_come_after_ours(tmp_path):
    options = serve.ServeOptions(tmp_path, drain_s=7.4, triton_args=("--log-verbose=1",))
    arguments = options.server_arguments()
    assert arguments[0] == f"--model-repository={tmp_path}"
    assert arguments[-1] == "--log-verbose=1"
    assert "--exit-timeout-secs=7" in arguments
    assert "--model-control-mode=explicit" in arguments, "without it a dead door cannot be brought back"


@pytest.mark.parametrize("gpu", [False, True])
def test_gpu_metrics_are_left_out_where_there_is_no_gpu(tmp_path, monkeypatch, gpu):
    monkeypatch.setenv("PATH", str(tmp_path))
    if gpu:
        executable(tmp_path / "nvidia-smi", "#!/bin/sh\n")
    assert ("--allow-gpu-metrics=false" in serve.ServeOptions(tmp_path).server_arguments()) != gpu


@pytest.fixture
def fake_triton_on_path(tmp_path, monkeypatch) -> Iterator[Path]:
    """Where to write a shell script that `serve` takes for tritonserver."""
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


def test_a_server_that_dies_too_often_is_given_up(tmp_path, monkeypatch):
    deaths = serve._Deaths()
    assert [deaths.add(now) for now in (0.0, 1.0, serve.DEATHS_WITHIN_S + 0.5)] == [1, 2, 2]
    options = serve.ServeOptions(tmp_path, drain_s=0)
    dying = RunningServer(tmp_path)
    serving = serve._Serving(options, dying, SimpleNamespace(count=0, name=""), ["toy"])
    monkeypatch.setattr(serve, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(serving, "_first_start", lambda: None)
    monkeypatch.setattr(dying, "running", lambda: False)
    with pytest.raises(
        TridecodeError, match="was killed by SIGABRT; that was death 10 within 300 s: giving up"
    ):
        serving.run()
    assert dying.restarts == serve.MAX_DEATHS - 1


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
    options = serve.ServeOptions(tmp_path, http_port=triton.server.server_port, address="127.0.0.1")
    signals = SimpleNamespace(count=1, name="SIGTERM")
    assert serve._Serving(options, RunningServer(tmp_path), signals).run() == 0
    assert triton.calls == calls


HANGING = "#!/bin/sh\ntrap '' TERM\necho loading\nwhile :; do sleep 1; done\n"


def test_a_server_ends_with_the_process_that_started_it(tmp_path, fake_triton_on_path):
    executable(fake_triton_on_path, HANGING)
    code = "import pathlib, sys, time; from tridecode.tools.running_server import ServerProcess\n"
    code += "path = pathlib.Path(sys.argv[1]); server = ServerProcess(path / 'repo', path / 'log')\n"
    code += "print(server.process.pid, flush=True); time.sleep(60)"
    repository(tmp_path / "repo")
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        pid = int(starter.stdout.readline())
        wait_until(lambda: "loading\n" in (tmp_path / "log").read_text(), 20, "the start")
        starter.kill()
    wait_until(lambda: processes.identify(pid) is None, 10, "the end of serve")
    runtime_base = Path(os.environ["TRIDECODE_RUNTIME_DIR"])
    wait_until(lambda: not list(runtime_base.iterdir()), 20, "the guard's work")


def test_a_server_that_hangs_while_it_loads_is_not_waited_for(tmp_path, fake_triton_on_path):
    executable(fake_triton_on_path, HANGING)
    server = ServerProcess(repository(tmp_path / "repo"), tmp_path / "log", drain_s=60)
    wait_until(lambda: "loading\n" in server.log(), 10, "the start")
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < serve.END_S + 10, "of the sixty seconds for requests"
