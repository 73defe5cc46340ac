"""Finished tensors of a calibration, in files: only the tensor that is being read is in memory."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from tridecode.kernels.formats.quantized import QuantizedWeight


class TensorStore(MutableMapping[str, "Tensor | QuantizedWeight"]):
    """Tensors by name, each in a file of a new folder within `parent` (None: the system's for temporary
    files), which is removed with the object.

    A value is memory-mapped from its file at each access. `digest` covers the names and the values that
    distinguish one run's folding and grids from another's: scales and dense tensors.
    """

    def __init__(self, parent: Path | None = None):
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="calibrated-", dir=parent))
        self._files: dict[str, Path] = {}
        self._digest = hashlib.sha256()
        self.close = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def __setitem__(self, name: str, value: Tensor | QuantizedWeight) -> None:
        part = value.scales if isinstance(value, QuantizedWeight) else value
        self._digest.update(name.encode())
        self._digest.update(part.cpu().contiguous().numpy().tobytes())
        path = self._files.setdefault(name, self._folder / f"{len(self._files)}.pt")
        new = path.with_suffix(".new")
        torch.save(_parts(value), new)
        new.replace(path)  # tensors read before are still mapped

    def __getitem__(self, name: str) -> Tensor | QuantizedWeight:
        held = torch.load(self._files[name], mmap=True, weights_only=True)
        return QuantizedWeight(**held) if isinstance(held, dict) else held

    def __delitem__(self, name: str) -> None:
        self._files.pop(name).unlink()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def digest(self) -> str:
        return self._digest.hexdigest()


def _parts(value: Tensor | QuantizedWeight) -> object:
    """Return the value's tensors on the CPU, for torch.save."""
    if isinstance(value, Tensor):
        return value.cpu().contiguous()
    named = {item.name: getattr(value, item.name) for item in fields(value)}
    return {name: part.cpu() if isinstance(part, Tensor) else part for name, part in named.items()}
