"""Identifies processes by pid and start time, so that a reused pid is never mistaken for the old process.

Reads only /proc (Linux) and imports none of our modules, so a door may use it as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import signal
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4  # flag of an exiting task in the kernel's task flags
_libc = ctypes.CDLL(None, use_errno=True)

STOPPED_S = 3.0  # Waker continues a process that a signal has stopped for so long
STATE_WORDS = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting for the disk or a driver",
    "R": "its interpreter is blocked by a computation",
    "S": "its interpreter is blocked by a wait",
    "X": "it is ending",
}


class ProcessId(NamedTuple):
    """One process, unique within one boot: pid, and its start in clock ticks since boot."""

    pid: int
    start: int


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the third (state) on; None if the process does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()  # the name before it may hold blanks and parentheses


def state(pid: int) -> str:
    """Return the one-letter state that ps shows (R, S, D, T, t, Z, …); "" if the process does not exist.

    X: it is exiting. Its connections may close some time before its parent sees the exit.
    """
    fields = _stat(pid)
    if fields is None:
        return ""
    return "X" if int(fields[6]) & _PF_EXITING and fields[0] != "Z" else fields[0]


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a living process; None if it is gone or a zombie."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return ProcessId(pid, int(fields[19]))


def alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def parent(pid: int) -> int:
    """Return the parent's pid; 0 if the process does not exist."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children(pid: int) -> list[int]:
    """Return the pids of the children of `pid`, zombies included."""
    lists = glob.glob(f"/proc/{pid}/task/*/children")
    if not lists and os.path.exists(f"/proc/{pid}"):  # a kernel without CONFIG_PROC_CHILDREN
        return [child for child in all_pids() if parent(child) == pid]
    found: list[int] = []
    for path in lists:
        try:
            with open(path) as file:
                found += map(int, file.read().split())
        except OSError:
            pass  # a thread that has just ended
    return sorted(found)


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; empty if it is a zombie, gone, or not readable by us."""
    return [part.decode(errors="replace") for part in _read(pid, "cmdline").split(b"\0")[:-1]]


def has_environment(pid: int, entry: str) -> bool:
    """Return whether the process was started with exactly `entry` ("NAME=value") in its environment."""
    return entry.encode() in _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def kill(process: ProcessId, signum: int = signal.SIGKILL) -> None:
    """Signal the process if it is still the same one; do nothing if it is gone."""
    if alive(process):
        _signal(os.kill, process.pid, signum)


def kill_group(leader: int, signum: int = signal.SIGKILL) -> None:
    """Signal every process of the group; do nothing if it is gone."""
    _signal(os.killpg, leader, signum)


def _signal(send, pid: int, signum: int) -> None:
    try:
        send(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends.

    May be used as preexec_fn in a process without gRPC: preexec_fn makes subprocess fork, and gRPC's threads
    may abort in the fork.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with(parent: int) -> None:
    """Call die_with_parent, and exit if the parent has ended before. parent: its pid, which it has passed.

    A parent that is killed while its child still imports modules would otherwise leave the child behind.
    """
    die_with_parent()
    if os.getppid() != parent:
        raise SystemExit(1)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Waker:
    """Continues a process that a signal has stopped for STOPPED_S: its requests pause instead of hanging.

    Times are monotonic seconds that the caller gives.
    """

    def __init__(self) -> None:
        self._stopped_at: float | None = None

    def look(self, pid: int, now: float) -> bool:
        """Return whether the process has just been continued."""
        if state(pid) != "T":
            self._stopped_at = None
            return False
        if self._stopped_at is None:
            self._stopped_at = now
        if now - self._stopped_at < STOPPED_S:
            return False
        self._stopped_at = None
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
        return True
