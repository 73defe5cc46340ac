"""The journal of a conversion: records the finished files of a weight directory, so that it can continue
later.

`conversion.journal` has a JSON line that identifies the conversion, then one for each finished tensor. It
exists from the first byte until manifest.json is written; a directory with it is refused by the engine.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from tridecode.backend.weights.manifest import JOURNAL_FILE, MANIFEST_FILE, ManifestTensor, read_manifest

_FORMAT = "tridecode-conversion-1"
PART = ".part"  # suffix of a file that is being written


class Header(msgspec.Struct, frozen=True):
    """Identity of a conversion: finished files are reused only for the same config.ini, ranks and source."""

    config_ini: str
    tensor_para_size: int
    source: str
    format: str = _FORMAT


class Journal:
    """finished: the tensors that a conversion of the same header has already written, by name; their files
    are not checked. Leftovers of another, interrupted conversion are removed. Raises FileExistsError for any
    other directory.
    """

    def __init__(self, directory: Path, header: Header):
        self._directory, self._path, self._lock = directory, directory / JOURNAL_FILE, threading.Lock()
        self.finished: dict[str, ManifestTensor] = {}
        if self._path.is_file():
            found, self.finished = self._read()
            if found != header:
                self._discard()
        elif not self._reopen(header):
            directory.mkdir(parents=True)
        if not self._path.exists():
            self._append(header)
            (directory / "config.ini").write_text(header.config_ini, encoding="utf-8")
        _sync_directory(directory)

    def _read(self) -> tuple[Header | None, dict[str, ManifestTensor]]:
        """Return its entries; an incomplete last line is dropped."""
        header, finished, length = None, {}, 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                if header is None:
                    header = msgspec.json.decode(line, type=Header)
                else:
                    tensor = msgspec.json.decode(line, type=ManifestTensor)
                    finished[tensor.name] = tensor
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
            length += len(line)
        os.truncate(self._path, length)
        return header, finished

    def _reopen(self, header: Header) -> bool:
        """Continue from a complete conversion of the same header, if the directory holds one."""
        manifest = read_manifest(self._directory) if header.source and self._directory.is_dir() else None
        if manifest is None or manifest.source != header.source:
            return False
        if (self._directory / "config.ini").read_text(encoding="utf-8") != header.config_ini:
            return False
        self.finished = {tensor.name: tensor for tensor in manifest.tensors}
        for entry in (header, *manifest.tensors):
            self._append(entry)
        return True

    def _discard(self) -> None:
        names = [file.name for tensor in self.finished.values() for file in tensor.files]
        for name in (*names, "config.ini", MANIFEST_FILE):
            (self._directory / os.path.basename(name)).unlink(missing_ok=True)
        for path in self._directory.glob(f"*{PART}"):
            path.unlink()
        self._path.unlink()
        self.finished = {}

    def add(self, tensor: ManifestTensor) -> None:
        """Note a finished tensor. Safe from several threads."""
        self._append(tensor)

    def _append(self, entry: msgspec.Struct) -> None:
        with self._lock, open(self._path, "ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    def close(self, manifest: bytes) -> None:
        """Write manifest.json, the last file of the directory, and remove the journal."""
        write_file(self._directory / MANIFEST_FILE, manifest)
        _sync_directory(self._directory)
        self._path.unlink()


def write_file(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, to the disk, and rename it."""
    part = path.with_name(path.name + PART)
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
