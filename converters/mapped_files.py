"""Limits the resident pages of a mapped checkpoint while it is read once."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

_PAGEOUT = getattr(mmap, "MADV_PAGEOUT", 21)  # Linux 5.4; harmless for a range that is no longer mapped
_RESIDENT_BYTES = 128 << 20
_PERIOD_S = 0.02
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)")


def _mappings() -> Iterator[tuple[int, int, str]]:
    """(start, stop, path) of every mapping of a file."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            match = _LINE.match(line)
            if match is not None and match[4] != "0":
                yield int(match[1], 16), int(match[2], 16), match[5]


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a CPU tensor is a view of a mapped file."""
    address = tensor.data_ptr()
    return any(start <= address < stop for start, stop, _ in _mappings())


@contextmanager
def released_pages(files: list[Path]) -> Iterator[None]:
    """While the block runs, release pages of the mapped `files` once too many are resident.

    The kernel would do so only under pressure, and until then they count as this process's memory.
    """
    names = {str(path.resolve()) for path in files}
    ranges = [(start, stop) for start, stop, path in _mappings() if path in names]
    ended = threading.Event()
    thread = threading.Thread(target=_release, args=(ranges, ended), name="release-pages", daemon=True)
    if ranges:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if ranges:
            thread.join()


def _release(ranges: list[tuple[int, int]], ended: threading.Event) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    first = _resident_file_bytes()
    while not ended.wait(_PERIOD_S):
        if _resident_file_bytes() - first > _RESIDENT_BYTES:
            for start, stop in ranges:
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _PAGEOUT)


def _resident_file_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[2]) * os.sysconf("SC_PAGE_SIZE")
