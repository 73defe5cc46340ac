"""Containers of a Hugging Face checkpoint: safetensors and torch's .bin, whole or in shards."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tridecode.backend.base.checkpoint_files import member, read_json, require_file
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.sources import TensorSource
from tridecode.converters.sources.containers import check_archive, check_safetensors, foreign_format
from tridecode.converters.sources.pickle_limits import PickleLimitError
from tridecode.converters.sources.torch_file import check_pickle

_OTHER_WEIGHTS = (
    "tf_model.h5",
    "flax_model.msgpack",
    "model.ckpt.index",
    "rust_model.ot",
    "consolidated.00.pth",
)


def tensor_files(path: Path) -> TensorSource:
    """The weights, in transformers' order of preference."""
    for stem, source in (("model.safetensors", SafetensorsSource), ("pytorch_model.bin", PickleSource)):
        if (path / stem).exists():
            return source([require_file(path / stem)])
        index = path / f"{stem}.index.json"
        if index.exists():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise CheckpointError(f'{index} has no "weight_map"; wanted the file of each tensor')
            names = {name for name in listed.values() if isinstance(name, str)}
            others = (name for name in listed.values() if not isinstance(name, str))
            return source(sorted(member(path, name, index.name) for name in (*others, *names)))
    foreign = next((name for name in _OTHER_WEIGHTS if (path / name).exists()), None)
    found = f"{foreign}, weights for another framework" if foreign else "no weights"
    raise CheckpointError(
        f"{path} has {found}; wanted model.safetensors, model.safetensors.index.json, pytorch_model.bin "
        "or pytorch_model.bin.index.json"
    )


def check_dtypes(tensors: TensorSource, where: Path) -> None:
    """Raise UnsupportedError for weights stored as integers or in 8 bits, whatever the config says.

    They come with scales; read without them, they would be another model.
    """
    for name in tensors.shapes:
        dtype = tensors.dtype(name) if name.endswith("weight") else torch.float32
        if not dtype.is_floating_point or dtype.itemsize == 1:
            raise UnsupportedError(
                f"{where}: {name} is stored as {str(dtype).removeprefix('torch.')}, quantised; convert the "
                "unquantised checkpoint"
            )


class SafetensorsSource:
    """One .safetensors file or the shards of one checkpoint, memory-mapped."""

    def __init__(self, files: list[Path]):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        for path in files:
            check_safetensors(path)
            try:
                file = safe_open(str(path), framework="pt", device="cpu")
            except Exception as error:  # safetensors raises its own type, OSError and others
                found = foreign_format(path) or error
                raise CheckpointError(f"{path} is not a readable safetensors file: {found}") from None
            for name in file.keys():  # noqa: SIM118  safe_open is not a mapping
                if name in self._files:
                    _check_equal(name, self.read(name), file.get_tensor(name), paths[name], path)
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
                self._files[name], paths[name] = file, path

    def dtype(self, name: str) -> torch.dtype:
        # of one element: get_slice names the dtype only in safetensors' own spelling
        part = self._files[name].get_slice(name)
        return (part[:1] if part.get_shape() else self.read(name)).dtype

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)


class PickleSource:
    """One pytorch_model.bin or its shards, memory-mapped where torch can; code in them is never run."""

    def __init__(self, files: list[Path]):
        self._tensors: dict[str, Tensor] = {}
        paths: dict[str, Path] = {}
        for path in files:
            held = self._load(path)
            for name in held.keys() & self._tensors.keys():
                _check_equal(name, self._tensors[name], held[name], paths[name], path)
            self._tensors.update(held)
            paths.update(dict.fromkeys(held, path))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    @staticmethod
    def _load(path: Path) -> dict[str, Tensor]:
        check_archive(path)
        try:
            check_pickle(path)
            try:
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # written before torch 1.6: not a zip file, cannot be mapped
                state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            found = foreign_format(path) or _pickle_fault(error)
            raise CheckpointError(f"{path} cannot be loaded as plain tensors: {found}") from None
        if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
            raise CheckpointError(
                f"{path} holds a {type(state).__name__}; wanted a dict of tensors (a state dict)"
            )
        return state

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def _check_equal(name: str, first: Tensor, second: Tensor, first_file: Path, second_file: Path) -> None:
    """Raise CheckpointError if two files hold a tensor with different values: readers differ in their
    choice.
    """
    if first.dtype == second.dtype and first.shape == second.shape:
        bits = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
        if torch.equal(*bits):
            return
    raise CheckpointError(
        f"{first_file} and {second_file} both hold {name}, with different values; wanted each tensor once: "
        "remove it from the file that the index (weight_map) does not name"
    )


def _pickle_fault(error: Exception) -> str:
    """Return torch's error in one line; its own texts are paragraphs of advice."""
    text = " ".join(str(error).split())
    if isinstance(error, PickleLimitError):
        return text
    name = re.search(r"GLOBAL (\S+)", text)
    if name:
        return f"it holds the Python object {name.group(1)}, and code is never run; wanted tensors only"
    fault = re.search(r"WeightsUnpickler error: (.*?)(?: Check the documentation|$)", text)
    if fault:
        return f"its pickle holds more than tensors ({fault.group(1)})"
    # errors of the unpickler's own reading
    if isinstance(error, (LookupError, ValueError, EOFError, struct.error)):
        return f"its pickle is damaged, or it is not a pickle ({type(error).__name__})"
    return f"{type(error).__name__}: {text}"
