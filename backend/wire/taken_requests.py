"""Counts the requests that a door has accepted and not ended; readable after the door's process has died.

If a door dies, Triton 2.51 answers requests that it had not received, or that were inside execute(), with an
error. A request whose execute() has returned without an answer can only be ended by its door, and so never
after the door's death. A door counts these requests here.

The count is 8 bytes in an anonymous file (memfd) that the process maps; updating it is a store to memory. The
kernel keeps the file while any process has it open, so it survives SIGKILL, needs no disk or folder, and
leaves nothing behind. `tridecode serve` opens it through /proc while the door lives. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import struct
import threading
from collections.abc import Hashable
from typing import BinaryIO

NAME = "tridecode-taken"
_LINK = f"/memfd:{NAME}"  # target of the link in /proc/PID/fd, before " (deleted)"
_LAYOUT = struct.Struct("<8sQ")  # magic, count
_COUNT = struct.Struct("<Q")
_MAGIC = b"tdtaken1"
_CLOSE_ON_EXEC = 1
#: os.memfd_create is missing in a Python built with an old glibc
_libc = ctypes.CDLL(None, use_errno=True)

_log = logging.getLogger("tridecode.door")


class TakenRequests:
    """The count of one door, shared by its process. Thread-safe.

    Between `begin` and `returned` the request is inside execute(), and Triton would answer it. From
    `returned` to `end` it is counted. Without memfd (a sandbox) nothing is counted, and `serve` relies on
    Triton's shared memory alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executing: set[Hashable] = set()
        self._taken: set[Hashable] = set()
        self._memory: mmap.mmap | None = None
        try:
            self._memory = _shared_memory()
        except (OSError, AttributeError, ValueError) as error:
            _log.warning("requests cannot be counted for `tridecode serve`: %s", error)

    def begin(self, request: Hashable) -> None:
        """Record that execute() has received a request."""
        with self._lock:
            self._executing.add(request)

    def returned(self) -> None:
        """Count the requests that have not ended when execute() returns."""
        with self._lock:
            self._taken |= self._executing
            self._executing.clear()
            self._store()

    def end(self, request: Hashable) -> None:
        """Record that the final response of a request was sent."""
        with self._lock:
            self._executing.discard(request)
            if request in self._taken:
                self._taken.remove(request)
                self._store()

    def _store(self) -> None:
        if self._memory is not None:
            _COUNT.pack_into(self._memory, len(_MAGIC), len(self._taken))


def _shared_memory() -> mmap.mmap:
    """Map a new anonymous file; the mapping keeps a descriptor of it open."""
    fd = _libc.memfd_create(NAME.encode(), _CLOSE_ON_EXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        memory = mmap.mmap(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)
    _LAYOUT.pack_into(memory, 0, _MAGIC, 0)
    return memory


class TakenCount:
    """Reads the count of a door, even after the door's death."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self) -> int:
        """Return the number of requests that the door has accepted and not ended."""
        return _LAYOUT.unpack(os.pread(self._file.fileno(), _LAYOUT.size, 0))[1]


def find_count(pid: int) -> TakenCount | None:
    """Return the count of a living door; None if the process has none (yet), or may not be inspected."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            path = f"{folder}/{name}"
            with contextlib.suppress(OSError):  # a descriptor that has just been closed
                if os.readlink(path).startswith(_LINK):
                    return _opened(path)
    return None


def _opened(path: str) -> TakenCount | None:
    """Open the count; None until the door has written the magic. The last reference closes the file."""
    file = open(path, "rb", buffering=0)  # noqa: SIM115  TakenCount keeps it open
    if os.pread(file.fileno(), _LAYOUT.size, 0)[: len(_MAGIC)] == _MAGIC:
        return TakenCount(file)
    file.close()
    return None
