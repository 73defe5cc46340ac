"""Zip files of torch.save, checked before they are read, and the format of a file by its first bytes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import BinaryIO

from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.weights.lora_tensors import MAX_HEADER_BYTES

#: of a zip file's table of contents; 100 bytes an entry, so that it is read in 1 s
_MAX_TABLE_BYTES = 8 << 20


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """The zip file in an open file. Its table of contents is limited before it is read: zipfile makes an
    object of each entry. Raises BadZipFile, ValueError and others for a damaged one.
    """
    reader = _TableReader(file)
    archive = zipfile.ZipFile(reader)
    reader.limit = None
    return archive


class _TableReader:
    """A file that refuses to read more than a table of contents at once."""

    limit: int | None = _MAX_TABLE_BYTES

    def __init__(self, file: BinaryIO):
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if self.limit is None:
            return self._file.read(size)
        data = self._file.read(self.limit + 1 if size < 0 else min(size, self.limit + 1))
        if len(data) > self.limit:
            raise zipfile.BadZipFile(f"its table of contents has more than {self.limit:,} bytes")
        return data

    def close(self) -> None:
        """Leave the file open: its owner closes it."""


def check_safetensors(path: Path) -> None:
    """CheckpointError for a header that is longer than any checkpoint's: each tensor costs an object."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if MAX_HEADER_BYTES < length <= path.stat().st_size - 8:
        raise CheckpointError(
            f"{path} is not a readable safetensors file: its header has {length:,} bytes; wanted at most "
            f"{MAX_HEADER_BYTES:,}"
        )


def check_archive(path: Path) -> None:
    """Raise CheckpointError for a zip that would grow when read: torch stores its records uncompressed."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with open(path, "rb") as file, open_zip(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path} is not a readable zip file: {error}") from None
    check_records(records, path.stat().st_size, str(path))


def check_records(records: list[zipfile.ZipInfo], size: int, name: str) -> None:
    """Raise CheckpointError if a zip file's records are compressed or overlap. size, name: the file's."""
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            found = (
                f"{record.filename} is compressed ({record.compress_size:,} of {record.file_size:,} bytes)"
            )
            raise CheckpointError(f"{name}: {found}; torch.save stores tensors uncompressed")
    total = sum(record.file_size for record in records)
    if total > size:
        raise CheckpointError(f"{name} holds {size:,} bytes; its records have {total:,}: they overlap")


_MAGIC = {
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself (git lfs pull)",
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a zip file, as torch.save writes it",
    b"\x89HDF": "an HDF5 file (TensorFlow, Keras)",
    b"<!DOCTYPE": "an HTML page",
    b"<html": "an HTML page",
}


def foreign_format(path: Path) -> str:
    """Return the format of a file by its first bytes, if its name implies another; else ""."""
    expected = {".gguf": b"GGUF", ".bin": b"PK\x03\x04"}.get(path.suffix)
    with open(path, "rb") as file:
        start = file.read(64)
    if not start:
        return "it is empty"
    return next(
        (f"it is {kind}" for magic, kind in _MAGIC.items() if magic != expected and start.startswith(magic)),
        "",
    )
