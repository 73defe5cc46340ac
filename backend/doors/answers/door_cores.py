"""Keeps the threads of a door on one core.

Only one thread at a time has the GIL, so the threads of a door need one core. On several cores each change
of the holder wakes another core. On a virtual machine with 16 cores that took so long that 64 streams got
4,200 responses per second, and 10,800 with all threads on one core (docs/lab/loads.md).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable

from tridecode.backend.base import cores
from tridecode.backend.doors.triton_owner import shared_memory_region

#: with fewer cores, the engine and the server may keep a door's only core busy
_ENOUGH = 4

_log = logging.getLogger("tridecode.door")


def share_cores(count: int | None, instance: str, free: Iterable[threading.Thread] = ()) -> None:
    """Let the threads of this process share `count` cores; 0: all. None: 1 if there are enough.

    instance: Triton's name of the model instance. free: threads that work for long without the GIL and may
    use any core. Without effect in a process that is not a stub of Triton's, such as a test.
    """
    allowed = os.sched_getaffinity(0)
    if count is None:
        count = 1 if len(allowed) >= _ENOUGH else 0
    if count == 0 or count >= len(allowed) or not shared_memory_region():
        return
    threads = set(map(int, os.listdir("/proc/self/task"))) - {thread.native_id for thread in free}
    try:
        cores.keep(threads, cores.choose(count, instance, allowed))
    except OSError as error:
        _log.warning("door_cores has no effect: %s", error)
