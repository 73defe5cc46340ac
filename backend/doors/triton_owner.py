"""The tritonserver that started this stub."""

from __future__ import annotations

import os

from tridecode.backend.service.owner import Owner


class TritonOwner(Owner):
    """The parent process. A stub outlives a tritonserver that was killed, unless it notices."""

    @classmethod
    def of_this_stub(cls) -> TritonOwner:
        return cls(os.getppid(), shared_memory_region())

    def is_gone(self) -> bool:
        return os.getppid() != self.pid


def shared_memory_region() -> str:
    """Name of the shared memory region on this stub's command line; "" if this is not a stub of Triton."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    return next((word for word in words if word.startswith("triton_python_backend_shm_region")), "")
