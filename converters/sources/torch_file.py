"""Reads files of torch.save, old and new, without importing or calling anything in them (torch_pickle.py).

The file may be a part of another one (an archive).
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.sources.containers import check_records, foreign_format, open_zip
from tridecode.converters.sources.pickle_limits import MAX_PICKLE_BYTES, is_plain
from tridecode.converters.sources.torch_pickle import Region, StoredTensor, Unpickler

_MAX_NODES, _MAX_DEPTH = 1_000_000, 32
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # files of torch before 1.6


class _RegionFile(io.RawIOBase):
    """Presents a region as a seekable file."""

    def __init__(self, region: Region):
        self._file, self._region, self._at = open(region.path, "rb"), region, 0  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._region.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), max(0, self._region.size - self._at))
        self._file.seek(self._region.start + self._at)
        data = self._file.read(size)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def load(region: Region) -> Any:
    """Return the object of a torch.save file, with StoredTensor for its tensors.

    Raises CheckpointError if the file is damaged, compressed or of another format.
    """
    try:
        return _read(region)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle makes the unpickler raise nearly anything
        foreign = "" if region.start else foreign_format(region.path)
        foreign = "" if "torch.save" in foreign else foreign
        found = foreign or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise CheckpointError(f"{region.name} is not a readable file of torch.save: {found}") from None


def check_pickle(path: Path) -> None:
    """Check a file of torch.save before torch reads it, because torch's unpickler has no limits.

    Raises UnpicklingError if its pickles are larger than those of a checkpoint or contain more than tensors,
    and nearly any other error for a damaged file.
    """
    _read(Region.of_file(path), only_tensors=True)


def _read(region: Region, only_tensors: bool = False) -> Any:
    raw: Any = _RegionFile(region)
    with io.BufferedReader(raw) as file:
        if zipfile.is_zipfile(file):
            return _load_zip(region, file, only_tensors)
        file.seek(0)
        return _load_legacy(region, file, only_tensors)


def _load_zip(region: Region, file: io.BufferedReader, only_tensors: bool) -> Any:
    with open_zip(file) as archive:
        records = {record.filename: record for record in archive.infolist()}
        check_records(list(records.values()), region.size, region.name)
        [pickled] = [name for name in records if name.rpartition("/")[2] == "data.pkl"]
        prefix = pickled[: -len("data.pkl")]
        if f"{prefix}byteorder" in records and archive.read(f"{prefix}byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        if records[pickled].file_size > MAX_PICKLE_BYTES:
            raise ValueError(f"its pickle has {records[pickled].file_size:,} bytes")
        unpickler = Unpickler(io.BytesIO(archive.read(pickled)), region, only_tensors)
    tree = unpickler.load()
    for key, storages in unpickler.storages.items():
        record = records[f"{prefix}data/{key}"]
        file.seek(record.header_offset)
        header = file.read(30)
        skipped = 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = record.header_offset + skipped
        if header[:4] != b"PK\x03\x04" or start + record.file_size > region.size:
            raise ValueError(f"{record.filename} lies outside the file")
        for storage in storages:
            storage.place(region.start + start, record.file_size)
    return tree


def _load_legacy(region: Region, file: io.BufferedReader, only_tensors: bool) -> Any:
    """Read the format of torch before 1.6: pickles of a magic number, a version, the system, the object and
    the names of the storages; then each storage, preceded by its number of elements.
    """
    magic = Unpickler(file, region, only_tensors).load()
    if not isinstance(magic, int) or magic != _LEGACY_MAGIC:
        raise ValueError("its magic number is not torch's")
    _, system = Unpickler(file, region, only_tensors).load(), Unpickler(file, region, only_tensors).load()
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise ValueError("its numbers are big-endian")
    unpickler = Unpickler(file, region, only_tensors)
    tree = unpickler.load()
    keys = Unpickler(file, region, only_tensors).load()
    if not isinstance(keys, list) or not all(map(is_plain, keys)):
        raise ValueError("its storages have no names")
    for key in keys:
        elements = int.from_bytes(file.read(8), "little")
        storages = unpickler.storages[key]
        start, size = file.tell(), elements * storages[0].dtype.itemsize
        if start + size > region.size:
            raise ValueError(f"it ends within a storage of {size:,} bytes")
        for storage in storages:
            storage.place(region.start + start, size)
        file.seek(size, io.SEEK_CUR)
    if any(storage.start < 0 for storages in unpickler.storages.values() for storage in storages):
        raise ValueError("a storage is missing")
    return tree


def tensors_of(tree: Any, where: str) -> dict[str, StoredTensor]:
    """Return the tensors of nested dicts, by their keys joined with dots.

    Raises CheckpointError if they are nested too deeply.
    """
    found: dict[str, StoredTensor] = {}
    stack, nodes = [("", tree, 0)], 0
    while stack:
        name, node, depth = stack.pop()
        nodes += 1
        if nodes > _MAX_NODES or depth > _MAX_DEPTH:
            raise CheckpointError(f"{where} is nested too deeply or has too many entries")
        if isinstance(node, StoredTensor):
            found[name] = node
        elif isinstance(node, dict):
            entries = [(key, value) for key, value in node.items() if isinstance(key, str)]
            stack += [
                (f"{name}.{key}" if name else key, value, depth + 1) for key, value in reversed(entries)
            ]
    return found
