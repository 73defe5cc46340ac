"""The folder of files and batches: its layout, its limits, and writes that are whole or absent.

    files/ID.json, ID.data       a file: what is known about it, and its content
    files/ID.data                without the other: results of a batch that is not finished
    files/ID.part                an upload; the process that receives it holds a lock on it
    batches/ID/batch.json        as it was requested; never changes
    batches/ID/cancel            its cancellation was requested; holds the time
    batches/ID/state.json        written by the process that answers the batches, and by nobody else
    lock                         held while something is added, removed or measured

Workers and the process of the batches share nothing but this folder. Everything here blocks for the disk.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.front.errors import ApiError
from tridecode.backend.front.settings import MAX_STORE_BYTES, MAX_STORE_FILES, FrontSettings

#: of one uploaded file: OpenAI's limit for batches
MAX_FILE_BYTES = 200 << 20
_T = TypeVar("_T")


@dataclass(frozen=True)
class Usage:
    """bytes: of all files, uploads at the length that they have reserved. files: uploads, and results of
    batches that have ended."""

    bytes: int
    files: int


class Store:
    """One folder, which several processes may open. Raises OSError where the disk does."""

    def __init__(self, folder: Path, max_bytes: int = MAX_STORE_BYTES, max_files: int = MAX_STORE_FILES):
        self.folder, self.max_bytes, self.max_files = folder, max_bytes, max_files
        self.files, self.batches = folder / "files", folder / "batches"

    @classmethod
    def of(cls, settings: FrontSettings) -> Store | None:
        """Return the store that the settings name; None: none."""
        if not settings.batch_dir:
            return None
        return cls(Path(settings.batch_dir), settings.batch_dir_bytes, settings.batch_max_files)

    @property
    def max_file_bytes(self) -> int:
        return min(MAX_FILE_BYTES, self.max_bytes)

    def create(self) -> None:
        """Create the folders. Raises ConfigError where that fails or a file cannot be written."""
        try:
            for path in (self.folder, self.files, self.batches):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.locked():
                write_whole(self.folder / "written", b"")
                (self.folder / "written").unlink()
        except OSError as error:
            raise ConfigError(f"--batch-dir {self.folder} cannot be written: {error.strerror}") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder, against other threads and processes; not for long."""
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def usage(self) -> Usage:
        """Return what the files take. Uploads whose process has died are removed. Hold the lock."""
        size = files = 0
        for entry in os.scandir(self.files):
            try:
                if entry.name.endswith(".part"):
                    if remove_dead(entry.path):
                        continue
                    files += 1
                files += entry.name.endswith(".json")
                size += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:  # removed meanwhile
                pass
        return Usage(size, files)

    def check_room(self, more_bytes: int, more_files: int = 0) -> None:
        """Raise ApiError where the store has no room for these. Hold the lock."""
        usage = self.usage()
        if usage.files + more_files > self.max_files:
            text = f"the store has {usage.files:,} files, which is its limit; delete some"
            raise ApiError(413, text, code="too_many_files")
        if usage.bytes + more_bytes > self.max_bytes:
            text = f"the store has {usage.bytes:,} bytes and its limit is {self.max_bytes:,}; this would add "
            raise ApiError(413, f"{text}{more_bytes:,}; delete some files", code="storage_full")

    def data(self, file_id: str) -> Path:
        return self.files / f"{file_id}.data"

    def card(self, file_id: str) -> Path:
        return self.files / f"{file_id}.json"

    def part(self, file_id: str) -> Path:
        return self.files / f"{file_id}.part"


def remove_dead(part: str) -> bool:
    """Remove an upload that no process holds; return whether it was one."""
    fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        os.unlink(part)
        return True
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes, sync: bool = True) -> None:
    """Replace a file by another one; neither a reader nor a power cut meets a half."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if sync:
            os.fsync(fd)
    except BaseException:
        os.unlink(draft)
        raise
    finally:
        os.close(fd)
    os.replace(draft, path)
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_as(path: Path, kind: type[_T]) -> _T | None:
    """Return the object that a file holds; None if there is none, or one of another shape."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def encoded(value: Any) -> bytes:
    return msgspec.json.encode(value)
