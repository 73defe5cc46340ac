"""The parent process of tritonserver: cleans up after it, whichever process is killed.

`tridecode serve` starts this process and holds a pipe to its standard input. The first line is a JSON object
with "command", "environment" and "secret" (a part of the command that no other user may read). Later lines
are "term", "kill server", "kill" (everything) and, once the server has ended, "start" (restart the server).
The end of the pipe means that `serve` has ended: then everything is killed. Reports go to a second pipe:
"started PID", "ended RETURNCODE", "cleaned".

Every process that the server starts has TRIDECODE_RUNTIME_DIR=<folder> in its environment, which is how this
process finds it. The engines live as long as this process, not as long as one tritonserver (TRIDECODE_OWNER).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from tridecode.backend.nodes.launchers import inherited_fds
from tridecode.backend.supervisor import processes, runtime_dir, shared_memory
from tridecode.tools.serve import triton_access

LEAVE_S = 4.0  # time for supervisors to notice the server's end and clean up, before they are killed
DEATH_S = 20.0  # time for killed processes to end; a driver may delay one
#: stack size of each thread of tritonserver; it costs address space, not memory. Triton 2.51 keeps the body
#: of an HTTP request on the stack: with the usual 8 MiB, 4 MB of JSON crash it with SIGSEGV.
STACK_BYTES = 1 << 30
_POLL_S = 0.1
_FIRST_POLL_S = 0.005  # polling interval until the server has read its arguments
CONCEAL_S = 10.0  # time after which the server has certainly read its arguments


def marked(folder: Path) -> list[processes.ProcessId]:
    """Living processes of the server whose runtime folder this is, except the guard and this process."""
    mark = f"TRIDECODE_RUNTIME_DIR={folder}"
    pids = [
        pid for pid in processes.all_pids() if pid != os.getpid() and processes.has_environment(pid, mark)
    ]
    return [process for process in map(processes.identify, pids) if process is not None]


def clean(folder: Path, shm_prefix: str, leave_s: float = LEAVE_S) -> None:
    """Clean up after the server's end: wait leave_s for its processes, kill the rest, remove memory and
    folder.
    """
    start = time.monotonic()
    while left := marked(folder):
        waited = time.monotonic() - start
        if waited > leave_s + DEATH_S:
            print(f"processes that do not die: {[process.pid for process in left]}", file=sys.stderr)
            break
        if waited >= leave_s:
            for process in left:
                processes.kill(process)
        time.sleep(0.02)
    shared_memory.unlink_prefix(shm_prefix)
    runtime_dir.remove(folder)


def close_regions(shm_prefix: str) -> None:
    """Make the shared memory of the stubs private: it holds prompts and answers.

    Triton's Boost sets mode 0644 by fchmod, which no umask changes.
    """
    for name in os.listdir(shared_memory.SHM) if os.path.isdir(shared_memory.SHM) else ():
        if name.startswith(shm_prefix):
            try:
                os.chmod(os.path.join(shared_memory.SHM, name), 0o600)
            except OSError:
                pass  # its stub has just been unloaded


def clean_session(leader: int, shm_prefix: str) -> None:
    """Kill a dead tritonserver's stubs and remove their shared memory, before it is restarted.

    All processes in the server's own session are its stubs; the engines have sessions of their own.
    """
    deadline = time.monotonic() + DEATH_S
    while (left := _of_session(leader)) and time.monotonic() < deadline:
        for process in left:
            processes.kill(process)
        _reap_orphans(leader)
        time.sleep(0.02)
    shared_memory.unlink_prefix(shm_prefix)


def _of_session(leader: int) -> list[processes.ProcessId]:
    found = []
    for pid in processes.all_pids():
        try:
            if os.getsid(pid) != leader:
                continue
        except OSError:
            continue
        process = processes.identify(pid)
        if process is not None:
            found.append(process)
    return found


def _reap_orphans(server_pid: int) -> None:
    """Reap adopted processes that have ended, except the server, which subprocess waits for."""
    for pid in processes.children(os.getpid()):
        if pid != server_pid and processes.state(pid) == "Z":
            os.waitpid(pid, os.WNOHANG)


def _prepare_server() -> None:
    """Prepare the forked child: it dies with this process, and its threads get large stacks."""
    processes.die_with_parent()
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    size = STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (size, hard))


class Guard:
    """One server's guard; single-threaded, because die_with_parent is tied to the thread that forked."""

    def __init__(self, folder: Path, shm_prefix: str, report_fd: int) -> None:
        self._folder = folder
        self._shm_prefix = shm_prefix
        self._report_fd = report_fd
        self._orders = b""
        self._listening = True
        self._kill_at_once = False  # kill without waiting
        self._may_restart = True  # whether a server that ends may be started again

    def run(self) -> None:
        os.umask(0o077)  # inherited by tritonserver and all its descendants
        processes.adopt_orphans()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda *_: None)  # the terminal signals every process; `serve` decides
        order = self._first_order()
        while order is not None:
            process = subprocess.Popen(
                order["command"],
                env=order["environment"],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_prepare_server,
                pass_fds=inherited_fds(os.environ),
            )
            self._report(f"started {process.pid}")
            self._report(f"ended {self._watch(process, order.get('secret', ''))}")
            if not self._wait_start(process.pid):
                break
            clean_session(process.pid, self._shm_prefix)
        clean(self._folder, self._shm_prefix, 0.0 if self._kill_at_once else LEAVE_S)
        self._report("cleaned")

    def _first_order(self) -> dict | None:
        """Return the first order, or None if `serve` ended before it wrote one."""
        while self._listening and b"\n" not in self._orders:
            self._listen(_POLL_S, 65536)
        line, _, self._orders = self._orders.partition(b"\n")
        return json.loads(line) if line.startswith(b"{") else None

    def _listen(self, timeout_s: float, size: int = 4096) -> None:
        """Read orders from `serve` for up to timeout_s; the end of the pipe counts as "kill"."""
        if not self._listening:
            time.sleep(timeout_s)
        elif select.select([0], [], [], timeout_s)[0]:
            part = os.read(0, size)
            self._listening = bool(part)
            self._orders += part or b"kill\n"

    def _next_order(self) -> bytes:
        """The next whole line; empty if none has arrived."""
        if b"\n" not in self._orders:
            return b""
        line, self._orders = self._orders.split(b"\n", 1)
        return line

    def _watch(self, process: subprocess.Popen, secret: str) -> int:
        """Wait until the server has ended; return its code."""
        deadline = time.monotonic() + CONCEAL_S
        while process.poll() is None:
            if secret and (triton_access.has_read_arguments(process.pid) or time.monotonic() > deadline):
                self._conceal(process.pid, secret)
                secret = ""
            self._listen(_FIRST_POLL_S if secret else _POLL_S)
            while order := self._next_order():
                self._obey(process, order)
            close_regions(self._shm_prefix)
            _reap_orphans(process.pid)
        return process.returncode

    def _conceal(self, pid: int, secret: str) -> None:
        try:
            triton_access.conceal(pid, secret)
        except OSError as error:
            print(f"other users can read the control key in /proc/{pid}/cmdline: {error}", file=sys.stderr)

    def _obey(self, process: subprocess.Popen, order: bytes) -> None:
        if order == b"kill":
            self._kill_at_once, self._may_restart = True, False
            process.kill()
        elif order == b"kill server":
            process.kill()
        elif order == b"term":
            self._may_restart = False
            process.terminate()

    def _wait_start(self, dead_pid: int) -> bool:
        """Whether `serve` wants the dead server started again."""
        while self._may_restart:
            order = self._next_order()
            if order == b"start":
                return True
            if order in (b"kill", b"term"):
                self._kill_at_once, self._may_restart = order == b"kill", False
            elif not order:
                self._listen(_POLL_S)
            _reap_orphans(dead_pid)
        return False

    def _report(self, line: str) -> None:
        try:
            os.write(self._report_fd, line.encode() + b"\n")
        except OSError:
            pass  # `serve` has ended


def main() -> None:
    parser = argparse.ArgumentParser(prog="tridecode.tools.serve.guard", description=__doc__)
    parser.add_argument("--runtime-dir", required=True, type=Path)
    parser.add_argument("--shm-prefix", required=True)
    parser.add_argument("--report-fd", required=True, type=int)
    parser.add_argument(
        "--lock-fd", required=True, type=int, help="locked file descriptor of the runtime folder"
    )
    arguments = parser.parse_args()
    for fd in (arguments.report_fd, arguments.lock_fd):
        os.set_inheritable(fd, False)
    Guard(arguments.runtime_dir, arguments.shm_prefix, arguments.report_fd).run()


if __name__ == "__main__":
    main()
