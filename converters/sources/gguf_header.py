"""Limits on the header of a .gguf file, checked before the gguf library reads it.

The library creates Python objects for each key, array item and tensor, as many as the file claims, and checks
no count against the file's length. Layout: ggml/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

from tridecode.backend.base.errors import CheckpointError

#: of arrays, all together: a vocabulary of 262,144 tokens with scores, types and 514,906 merges has 1,301,338
MAX_ITEMS = 1_500_000
MAX_KEYS = 4096
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 1024
MAX_TEXT_BYTES = 16 << 20  # of one string; a chat template has 4 kB
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def check_gguf_header(path: Path) -> None:
    """CheckpointError where the header claims more than these limits or than the file holds.

    A file of another format or version passes: the library names it.
    """
    with open(path, "rb") as file:
        size = path.stat().st_size
        start = file.read(8)
        if start[:4] != b"GGUF" or len(start) < 8:
            return
        little = struct.unpack("<I", start[4:])[0] & 0xFFFF != 0
        _Header(path, file, size, "<" if little else ">").check()


class _Header:
    def __init__(self, path: Path, file: io.BufferedReader, size: int, order: str):
        self._path, self._file, self._size, self._order = path, file, size, order
        self._items = 0

    def check(self) -> None:
        tensors, keys = self._number("Q"), self._number("Q")
        self._limit("keys", keys, MAX_KEYS)
        self._limit("tensors", tensors, MAX_TENSORS)
        for _ in range(keys):
            name = self._text(MAX_NAME_BYTES, "a key's name").decode("utf-8", "replace")
            self._value(name, self._number("I"))
        for _ in range(tensors):
            name = self._text(MAX_NAME_BYTES, "a tensor's name").decode("utf-8", "replace")
            dimensions = self._number("I")
            self._limit(f"dimensions of {name}", dimensions, _MAX_DIMENSIONS)
            self._skip(8 * dimensions + 4 + 8, name)

    def _value(self, name: str, kind: int) -> None:
        if kind == _STRING:
            self._text(MAX_TEXT_BYTES, name)
        elif kind == _ARRAY:
            self._array(name)
        else:
            self._skip(self._scalar_bytes(name, kind), name)

    def _array(self, name: str) -> None:
        kind, count = self._number("I"), self._number("Q")
        self._items += min(count, MAX_ITEMS + 1)
        if self._items > MAX_ITEMS:
            raise self._fault(f"its arrays up to {name} have {count:,} items or more; wanted {MAX_ITEMS:,}")
        if kind == _ARRAY:
            raise self._fault(f"{name} is an array of arrays; wanted numbers or texts")
        if kind != _STRING:
            self._skip(count * self._scalar_bytes(name, kind), name)
            return
        for _ in range(count):
            self._text(MAX_TEXT_BYTES, name)

    def _scalar_bytes(self, name: str, kind: int) -> int:
        found = _SCALAR_BYTES.get(kind)
        if found is None:
            raise self._fault(f"{name} has the type {kind}; wanted 0 to 12")
        return found

    def _number(self, form: str) -> int:
        form = self._order + form
        return struct.unpack(form, self._read(struct.calcsize(form)))[0]

    def _text(self, limit: int, name: str) -> bytes:
        """Return a short text, or the beginning of a longer one; the file position is then after it."""
        length = self._number("Q")
        self._limit(f"bytes of {name}", length, limit)
        found = self._read(min(length, MAX_NAME_BYTES))
        if length > MAX_NAME_BYTES:
            self._skip(length - MAX_NAME_BYTES, name)
        return found

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise self._fault(f"it is cut short at {self._size:,} bytes, within its header")
        return data

    def _skip(self, size: int, name: str) -> None:
        if size > self._size - self._file.tell():
            raise self._fault(f"it is cut short at {self._size:,} bytes: {name} needs {size:,} more")
        self._file.seek(size, io.SEEK_CUR)

    def _limit(self, what: str, found: int, limit: int) -> None:
        if found > limit:
            raise self._fault(f"it claims {found:,} {what}; wanted at most {limit:,}")

    def _fault(self, found: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is not a readable GGUF file: {found}")
