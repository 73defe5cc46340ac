"""`tridecode serve` as a child process, for tests, the demonstration and benchmarks."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.supervisor import processes
from tridecode.tools.serve import triton_access
from tridecode.tools.serve.ports import free_ports
from tridecode.tools.serve.triton_http import TritonHttp

LOG_LINES = 60  # last lines of the server's log that an error shows


class ServerProcess:
    """One `tridecode serve` on free ports of the loopback interface; its output goes to `log_file`.

    options: further options of `tridecode serve`. It ends with the process that started it.
    """

    def __init__(
        self,
        repository: str | os.PathLike,
        log_file: Path,
        door_python: str | None = None,
        drain_s: float = 20.0,
        triton_args: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.log_file = log_file
        command = [sys.executable, "-m", "tridecode.tools.cli", "serve", str(repository)]
        command += ["--address", triton_access.LOOPBACK, "--parent", str(os.getpid())]
        command += ["--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port)]
        command += ["--metrics-port", str(self.metrics_port), "--drain-s", str(drain_s)]
        command += ["--door-python", door_python] if door_python else []
        command += list(options)
        command += ["--", *triton_args]
        self._key = secrets.token_urlsafe(24)
        environment = {**os.environ, triton_access.KEY_VARIABLE: self._key}
        with log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    @property
    def http_url(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def http(self) -> TritonHttp:
        """Return an HTTP client with the key of the control APIs."""
        return TritonHttp(self.http_url, self._key)

    @property
    def server_pid(self) -> int:
        """The pid of tritonserver, a grandchild; 0 while there is none."""
        for guard in processes.children(self.process.pid):
            for pid in processes.children(guard):
                if os.path.basename((processes.command_line(pid) or [""])[0]) == "tritonserver":
                    return pid
        return 0

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def ready(self) -> bool:
        return self.http.ready()

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Raises TridecodeError with the end of the log if the server ends or takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            if self.process.poll() is not None:
                raise TridecodeError(f"serve ended with {self.process.returncode}:\n{self._log_end()}")
            if time.monotonic() > deadline:
                raise TridecodeError(f"the server was not ready after {timeout_s:g} s:\n{self._log_end()}")
            time.sleep(0.1)
        self._wait_for_metrics(deadline)

    def _wait_for_metrics(self, deadline: float) -> None:
        """Wait until the metrics port accepts connections: Triton opens it after the server is ready."""
        while True:
            try:
                socket.create_connection((triton_access.LOOPBACK, self.metrics_port), timeout=1.0).close()
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise TridecodeError(f"the server opened no metrics port:\n{self._log_end()}") from None
                time.sleep(0.02)
            else:
                return

    def _log_end(self) -> str:
        return "\n".join(self.log().splitlines()[-LOG_LINES:])

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, then wait: the exit code of `tridecode serve`."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()  # the guard cleans up
            self.process.wait()
            raise TridecodeError(f"serve did not end within {timeout_s:g} s:\n{self._log_end()}") from None


@contextmanager
def running_server(
    repository: str | os.PathLike, ready_s: float = 120.0, log_file: Path | None = None, **options
) -> Iterator[ServerProcess]:
    """A server that is ready, stopped at the end; options as of ServerProcess.

    Where the body raises, the end of the log is printed. Without log_file the log is a temporary file.
    """
    folder = Path(tempfile.mkdtemp(prefix="tridecode-log-"))
    server = ServerProcess(repository, log_file or folder / "serve.log", **options)
    try:
        server.wait_ready(ready_s)
        yield server
    except BaseException:
        print(server._log_end(), file=sys.stderr)
        raise
    finally:
        server.stop()
        shutil.rmtree(folder)
