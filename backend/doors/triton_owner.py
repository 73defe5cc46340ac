"""The tritonserver that started this stub."""

from __future__ import annotations

import os

from tridecode.backend.service.owner import Owner


class TritonOwner(Owner):
    """The parent process. A stub would outlive a killed tritonserver if it did not watch it."""

    @classmethod
    def of_this_stub(cls) -> TritonOwner:
        return cls(os.getppid(), shared_memory_region())

    def is_gone(self) -> bool:
        return os.getppid() != self.pid


def shared_memory_region() -> str:
    """Return the shared memory region on this stub's command line; "" for any other process."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    return next((word for word in words if word.startswith("triton_python_backend_shm_region")), "")
