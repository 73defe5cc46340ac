"""The processors that other processes used while a block ran: busy time minus ours and our descendants'."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType

_PROC = "/proc"
_TICK_S = 0.25
_HZ = os.sysconf("SC_CLK_TCK")


class Neighbours:
    """A context manager. cores: processors that other processes kept busy on average, after the block has
    ended. A child of ours that lives for less than a tick may be counted as another process."""

    def __init__(self) -> None:
        self.cores = 0.0
        self._ours: dict[int, float] = {}  # pid -> processor seconds, when last seen
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Neighbours:
        self._look()
        self._before = dict(self._ours)
        self._busy, self._began = _busy_s(), time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._look()
        ours = sum(seconds - self._before.get(pid, 0.0) for pid, seconds in self._ours.items())
        elapsed = time.monotonic() - self._began
        self.cores = max(0.0, (_busy_s() - self._busy - ours) / elapsed)

    def _watch(self) -> None:
        while not self._done.wait(_TICK_S):
            self._look()

    def _look(self) -> None:
        """Record the time of each of our processes; one that was ours stays ours when its parent dies."""
        parents, used = {}, {}
        for entry in os.listdir(_PROC):
            if not entry.isdigit():
                continue
            try:
                with open(f"{_PROC}/{entry}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(entry)] = int(fields[1])
            used[int(entry)] = (int(fields[11]) + int(fields[12])) / _HZ
        for pid in parents:
            if pid in self._ours or _descends(pid, os.getpid(), parents):
                self._ours[pid] = used[pid]


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid and pid != ancestor:
        pid = parents.get(pid, 0)
    return pid == ancestor


def _busy_s() -> float:
    """Seconds that all processors together have been busy since the machine started."""
    with open(f"{_PROC}/stat") as file:
        user, nice, system, _idle, _wait, interrupts, soft, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + interrupts + soft + steal) / _HZ
