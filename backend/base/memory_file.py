"""Memory files that several processes map: those of the host tier. No torch."""

from __future__ import annotations

import os
import secrets

SECRET_BYTES = 32


def create_file(size: int, name: str = "tridecode-host-cache") -> int:
    """Return the descriptor of a new memory file of `size` bytes, which begins with a random secret.

    Raises OSError.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        os.pwrite(fd, secrets.token_bytes(SECRET_BYTES), 0)
    except OSError:
        os.close(fd)
        raise
    return fd
