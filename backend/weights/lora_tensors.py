"""Converts the tensors of a LoRA adapter from PEFT's layout to that of our matrices.

Names and shapes are checked before a tensor is read, and no code in a file is run.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

from tridecode.backend.base.errors import CheckpointError, RequestError, UnsupportedError
from tridecode.backend.weights.lora import (
    PICKLE_FILE,
    TENSOR_FILE,
    LoraConfig,
    LoraTarget,
    LoraTargets,
    read_lora_config,
)

MAX_HEADER_BYTES = 16 << 20  # bytes of a safetensors header; 70 layers of 7 modules need 150 kB
_MAX_DIMENSIONS = 8  # multiplying many sizes could take long; LoRA's tensors have two
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class LoraPair:
    """The two tensors of one module, by their names in the file: a (rank, in), b (out, rank)."""

    a: str
    b: str
    rank: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Lora:
    """An adapter for whole matrices, in float32. pairs: target -> (a (R, in), b (out, R)).

    A matrix (in, out) becomes weight + (b @ a).T; b includes the scale. R: sum of the ranks of the modules
    that make up the target.
    """

    pairs: dict[str, tuple[Tensor, Tensor]]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for pair in self.pairs.values() for tensor in pair)

    def digest(self) -> bytes:
        """Return the SHA-256 digest of all targets, shapes and values."""
        found = hashlib.sha256()
        for target, pair in sorted(self.pairs.items()):
            for tensor in pair:
                found.update(f"{target} {tuple(tensor.shape)}\n".encode())
                found.update(tensor.contiguous().numpy().data)
        return found.digest()


def pair_tensors(shapes: Mapping[str, tuple[int, ...]], where: Path) -> dict[str, LoraPair]:
    """Return the pairs of an adapter's tensors by module. where: their file.

    Raises UnsupportedError for tensors other than LoRA pairs of linear layers, CheckpointError if A and
    B do not match.
    """
    halves: dict[str, dict[str, str]] = {}
    for name in shapes:
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise UnsupportedError(
                f"{where} has {name[:200]}; this version applies {_PREFIX}<module>.lora_A.weight and "
                "lora_B.weight of linear layers"
            )
        halves.setdefault(found[1], {})[found[2]] = name
    if not halves:
        raise CheckpointError(f"{where} has no tensors")
    return {module: _pair(module, names, shapes, where) for module, names in halves.items()}


def _pair(
    module: str, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], where: Path
) -> LoraPair:
    for half in "AB":
        if half not in names:
            raise CheckpointError(f"{where} has no lora_{half} of {module}")
    a, b = shapes[names["A"]], shapes[names["B"]]
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not min(*a, *b):
        raise CheckpointError(
            f"{where}: {module} has lora_A {a} and lora_B {b}; wanted (rank, in) and (out, rank)"
        )
    return LoraPair(names["A"], names["B"], a[0], a[1], b[0])


def find_modules(
    pairs: Mapping[str, LoraPair], targets: LoraTargets, max_rank: int, where: Path
) -> dict[str, list[tuple[LoraTarget, int]]]:
    """Return the targets of each of the adapter's modules, each with the module's index.

    Raises UnsupportedError for a module that is not a linear layer of the blocks, RequestError above
    max_rank, CheckpointError if sizes differ from the model's.
    """
    known, found = targets.by_module(), {}
    for module, pair in pairs.items():
        places = known.get(module) or known.get(targets.prefix + module)
        if places is None:
            example = next(iter(known), "none")
            raise UnsupportedError(
                f"{where} adapts {module[:200]}; this model takes adapters of the linear layers of its "
                f"blocks, as {example}"
            )
        target, index = places[0]
        if (pair.inputs, pair.outputs) != (target.inputs, target.outputs[index]):
            raise CheckpointError(
                f"{where} is of another model: {module} has {pair.inputs} inputs and {pair.outputs} outputs; "
                f"this model's has {target.inputs} and {target.outputs[index]}"
            )
        if pair.rank > max_rank:
            raise RequestError(
                f"{where}: {module} has rank {pair.rank}; this model accepts {max_rank} "
                "(max_lora_rank in config.pbtxt)"
            )
        found[module] = places
    return found


def assemble(
    pairs: Mapping[str, LoraPair],
    read: Callable[[str], Tensor],
    config: LoraConfig,
    targets: LoraTargets,
    max_rank: int,
    where: Path,
) -> Lora:
    """Return the adapter in the layout of our matrices. read: returns a tensor of the file by name."""
    parts: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
    by_name = {target.name: target for target in targets.targets}
    modules = find_modules(pairs, targets, max_rank, where)
    config.check_modules(pairs, targets.by_module())
    for module, places in modules.items():
        pair = pairs[module]
        a, b = read(pair.a).float(), read(pair.b).float()
        for name, tensor in ((pair.a, a), (pair.b, b)):
            if not tensor.isfinite().all():
                raise CheckpointError(f"{where}: {name} has values that are not finite")
        b = b * config.scale(module, pair.rank)
        for target, index in places:
            parts.setdefault(target.name, []).append((index, a, b))
    return Lora({name: _joined(by_name[name], held, targets) for name, held in parts.items()})


def _joined(
    target: LoraTarget, parts: list[tuple[int, Tensor, Tensor]], targets: LoraTargets
) -> tuple[Tensor, Tensor]:
    """Join a and b of a target's modules, each module's outputs at their offset in the target."""
    runs = targets.layouts[target.layout]
    rows, rank = sum(count for _, _, count in runs), sum(a.shape[0] for _, a, _ in parts)
    joined, column = torch.zeros(rows, rank), 0
    for index, a, b in parts:
        at, place = [], 0
        sources = []
        for module, first, count in runs:
            if module == index:
                at.append(torch.arange(place, place + count))
                sources.append(torch.arange(first, first + count))
            place += count
        if at:
            joined[torch.cat(at), column : column + a.shape[0]] = b[torch.cat(sources)]
        column += a.shape[0]
    return torch.cat([a for _, a, _ in parts]), joined


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """A safetensors file that is read rather than mapped, since a mapped file that is truncated would crash
    the process.

    size: length of the file in bytes. Raises CheckpointError, naming `where`, for a damaged one.
    """

    def __init__(self, file: BinaryIO, size: int, where: Path):
        self._file, self._where = file, where
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{where} is not a safetensors file, or is cut short: it holds {size:,} bytes and names a "
                f"header of {length:,}"
            )
        try:
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            self._entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{where} has a damaged header: {error}") from None
        self._data = 8 + length
        self.shapes = {name: tuple(entry.shape) for name, entry in self._entries.items()}
        for name, entry in self._entries.items():
            self._check(name, entry, size - self._data)

    def _check(self, name: str, entry: _Entry, room: int) -> None:
        if entry.dtype not in _DTYPES:
            wanted = ", ".join(_DTYPES)
            raise CheckpointError(f"{self._where}: {name} has dtype {entry.dtype}; wanted one of {wanted}")
        if len(entry.shape) > _MAX_DIMENSIONS:
            found = f"{name[:200]} has {len(entry.shape):,} dimensions"
            raise CheckpointError(f"{self._where}: {found}; wanted at most {_MAX_DIMENSIONS}")
        start, stop = entry.data_offsets
        needed = math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize
        if min(entry.shape, default=0) < 0 or not 0 <= start <= stop or stop - start != needed:
            raise CheckpointError(
                f"{self._where}: {name} {self.shapes[name]} {entry.dtype} has the bytes from {start:,} to "
                f"{stop:,}; it needs {needed:,}"
            )
        if stop > room:
            raise CheckpointError(
                f"{self._where} is cut short: {name} ends at byte {self._data + stop:,} of "
                f"{self._data + room:,}"
            )

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        start, stop = entry.data_offsets
        self._file.seek(self._data + start)
        data = bytearray(self._file.read(stop - start))
        if len(data) != stop - start:
            raise CheckpointError(f"{self._where} was cut short while it was read")
        return torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).reshape(entry.shape)


def fingerprint(directory: Path) -> tuple[int, ...]:
    """Return a value that changes when a file of the adapter changes.

    FileNotFoundError if the folder has no adapter.
    """
    states = [(Path(directory) / name).stat() for name in ("adapter_config.json", TENSOR_FILE)]
    return tuple(number for state in states for number in (state.st_ino, state.st_size, state.st_mtime_ns))


def read_lora(directory: Path, targets: LoraTargets, max_rank: int) -> Lora:
    """Read the adapter in a directory with adapter_config.json and adapter_model.safetensors.

    Names, shapes and sizes are checked before any tensor is read. Raises CheckpointError, UnsupportedError or
    RequestError, which name the file and the tensor.
    """
    directory = Path(directory)
    path = directory / TENSOR_FILE
    config = read_lora_config(directory)
    if not path.is_file():
        hint = f"; add it with `tridecode adapters add`, which converts {PICKLE_FILE}"
        raise CheckpointError(f"{path} is missing{hint if (directory / PICKLE_FILE).exists() else ''}")
    most = targets.most_bytes(max_rank) + MAX_HEADER_BYTES
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise RequestError(
                    f"{path} holds {size:,} bytes; adapters of this model have at most {most:,} "
                    f"(max_lora_rank = {max_rank} in config.pbtxt)"
                )
            tensors = SafetensorsFile(file, size, path)
            pairs = pair_tensors(tensors.shapes, path)
            return assemble(pairs, tensors.read, config, targets, max_rank, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
