"""A weight directory of a true shape without a checkpoint: random numbers (docs/design/weight_files.md)."""

from __future__ import annotations

import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import family, model_config_ini
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.reader import TORCH_DTYPES

_SCALE = 0.02  # standard deviation of matrices and embeddings, as in GPT-2's initialisation
_NUMBERS = 16_777_213  # drawn, then repeated; a prime, so that rows begin at different places
_WRITERS = 8  # threads


class RandomNumbers:
    """One block of random bytes, written repeatedly from an offset determined by the tensor's name. Norm
    weights are about 1, all others about 0.
    """

    def __init__(self, dtype: torch.dtype, count: int = _NUMBERS):
        drawn = torch.randn(count, generator=torch.Generator().manual_seed(0)).mul_(_SCALE)
        self._itemsize = dtype.itemsize
        self._blocks = {shift: _bytes((drawn + shift).to(dtype)) for shift in (0, 1)}

    def write(self, path: Path, spec: WeightSpec) -> int:
        """Write the file of a whole tensor; its bytes."""
        block = self._blocks[1 if "layernorm.weight" in spec.name else 0]
        start = zlib.crc32(spec.name.encode()) * self._itemsize % len(block)
        size = left = math.prod(spec.shape) * self._itemsize
        with open(path, "wb", buffering=0) as file:
            while left:
                done = file.write(block[start : start + left])
                left, start = left - done, (start + done) % len(block)
        return size


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def write_random_files(directory: Path, model: ModelConfig) -> int:
    """Write the files of `model` in model.weight_dtype, for one rank and without a manifest. The directory
    must not exist. Returns the bytes of all tensors.
    """
    numbers = RandomNumbers(TORCH_DTYPES[model.weight_dtype])
    directory.mkdir(parents=True)
    (directory / "config.ini").write_text(model_config_ini(model, 1), encoding="utf-8")
    specs = weight_specs(model)
    paths = [directory / spec.file_name(0) for spec in specs]
    with ThreadPoolExecutor(_WRITERS) as pool:
        return sum(pool.map(numbers.write, paths, specs))


def weight_specs(model: ModelConfig) -> list[WeightSpec]:
    """The tensors that such a directory holds."""
    return family(model.family).weight_specs(model)


def weight_bytes(model: ModelConfig) -> int:
    """Bytes of all files."""
    itemsize = TORCH_DTYPES[model.weight_dtype].itemsize
    return sum(math.prod(spec.shape) for spec in weight_specs(model)) * itemsize
