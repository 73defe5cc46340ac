"""The digest of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path


def file_sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal. progress: called with the bytes of each piece."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return digest.hexdigest()
