"""Pins the memory of a rank's part of the host tier in a thread, after the rank is ready."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tridecode.backend.base.host_memory import available_memory
from tridecode.backend.engine.host_tier.readiness import SHARES

#: seconds between two pieces, during which steps can take the driver's lock. The host of an H200 populates 2
#: GB/s and pins 20 GB/s of populated memory; without pauses a step waited up to 0.2 s, or 1 s for fresh
#: memory
_REST_S = 0.0003
#: bytes that must remain available on the host; with less the tier is turned off
_RESERVE_BYTES = 64 << 20
_HUGEPAGE, _POPULATE_WRITE = 14, 23  # for madvise; Linux before 5.14 lacks the latter

_libc = ctypes.CDLL(None)  # calls release the GIL
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

log = logging.getLogger("tridecode.engine")


class Pinning:
    """pieces: (slots, bytes) each, in the order of pinning. fault: the reason why pinning has failed."""

    def __init__(self, pieces: Sequence[Tensor], device: torch.device):
        self.is_done, self.fault = False, ""
        self._stops = False
        if device.type == "cuda" and device.index is None:
            device = torch.device(
                "cuda", torch.cuda.current_device()
            )  # a thread has a current device of its own
        self._pieces, self._device = pieces, device
        self._num_slots = sum(map(len, pieces))
        self._pinned: list[Tensor] = []
        weakref.finalize(self, _unpin, self._pinned).atexit = False
        self._pinned_slots = 0
        self._thread = threading.Thread(target=self._run, name="host-tier", daemon=True)

    @property
    def shares(self) -> int:
        """Return how many of the SHARES of the slots are pinned, from the first slot on; -1 after a fault."""
        if self.fault:
            return -1
        if self.is_done:
            return SHARES
        return self._pinned_slots * SHARES // max(self._num_slots, 1)

    def start(self, on_done: Callable[[], None] = lambda: None) -> None:
        """Begin. on_done: called in the thread at the end."""
        self._on_done = on_done
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def undo(self) -> None:
        """Stop pinning and unpin everything. No copy may be in flight."""
        self._stops = True
        self._thread.join()  # ends after its current piece
        _unpin(self._pinned)

    def _run(self) -> None:
        if self._device.type == "cuda":
            self.fault = self._pin()
        if self.fault and not self._stops:
            log.warning("the host tier is off (host_cache_bytes in config.pbtxt): %s", self.fault)
        self.is_done = not self.fault
        self._on_done()

    def _pin(self) -> str:
        """Pin the pieces; return a fault or ""."""
        torch.cuda.set_device(self._device)
        runtime = torch.cuda.cudart()
        for piece in self._pieces:
            if self._stops:
                return "another rank could not pin its memory"
            if (free := available_memory()) < _RESERVE_BYTES:
                return f"{self._progress()}; the host has only {free:,} left"
            _populate(piece)
            code = int(runtime.cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))
            if code:
                return f"{self._progress()} (cudaHostRegister returned {code})"
            self._pinned.append(piece)
            self._pinned_slots += len(piece)
            time.sleep(_REST_S)
        return ""

    def _progress(self) -> str:
        found, wanted = (sum(one.nbytes for one in pieces) for pieces in (self._pinned, self._pieces))
        return f"the driver pinned {found:,} of {wanted:,} bytes"


def _unpin(pieces: list[Tensor]) -> None:
    """Unpin pieces and clear the list. If pinned memory is unmapped, the driver keeps its addresses and can
    no longer pin or map memory there.
    """
    while pieces:
        torch.cuda.cudart().cudaHostUnregister(pieces.pop().data_ptr())


def _populate(piece: Tensor) -> None:
    """Populate the pages if the kernel can. Pinning would do so while holding the driver's lock."""
    _libc.madvise(piece.data_ptr(), piece.nbytes, _HUGEPAGE)
    _libc.madvise(piece.data_ptr(), piece.nbytes, _POPULATE_WRITE)
