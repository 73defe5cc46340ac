"""The unpickler of torch.save files: dicts, numbers, texts and tensors; every other object becomes a Husk.

Training checkpoints store arguments, random states and optimisers along with the weights, as Python objects.
None of them is imported or called: the unpickler creates a Husk for each unknown name. A tensor is a place in
the file until it is read.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tridecode.converters.sources.pickle_limits import (
    BoundedUnpickler,
    PickleLimitError,
    is_plain,
    ordered_dict_items,
)

_MAX_DIMENSIONS = 16
_MAX_NAME = 512  # characters of a name in a pickle, and of a storage's
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
    """An object of an unknown class. It accepts whatever the pickle passes to it, and stores nothing."""

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
    """An argparse.Namespace: its plain values, by name; others are dropped."""

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
        """Return the tensor: a view of the mapped file, or a copy if its bytes are not aligned."""
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


#: names that a pickle may use, besides dtypes and storages
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


class Unpickler(BoundedUnpickler):
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
