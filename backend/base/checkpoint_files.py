"""Opens files of an untrusted checkpoint: checks sizes before parsing, and that names stay inside the
folder.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import CheckpointError

MAX_JSON_BYTES = 64 << 20  # the largest tokenizer.json has 33 MB
#: of settings: parsing as much JSON takes up to 1.5 s and 500 MB; the largest index of a checkpoint has 1 MB
MAX_SETTINGS_BYTES = 16 << 20


def require_file(path: Path, limit_bytes: int | None = None) -> Path:
    """Return the path of a regular file; links are followed, since snapshots in the hub's cache are links to
    blobs.

    Raises CheckpointError if it is missing, is a device, pipe or folder, or is longer than `limit_bytes`.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    if limit_bytes is not None and status.st_size > limit_bytes:
        raise CheckpointError(f"{path} holds {status.st_size:,} bytes; wanted at most {limit_bytes:,}")
    return path


def read_json(path: Path, limit_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError that names the file for any other content."""
    require_file(path, limit_bytes)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is not valid JSON: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; wanted an object")
    return value


def member(directory: Path, name: object, listed_in: str) -> Path:
    """Return the path of the file `name`, as listed in the checkpoint's index.

    Raises CheckpointError for anything but a plain file name: a path could lead out of the checkpoint.
    """
    if not isinstance(name, str) or not name or name in (".", "..") or set(name) & {"/", "\\", "\0"}:
        raise CheckpointError(
            f"{directory / listed_in} lists {str(name)[:200]!r}; wanted the name of a file in {directory}"
        )
    if not (directory / name).exists():
        raise CheckpointError(f"{directory / name} is missing; {listed_in} lists it")
    return require_file(directory / name)
