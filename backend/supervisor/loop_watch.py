"""Distinguishes a loop's thread that hangs asleep from one that is slow, by Linux's /proc. No torch.

A thread that computes, spins on its GPU, or waits for a core or the disk is running (R) or blocked (D), or
other threads of its process compute for it. A thread that sleeps (S), has not run a single instruction, and
has no other thread of its process working for it, waits for another process. Within a step that is legitimate
only in an exchange with other ranks or a synchronisation with its GPU, and both are reported (`waits`).
Starvation, swapping and paused processes never look like this. A thread in an endless loop runs, and cannot
be distinguished from a long step: step_timeout_s covers that.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

_TASKS = Path("/proc/self/task")
_OTHERS_SHARE = 0.2  # share of a core: threads that use less (heartbeats, sockets) do not work for the loop


class LoopWatch:
    """Watches one thread from another one of its process, at regular intervals. Times are monotonic
    seconds.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again: the thread may sleep, or the whole process was paused."""
        self._since = 0.0
        self._ran = ""
        self._cpu = (0.0, 0.0)
        self._busy: set[str] = set()

    def look(self, now: float, thread: threading.Thread) -> float:
        """Return the seconds for which the thread has slept without a reason.

        0.0 if it has run since the last call, or if another thread of this process may still wake it.
        """
        ran, before = _schedule(thread.native_id), self._ran
        cpu = (now, time.process_time() - time.thread_time())
        computing = cpu[1] - self._cpu[1] > _OTHERS_SHARE * (now - self._cpu[0])
        self._cpu, self._ran = cpu, ran
        if not ran or ran != before or computing or self._others_work():
            self._since = 0.0
            return 0.0
        self._since = self._since or now
        return now - self._since

    def _others_work(self) -> bool:
        """Return whether another thread was running both now and at the previous check; heartbeats take less
        time.
        """
        busy, before = _busy_others(), self._busy
        self._busy = busy
        return bool(busy & before)


def _schedule(native_id: int | None) -> str:
    """Return a text that changes whenever the thread runs: its time on a core, its waits for one, its time
    slices.

    "" if the kernel does not report it, or reports that the thread never ran.
    """
    try:
        text = (_TASKS / str(native_id) / "schedstat").read_text()
    except OSError:
        return ""
    return "" if text.startswith("0 ") else text


def _busy_others() -> set[str]:
    """Return the other threads that run, wait for a core, or are blocked by the disk."""
    others = {*os.listdir(_TASKS)} - {str(threading.get_native_id())}
    return {name for name in others if _state(name) not in ("S", "I", "")}


def _state(task: str) -> str:
    try:
        text = (_TASKS / task / "stat").read_text(errors="replace")
    except OSError:
        return ""  # it has just ended
    return text[text.rindex(")") + 2]


def place_of(thread: threading.Thread) -> str:
    """Return the current Python line of a thread and its caller, "file.py line 7 (function), called by …".

    "" for a thread that has ended.
    """
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    found: list[str] = []
    while frame is not None and len(found) < 2:
        code = frame.f_code
        found.append(f"{Path(code.co_filename).name} line {frame.f_lineno} ({code.co_name})")
        frame = frame.f_back
    return ", called by ".join(found)
