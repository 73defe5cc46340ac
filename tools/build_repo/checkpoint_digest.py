"""Names a checkpoint by the bytes of its files. A file is read again when its size or time has changed."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tridecode.backend.base.file_digest import file_sha256

_MAX_FILES = 10_000
_MAX_RECORDS = 4_000
#: code that decides what a repository contains; a change of it makes another repository
_SOURCES = (
    "converters",
    "model_repo_templates",
    "backend/configuration",
    "backend/weights",
    "tools/build_repo",
)


def checkpoint_digest(checkpoint: Path, records: Path) -> str:
    """Return the SHA-256 of a checkpoint, in hex: of its files' relative names and contents.

    checkpoint: a file or a folder. records: a JSON file with the digests of files read before; it is
    replaced. Raises OSError for files that cannot be read.
    """
    files = _files(checkpoint)
    known = _read_records(records)
    digests = {path: known.get(_identity(path), "") for path in files}
    unread = [path for path, digest in digests.items() if not digest]
    with ThreadPoolExecutor(4) as pool:  # hashlib releases the GIL
        digests.update(zip(unread, pool.map(file_sha256, unread)))
    if unread:
        known.update((_identity(path), digest) for path, digest in digests.items())
        _write_records(records, known)
    whole = hashlib.sha256()
    for path in files:
        name = path.name if path == checkpoint else path.relative_to(checkpoint).as_posix()
        whole.update(f"{name}\0{digests[path]}\n".encode())
    return whole.hexdigest()


def converter_digest() -> str:
    """Return the SHA-256 of the code that writes repositories, in hex."""
    whole, top = hashlib.sha256(), Path(__file__).parents[2]
    for place in _SOURCES:
        for path in sorted(top.joinpath(place).rglob("*")):
            if path.suffix in (".py", ".jinja"):
                whole.update(path.read_bytes())
    return whole.hexdigest()


def _files(checkpoint: Path) -> list[Path]:
    if not checkpoint.is_dir():
        return [checkpoint]
    found = []
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(checkpoint).parts):
            found.append(path)
        if len(found) > _MAX_FILES:
            raise OSError(
                0, f"more than {_MAX_FILES:,} files; wanted the folder of one checkpoint", str(checkpoint)
            )
    return found


def _identity(path: Path) -> str:
    """Return the file's real path, size, time and inode: while they are equal, so is its content."""
    real = os.path.realpath(path)
    status = os.stat(real)
    return f"{real} {status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _read_records(file: Path) -> dict[str, str]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: digest for name, digest in found.items() if isinstance(digest, str) and len(digest) == 64}


def _write_records(file: Path, known: dict[str, str]) -> None:
    newest = dict(list(known.items())[-_MAX_RECORDS:])
    written = file.with_name(f".{file.name}.{os.getpid()}")
    written.write_text(json.dumps(newest), encoding="utf-8")
    written.replace(file)
