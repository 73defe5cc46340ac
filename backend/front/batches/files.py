"""Files of the store: uploaded, listed, read and deleted. Everything here blocks for the disk."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Sequence
from typing import BinaryIO, TypeVar

import msgspec

from tridecode.backend.front.batches.batch_records import is_input_of_open_batch
from tridecode.backend.front.batches.objects import FileObject, is_file_id, new_file_id
from tridecode.backend.front.batches.store import Store, encoded, read_as, sync_folder, write_whole
from tridecode.backend.front.errors import ApiError, bad_request, shown

#: bytes by which an upload of unknown length reserves more
_STEP_BYTES = 16 << 20
_MAX_NAME = 255
_UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class _Listed(msgspec.Struct):
    id: str


_Object = TypeVar("_Object")


class Upload:
    """A file that is being uploaded. It counts with the bytes that it has reserved until it ends."""

    def __init__(self, store: Store, expected: int):
        """expected: bytes, 0: unknown. Raises ApiError where the store has no room for it."""
        self._store, self.id = store, new_file_id()
        self._size = self._reserved = 0
        self._path = store.part(self.id)
        with store.locked():
            store.check_room(expected, 1)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                self._grow(expected)
            except BaseException:
                self.abandon()
                raise

    def write(self, data: bytes) -> None:
        """Append. Raises ApiError for a file that is too large or for which the store has no room."""
        size = self._size + len(data)
        if size > self._store.max_file_bytes:
            limit = f"{self._store.max_file_bytes:,}"
            raise ApiError(413, f"the file has more than {limit} bytes", param="file", code="file_too_large")
        if size > self._reserved:
            with self._store.locked():
                self._store.check_room(size - self._reserved)
                self._grow(min(size + _STEP_BYTES, self._store.max_file_bytes))
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, self._size)
            self._size += written
            view = view[written:]

    def finish(self, filename: str, purpose: str) -> FileObject:
        """Make it a file of the store."""
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)
        found = FileObject(
            id=self.id,
            bytes=self._size,
            created_at=int(time.time()),
            filename=shown_name(filename),
            purpose=purpose,
        )
        with self._store.locked():  # a reader of the folder sees a file whole
            os.replace(self._path, self._store.data(self.id))
            try:
                write_whole(self._store.card(self.id), encoded(found))
            except BaseException:
                self._store.data(self.id).unlink()
                raise
        os.close(self._fd)
        return found

    def abandon(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def _grow(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        self._reserved = size


def shown_name(text: str) -> str:
    """Return the last part of a client's path, without control characters. It is only ever shown."""
    name = re.split(r"[/\\]", text)[-1]
    return _UNSHOWN.sub("", name)[:_MAX_NAME] or "file.jsonl"


def publish(store: Store, file_id: str, filename: str, purpose: str) -> str | None:
    """Show results of a batch as a file; return its id. None: there are none. May be repeated."""
    try:
        size = store.data(file_id).stat().st_size
    except FileNotFoundError:
        return None
    known = read_as(store.card(file_id), FileObject)
    if known is None or known.bytes != size:
        found = FileObject(
            id=file_id, bytes=size, created_at=int(time.time()), filename=filename, purpose=purpose
        )
        write_whole(store.card(file_id), encoded(found))
    return file_id


def find_file(store: Store, file_id: str) -> FileObject:
    """Raises ApiError 404."""
    found = read_as(store.card(file_id), FileObject) if is_file_id(file_id) else None
    if found is None:
        raise ApiError(404, f"the file {shown(file_id)} does not exist", param="file_id", code="not_found")
    return found


def open_file(store: Store, file_id: str) -> tuple[FileObject, BinaryIO]:
    """Return the file and its content, which may be read although it is deleted meanwhile. ApiError 404."""
    found = find_file(store, file_id)
    try:
        return found, store.data(file_id).open("rb")
    except FileNotFoundError:
        raise ApiError(
            404, f"the file {shown(file_id)} was deleted", param="file_id", code="not_found"
        ) from None


def delete_file(store: Store, file_id: str) -> None:
    """Raises ApiError 404, and 409 for the input of a batch that is not finished."""
    with store.locked():
        find_file(store, file_id)
        if is_input_of_open_batch(store, file_id):
            text = f"the file {shown(file_id)} is the input of a batch that is not finished; cancel it first"
            raise ApiError(409, text, param="file_id", code="file_in_use")
        store.card(file_id).unlink(missing_ok=True)
        store.data(file_id).unlink(missing_ok=True)
        sync_folder(store.files)


def all_files(store: Store, purpose: str | None) -> list[FileObject]:
    """Return the files, the oldest first. purpose: only those with it."""
    found = [read_as(path, FileObject) for path in store.files.glob("file-*.json")]
    known = [file for file in found if file is not None and purpose in (None, file.purpose)]
    return sorted(known, key=lambda file: (file.created_at, file.id))


def page_of(found: Sequence[_Object], after: str | None, limit: int) -> tuple[list[_Object], bool]:
    """Return `limit` objects that follow the one whose id is `after`, and whether more follow."""
    begin = 0
    if after is not None:
        ids = [one.id for one in found]  # type: ignore[attr-defined]
        if after not in ids:
            raise bad_request(f"after is {shown(after)}; wanted an id of this list", "after")
        begin = ids.index(after) + 1
    return list(found[begin : begin + limit]), len(found) > begin + limit
