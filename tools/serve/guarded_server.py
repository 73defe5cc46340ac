"""Starts tritonserver under its guard (guard.py), reports its state, and starts it again."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.nodes.launchers import inherited_fds
from tridecode.backend.supervisor import processes, runtime_dir
from tridecode.tools.serve import guard, triton_install
from tridecode.tools.serve.checks import check_plain_path, is_plain_path, repositories

START_S = 30.0  # for a guard to start the server, and to clean up after a dead one before it
SILENT_S = 5.0  # a guard that does not report its server's end for longer is killed
CLEAN_S = guard.LEAVE_S + guard.DEATH_S + 5.0  # for a guard to clean up
SHM_PREFIX = "triton_python_backend_shm_region"  # Triton's own; our mark comes after it
REPOSITORY = "repository"  # in the runtime folder: links to repositories with paths that are not plain
OWNER_VARIABLE = "TRIDECODE_OWNER"  # "PID:START" of the process whose life the engines share

_log = logging.getLogger("tridecode.serve")


class GuardedServer:
    """A tritonserver with a runtime folder, a shared memory prefix and a guard of its own.

    arguments: of tritonserver. secret: a part of them that no other user may read. folder: the runtime
    folder, which holds the backend directory and the runtime folders of the engines. pid: of tritonserver.
    Runtime folders that killed servers left are removed first. Leaving the context kills what still runs and
    waits until nothing is left of it.
    """

    def __init__(self, arguments: Sequence[str], door_python: str | None = None, secret: str = "") -> None:
        self._arguments = list(arguments)
        self._door_python = door_python
        self._secret = secret
        for removed in runtime_dir.sweep(runtime_dir.base_dir()):
            _log.warning("removed %s, which a killed server had left", removed)
        self._open()

    def _open(self) -> None:
        name = uuid.uuid4().hex[:8]
        self.folder: Path = runtime_dir.base_dir() / f"serve-{name}"
        check_plain_path(self.folder, "the runtime folder", "set TRIDECODE_RUNTIME_DIR to another one")
        self.shm_prefix = f"{SHM_PREFIX}_{name}_"
        self._lock_fd = runtime_dir.lock_new(self.folder)
        try:
            install = self._lay_out()
        except BaseException:
            runtime_dir.remove(self.folder)
            os.close(self._lock_fd)
            raise
        self._reports = b""
        self._read_fd, write_fd = os.pipe()
        self._start_guard(write_fd)
        os.close(write_fd)
        #: of a tritonserver that has ended: negative for a signal; None if its guard was killed with it
        self.returncode: int | None = None
        self._cleaned = False
        self._silent_since = time.monotonic()
        self._order(json.dumps(self._first_order(install)))
        self.pid = self._wait_started()

    def _lay_out(self) -> triton_install.TritonInstall:
        self._plain_arguments = self._with_plain_paths()
        install = triton_install.prepare(self.folder, self._door_python)
        self._links = [path for path in self.folder.rglob("*") if path.is_symlink()]
        return install

    def _with_plain_paths(self) -> list[str]:
        """The arguments, with links for repositories whose own path Triton's bash would split or execute."""
        links = {}
        for number, path in enumerate(sorted(set(repositories(self._arguments)))):
            if not is_plain_path(Path(path)):
                target = Path(path).absolute()
                links[path] = str(triton_install.link(self.folder / f"{REPOSITORY}-{number}", target))
        plain = []
        for argument in self._arguments:
            flag, equals, value = argument.partition("=")
            plain.append(f"{flag}={links[value]}" if value in links else links.get(argument, argument))
        return plain

    def _first_order(self, install: triton_install.TritonInstall) -> dict:
        command = [str(install.binary), *install.arguments]
        command.append(f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}")
        owner = runtime_dir.server_identity(self._guard.pid)
        environment = {
            **install.environment,
            "TRIDECODE_RUNTIME_DIR": str(self.folder),
            OWNER_VARIABLE: f"{owner.pid}:{owner.start}",
        }
        return {
            "command": [*command, *self._plain_arguments],
            "environment": environment,
            "secret": self._secret,
        }

    def _start_guard(self, write_fd: int) -> None:
        command = [sys.executable, "-m", "tridecode.tools.serve.guard", "--runtime-dir", str(self.folder)]
        command += ["--shm-prefix", self.shm_prefix, "--report-fd", str(write_fd)]
        command += ["--lock-fd", str(self._lock_fd)]
        self._guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=(write_fd, self._lock_fd, *inherited_fds(os.environ)),
            start_new_session=True,
        )
        self._write_owner()

    def _write_owner(self) -> None:
        owner = runtime_dir.owner_of(runtime_dir.server_identity(self._guard.pid))
        owner.shm_prefix = self.shm_prefix
        runtime_dir.write_owner(self._lock_fd, owner)

    def _wait_started(self) -> int:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            line = self._next_report(0.1)
            if line.startswith("started "):
                return int(line.split()[1])
            if self._guard.poll() is not None:
                break
        self.close()
        raise TridecodeError("tritonserver could not be started; the output of its guard above says why")

    def _next_report(self, timeout_s: float) -> str:
        """The next line of the guard; "" if there is none within timeout_s."""
        if b"\n" not in self._reports and select.select([self._read_fd], [], [], timeout_s)[0]:
            self._reports += os.read(self._read_fd, 4096)
        if b"\n" not in self._reports:
            return ""
        line, self._reports = self._reports.split(b"\n", 1)
        return line.decode()

    def _order(self, line: str) -> None:
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(line.encode() + b"\n")
            self._guard.stdin.flush()
        except OSError:
            pass  # the guard has ended; `running` will say so

    def running(self) -> bool:
        """Return whether tritonserver runs; it never outlives its guard."""
        if self._cleaned:
            return False
        line = self._next_report(0.0)
        if line.startswith("ended "):
            self.returncode = int(line.split()[1])
        if self.returncode is None and self._guard.poll() is None:
            self._look_at_guard(time.monotonic())
        return self.returncode is None and self._guard.poll() is None

    def _look_at_guard(self, now: float) -> None:
        """Kill a guard that does not report the server's end: it is frozen."""
        if processes.identify(self.pid) is not None:
            self._silent_since = now
        elif now - self._silent_since > SILENT_S:
            state = processes.state(self._guard.pid)
            why = processes.STATE_WORDS.get(state, f"process state {state}")
            _log.error(
                "the guard of tritonserver, process %d, is silent (%s): killing it", self._guard.pid, why
            )
            self._guard.kill()
            self._guard.wait()

    def has_exited(self) -> bool:
        """Return whether tritonserver ended by itself, with an exit code."""
        return self.returncode is not None and self.returncode >= 0

    def ending(self) -> str:
        """Describe how tritonserver ended."""
        if self._cleaned:
            return "could not be started"
        if self.returncode is None:
            return "was killed together with its guard"
        if self.returncode < 0:
            return f"was killed by {signal.Signals(-self.returncode).name}"
        return f"ended with exit code {self.returncode}"

    def restart(self) -> None:
        """Start a tritonserver that has ended again.

        The engines are kept if the guard is alive; if it was killed, both start again in another folder.
        Raises TridecodeError if the server cannot be started.
        """
        if self._guard.poll() is None:
            self.mend()
            self.returncode = None
            self._order("start")
            self.pid = self._wait_started()
        else:
            self.close()
            self._open()

    def mend(self) -> bool:
        """Repair the runtime folder where it, or something in it, was removed; whether that was so."""
        owner = self.folder / runtime_dir.OWNER
        if owner.exists() and all(link.is_symlink() for link in self._links):
            return False
        if not owner.exists():
            runtime_dir.base_dir()  # created, if it was removed as well
            fd = runtime_dir.lock_new(self.folder)
            os.close(self._lock_fd)
            self._lock_fd = fd
            self._write_owner()
        self._lay_out()
        return True

    def terminate(self) -> None:
        """SIGTERM to tritonserver; it is not started again."""
        self._order("term")

    def kill_server(self) -> None:
        """SIGKILL to tritonserver alone, so that it can be started again."""
        self._order("kill server")

    def kill(self) -> None:
        """SIGKILL to tritonserver and all that it started."""
        self._order("kill")

    def wait_cleaned(self) -> None:
        """Wait until the server has ended and nothing is left of it."""
        try:
            self._guard.wait(CLEAN_S)
        except subprocess.TimeoutExpired:  # frozen
            self._guard.kill()
            self._guard.wait()
        if self.folder.exists():  # the guard was killed
            guard.clean(self.folder, self.shm_prefix, 0.0)

    def close(self) -> None:
        if self._cleaned:
            return
        self._cleaned = True
        self.kill()
        self.wait_cleaned()
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.close()
        except OSError:
            pass  # an order that the guard did not live to read
        os.close(self._read_fd)
        os.close(self._lock_fd)

    def __enter__(self) -> GuardedServer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
