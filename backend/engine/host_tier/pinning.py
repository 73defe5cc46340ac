"""Makes the memory of the host tier ready, in a thread: it is checked, and pinned for a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tridecode.backend.base.host_memory import available_memory
from tridecode.backend.engine.host_tier.region import HostRegion

log = logging.getLogger("tridecode.engine")


class Pinning:
    """The tier of this rank is usable once `is_done`; a text in `fault` says why it never will be."""

    def __init__(self, region: HostRegion, pieces: Sequence[Tensor], device: torch.device):
        self.is_done, self.fault = False, ""
        if device.type == "cuda" and device.index is None:
            device = torch.device(
                "cuda", torch.cuda.current_device()
            )  # a thread has a current device of its own
        self._region, self._pieces, self._device = region, pieces, device
        self._thread = threading.Thread(target=self._run, name="host-tier", daemon=True)

    def start(self, on_done: Callable[[], None] = lambda: None) -> None:
        """Begin. on_done: called in the thread at the end."""
        self._on_done = on_done
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        wanted, free = self._region.size - self._region.resident, available_memory()
        if wanted > free:
            self.fault = f"it needs {wanted:,} bytes of host memory; {free:,} are available"
        elif self._device.type == "cuda":
            self.fault = self._pin()
        if self.fault:
            log.warning("the host tier is off (host_cache_bytes in config.pbtxt): %s", self.fault)
        self.is_done = not self.fault
        self._on_done()

    def _pin(self) -> str:
        """Pin the pieces; return a fault or ""."""
        torch.cuda.set_device(self._device)
        runtime, pinned = torch.cuda.cudart(), 0
        for piece in self._pieces:  # one at a time: the driver's lock is held meanwhile
            code = int(runtime.cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))
            if code:
                wanted = sum(one.nbytes for one in self._pieces)
                return f"the driver pinned {pinned:,} of {wanted:,} bytes (cudaHostRegister returned {code})"
            pinned += piece.nbytes
        return ""
