"""The parent of tritonserver: ends with it, and leaves nothing of it behind, whoever is killed.

`tridecode serve` starts this process and holds a pipe to its standard input. The first line is a JSON object
with "command" and "environment"; later lines are "term" and "kill". The end of the pipe means that `serve` is
gone: then the server is killed. Reports go to a second pipe: "started PID", "ended RETURNCODE", "cleaned".

Everything the server starts carries TRIDECODE_RUNTIME_DIR=<folder> in its environment; by that it is found
again.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from tridecode.backend.supervisor import processes, runtime_dir, shared_memory

LEAVE_S = 4.0  # the supervisors see that the server is gone and clean up within so long; then they are killed
DEATH_S = 20.0  # killed processes are waited for so long; a driver may hold one
_POLL_S = 0.1


def environment_mark(folder: Path) -> str:
    return f"TRIDECODE_RUNTIME_DIR={folder}"


def marked(folder: Path) -> list[processes.ProcessId]:
    """Living processes of the server whose runtime folder this is, the guard and ourselves excepted."""
    mark = environment_mark(folder)
    pids = [
        pid for pid in processes.all_pids() if pid != os.getpid() and processes.has_environment(pid, mark)
    ]
    return [process for process in map(processes.identify, pids) if process is not None]


def clean(folder: Path, shm_prefix: str, leave_s: float = LEAVE_S) -> None:
    """After the server's end: processes leave or are killed, shared memory and folder are removed."""
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


def _reap_orphans(server_pid: int) -> None:
    """Take leave of the dead that were adopted; never of the server, which subprocess waits for."""
    for pid in processes.children(os.getpid()):
        if pid != server_pid and processes.state(pid) == "Z":
            os.waitpid(pid, os.WNOHANG)


class Guard:
    """One server's guard; single-threaded, so that its end, too, is the server's end (die_with_parent)."""

    def __init__(self, folder: Path, shm_prefix: str, report_fd: int) -> None:
        self._folder = folder
        self._shm_prefix = shm_prefix
        self._report_fd = report_fd
        self._orders = b""
        self._hurry = False

    def run(self) -> None:
        processes.adopt_orphans()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda *_: None)  # a signal to everybody: `serve` decides what it means
        order = self._first_order()
        if order is not None:
            process = subprocess.Popen(
                order["command"],
                env=order["environment"],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )
            self._report(f"started {process.pid}")
            self._report(f"ended {self._watch(process)}")
        clean(self._folder, self._shm_prefix, 0.0 if self._hurry else LEAVE_S)
        self._report("cleaned")

    def _first_order(self) -> dict | None:
        """None if `serve` ended before it had written it."""
        while b"\n" not in self._orders:
            part = os.read(0, 65536)
            if not part:
                return None
            self._orders += part
        line, self._orders = self._orders.split(b"\n", 1)
        return json.loads(line)

    def _watch(self, process: subprocess.Popen) -> int:
        """Until the server has ended; its return code."""
        listening = True
        while process.poll() is None:
            if listening and select.select([0], [], [], _POLL_S)[0]:
                part = os.read(0, 4096)
                listening = bool(part)
                self._orders += part or b"kill\n"
            elif not listening:
                time.sleep(_POLL_S)
            self._obey(process)
            _reap_orphans(process.pid)
        return process.returncode

    def _obey(self, process: subprocess.Popen) -> None:
        while b"\n" in self._orders:
            line, self._orders = self._orders.split(b"\n", 1)
            if line == b"kill":
                self._hurry = True
                process.kill()
            elif line == b"term":
                process.terminate()

    def _report(self, line: str) -> None:
        try:
            os.write(self._report_fd, line.encode() + b"\n")
        except OSError:
            pass  # `serve` is gone


def main() -> None:
    parser = argparse.ArgumentParser(prog="tridecode.tools.server_guard", description=__doc__)
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
