"""Keeps threads of this process on chosen cores, and lets a thread leave them. Standard library only."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterable

_all: set[int] = set()  # the cores of the process before any of its threads was kept on a few


def choose(count: int, instance: str, allowed: Collection[int]) -> set[int]:
    """Return `count` of the allowed cores, all if there are fewer.

    instance: a name that ends with a number. Other names mostly get other cores, and names that differ only
    in their numbers get different ones while there are enough.
    """
    name, _, number = instance.rpartition("_")
    first = zlib.crc32(name.encode()) + count * (int(number) if number.isdigit() else 0)
    cores = sorted(allowed)
    return {cores[(first + step) % len(cores)] for step in range(count)}


def keep(threads: Iterable[int], cores: Collection[int]) -> None:
    """Run these threads on these cores only. Threads that they start later inherit that, unless they leave.

    threads: their native ids; one that has ended is skipped. Raises OSError if the system does not allow it.
    """
    if not _all:
        _all.update(os.sched_getaffinity(0))
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cores)
        except ProcessLookupError:
            continue


def leave() -> None:
    """Let the calling thread use all cores of the process again, as must the processes that it starts."""
    if _all:
        os.sched_setaffinity(0, _all)
