"""Files of torch.save as data: dicts, numbers, texts and tensors; every other object stays a husk.

Training checkpoints hold their arguments, random states and optimisers beside the weights, as Python objects.
Nothing of them is imported or called here: the unpickler below makes Husk of each name that it does not know.
A tensor is a place in the file until it is read; the file may lie within another one (an archive).
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable

import torch
from torch import Tensor

from tridecode.backend.errors import CheckpointError
from tridecode.converters.sources.tensor_files import check_records, foreign_format

_MAX_PICKLE_BYTES = 512 << 20
_MAX_NODES, _MAX_DEPTH = 1_000_000, 32
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # of torch before 1.6
_STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


@dataclass(frozen=True)
class Region:
    """A part of a file: a member of an uncompressed archive, or all of it."""

    path: Path
    start: int
    size: int
    name: str  # for messages

    @classmethod
    def of_file(cls, path: Path) -> Region:
        return cls(path, 0, path.stat().st_size, str(path))


class Husk:
    """An object whose class is not known here. It takes whatever the pickle gives it, and keeps nothing."""

    def __init__(self, *arguments: object, **named: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass

    def __call__(self, *arguments: object) -> Husk:
        return self


class Arguments:
    """An argparse.Namespace: its plain values, by name."""

    values: Mapping[str, Any] = MappingProxyType({})  # until it has a state; __init__ is not called

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.values = dict(state)


class _Fixed:
    """What a pickle gets from us; it may not write into it."""

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes a {type(self).__name__}")


@dataclass
class _Storage(_Fixed):
    dtype: torch.dtype
    elements: int
    region: Region
    start: int = -1  # of the first byte in region.path; known once the storages are listed

    def place(self, start: int, size: int) -> None:
        if size < self.elements * self.dtype.itemsize:
            raise ValueError(f"a storage of {self.elements:,} {self.dtype} has {size:,} bytes")
        self.start = start


@dataclass(frozen=True)
class StoredTensor(_Fixed):
    """A tensor that is still in its file."""

    storage: _Storage = field(repr=False)
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """The tensor: a view of the mapped file, or a copy where its bytes are not aligned."""
        path, start = str(self.storage.region.path), self.storage.start
        size = self.storage.elements * self.storage.dtype.itemsize
        if size == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        if start % self.dtype.itemsize == 0:
            mapped = torch.from_file(path, shared=False, size=start + size, dtype=torch.uint8)
            data = mapped[start : start + size]
        else:
            with open(path, "rb") as file:
                file.seek(start)
                data = torch.frombuffer(bytearray(file.read(size)), dtype=torch.uint8)
        typed = data.view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Call(_Fixed):
    """A function that a pickle may call."""

    function: Callable[..., object]

    def __call__(self, *arguments: object) -> object:
        return self.function(*arguments)


def _rebuild(storage: object, offset: object, shape: object, stride: object, *rest: object) -> StoredTensor:
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), None)
    numbers = [offset, *shape, *stride] if isinstance(shape, tuple) and isinstance(stride, tuple) else [-1]
    if not isinstance(storage, _Storage) or len(numbers) % 2 == 0 or len(shape) != len(stride):  # type: ignore[arg-type]
        raise ValueError("a tensor has no storage or no shape")
    if not all(isinstance(number, int) and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("a tensor has an impossible shape")
    assert isinstance(shape, tuple) and isinstance(stride, tuple) and isinstance(offset, int)
    dtype = dtype or storage.dtype
    held = storage.elements * storage.dtype.itemsize // dtype.itemsize
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride))
    if math.prod(shape) > held or (math.prod(shape) and last >= held):
        raise ValueError(f"a tensor of shape {shape} lies outside its storage of {held:,} elements")
    return StoredTensor(storage, dtype, shape, stride, offset)


#: what a pickle may name, beside dtypes and storages
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): _Call(lambda sizes=(): tuple(sizes)),
    ("torch._utils", "_rebuild_tensor"): _Call(_rebuild),
    ("torch._utils", "_rebuild_tensor_v2"): _Call(_rebuild),
    ("torch._utils", "_rebuild_tensor_v3"): _Call(_rebuild),
    ("torch._utils", "_rebuild_parameter"): _Call(lambda tensor, *rest: tensor),
    ("torch._utils", "_rebuild_parameter_with_state"): _Call(lambda tensor, *rest: tensor),
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, region: Region):
        super().__init__(file, encoding="utf-8", errors="replace")
        self.region = region
        self.storages: dict[str, list[_Storage]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("argparse", "Namespace"):
            return Arguments
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.split(".")[0] == "torch" and name in _STORAGES:
            return _STORAGES[name]
        return Husk

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, elements, *view = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise ValueError(f"it names a storage as {str(pid)[:80]}")
        if any(part is not None for part in view):
            raise ValueError("a storage is a view of another one")
        if not isinstance(elements, int) or not 0 <= elements < 1 << 48:
            raise ValueError(f"a storage has {elements} elements")
        storage = _Storage(dtype, elements, self.region)
        self.storages.setdefault(str(key), []).append(storage)
        return storage


class _RegionFile(io.RawIOBase):
    """A region as a seekable file."""

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
    """The object of a torch.save file, with StoredTensor for its tensors.

    Raises CheckpointError for what is damaged, compressed or no such file.
    """
    is_zip = False
    try:
        raw: Any = _RegionFile(region)
        with io.BufferedReader(raw) as file:
            is_zip = zipfile.is_zipfile(file)
            if is_zip:
                return _load_zip(region, file)
            file.seek(0)
            return _load_legacy(region, file)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle makes the unpickler raise nearly anything
        foreign = "" if is_zip or region.start else foreign_format(region.path)
        found = foreign or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise CheckpointError(f"{region.name} is not a readable file of torch.save: {found}") from None


def _load_zip(region: Region, file: io.BufferedReader) -> Any:
    with zipfile.ZipFile(file) as archive:
        records = {record.filename: record for record in archive.infolist()}
        check_records(list(records.values()), region.size, region.name)
        [pickled] = [name for name in records if name.rpartition("/")[2] == "data.pkl"]
        prefix = pickled[: -len("data.pkl")]
        if f"{prefix}byteorder" in records and archive.read(f"{prefix}byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        if records[pickled].file_size > _MAX_PICKLE_BYTES:
            raise ValueError(f"its pickle has {records[pickled].file_size:,} bytes")
        unpickler = _Unpickler(io.BytesIO(archive.read(pickled)), region)
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


def _load_legacy(region: Region, file: io.BufferedReader) -> Any:
    """torch before 1.6: pickles of a magic number, a version, the system, the object and the storages' names,
    then the storages, each after its number of elements."""
    if _Unpickler(file, region).load() != _LEGACY_MAGIC:
        raise ValueError("its magic number is not torch's")
    _, system = _Unpickler(file, region).load(), _Unpickler(file, region).load()
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise ValueError("its numbers are big-endian")
    unpickler = _Unpickler(file, region)
    tree = unpickler.load()
    for key in _Unpickler(file, region).load():
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
    """The tensors of nested dicts, by their keys joined with dots. CheckpointError for endless nesting."""
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
