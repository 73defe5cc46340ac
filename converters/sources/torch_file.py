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

from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.sources.containers import check_records, foreign_format, open_zip
from tridecode.converters.sources.pickle_limits import (
    MAX_PICKLE_BYTES,
    BoundedUnpickler,
    PickleLimitError,
    is_plain,
    ordered_dict_items,
)

_MAX_NODES, _MAX_DEPTH = 1_000_000, 32
_MAX_DIMENSIONS = 16
_MAX_NAME = 512  # characters of a name in a pickle, and of a storage's
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
    """An argparse.Namespace: its plain values, by name; others are left out."""

    values: Mapping[str, Any] = MappingProxyType({})  # until it has a state; __init__ is not called

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.values = {
                key: value for key, value in state.items() if isinstance(key, str) and is_plain(value)
            }


class _Fixed:
    """Base of the objects that a pickle receives from us; it may not change them."""

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
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise ValueError("a tensor has no storage or no shape")
    numbers = [offset, *shape[:_MAX_DIMENSIONS], *stride[:_MAX_DIMENSIONS]]
    fits = len(shape) == len(stride) <= _MAX_DIMENSIONS
    if not fits or not all(isinstance(number, int) and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("a tensor has an impossible shape")
    assert isinstance(offset, int)
    dtype = dtype or storage.dtype
    held = storage.elements * storage.dtype.itemsize // dtype.itemsize
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride))
    if math.prod(shape) > held or (math.prod(shape) and last >= held):
        raise ValueError(f"a tensor of shape {shape} lies outside its storage of {held:,} elements")
    return StoredTensor(storage, dtype, shape, stride, offset)


#: what a pickle may name, beside dtypes and storages
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Call(lambda pairs=(): OrderedDict(ordered_dict_items(pairs))),
    ("torch", "Size"): _Call(lambda sizes=(): tuple(sizes)),
    ("torch._utils", "_rebuild_tensor"): _Call(_rebuild),
    ("torch._utils", "_rebuild_tensor_v2"): _Call(_rebuild),
    ("torch._utils", "_rebuild_tensor_v3"): _Call(_rebuild),
    ("torch._utils", "_rebuild_parameter"): _Call(lambda tensor, *rest: tensor),
    ("torch._utils", "_rebuild_parameter_with_state"): _Call(lambda tensor, *rest: tensor),
}


#: looked up here and not in torch, which would import its parts by name
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Unpickler(BoundedUnpickler):
    def __init__(self, file: Any, region: Region, only_tensors: bool):
        super().__init__(file)
        self.region, self._only_tensors = region, only_tensors
        self.storages: dict[str, list[_Storage]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if len(module) + len(name) > _MAX_NAME:
            raise ValueError("it names an object in too many characters")
        if (module, name) == ("argparse", "Namespace") and not self._only_tensors:
            return Arguments
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module.split(".")[0] == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if self._only_tensors:
            raise PickleLimitError(
                f"it holds the Python object {module}.{name}, and code is never run; wanted tensors only"
            )
        return Husk

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, elements, *view = pid
        named = isinstance(key, (str, int)) and len(str(key)) <= _MAX_NAME
        if not isinstance(kind, str) or kind != "storage" or not isinstance(dtype, torch.dtype) or not named:
            raise ValueError("it names a storage in a way that torch.save does not")
        if any(part is not None for part in view):
            raise ValueError("a storage is a view of another one")
        if not isinstance(elements, int) or not 0 <= elements < 1 << 48:
            raise ValueError("a storage has no number of elements, or too many")
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
    """Raise what is wrong with a file of torch.save: UnpicklingError if its pickles cost more than a
    checkpoint's or hold more than tensors, and nearly any other error for a damaged file.

    torch's own unpickler has no limits, so this comes before it.
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
        unpickler = _Unpickler(io.BytesIO(archive.read(pickled)), region, only_tensors)
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
    """torch before 1.6: pickles of a magic number, a version, the system, the object and the storages' names,
    then the storages, each after its number of elements."""
    magic = _Unpickler(file, region, only_tensors).load()
    if not isinstance(magic, int) or magic != _LEGACY_MAGIC:
        raise ValueError("its magic number is not torch's")
    _, system = _Unpickler(file, region, only_tensors).load(), _Unpickler(file, region, only_tensors).load()
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise ValueError("its numbers are big-endian")
    unpickler = _Unpickler(file, region, only_tensors)
    tree = unpickler.load()
    keys = _Unpickler(file, region, only_tensors).load()
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
