"""Writes a weight directory: shards, config.ini and manifest.json (docs/weight_files.md has the bytes)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import msgspec
import torch
from torch import Tensor

from tridecode.backend.config import ModelConfig, check_tensor_size
from tridecode.backend.errors import CheckpointError
from tridecode.backend.models import model_config_ini
from tridecode.backend.weight_layout import WeightSpec
from tridecode.backend.weights import (
    MANIFEST_FILE,
    MANIFEST_FORMAT,
    TORCH_DTYPES,
    Manifest,
    ManifestFile,
    ManifestTensor,
)
from tridecode.converters.progress import byte_progress

#: tensors in flight, all of them in memory; reading, hashing and writing release the interpreter
_WORKERS = 4


@dataclass(frozen=True)
class TensorToWrite:
    """One tensor of the directory; `load` gives it whole, spec.shape, in any floating dtype."""

    spec: WeightSpec
    load: Callable[[], Tensor]


def write_weights(
    directory: Path, config: ModelConfig, tensors: Iterable[TensorToWrite], tensor_para_size: int = 1
) -> Manifest:
    """Write config.ini, manifest.json and every tensor in config.weight_dtype, split over the ranks.

    Creates the directory. Raises ConfigError before anything is written if a tensor cannot be split, and
    CheckpointError for a value that is not finite or does not fit the dtype.
    """
    check_tensor_size(config, tensor_para_size)
    tensors = list(tensors)
    for item in tensors:
        if item.spec.axis is not None:
            item.spec.check_divides(tensor_para_size)
    directory.mkdir(parents=True)
    (directory / "config.ini").write_text(model_config_ini(config, tensor_para_size), encoding="utf-8")
    total = sum(math.prod(item.spec.shape) for item in tensors) * TORCH_DTYPES[config.weight_dtype].itemsize
    with byte_progress(f"writing {config.weight_dtype} weights", total) as progress:
        with ThreadPoolExecutor(_WORKERS) as pool:
            written = [
                pool.submit(_write_tensor, directory, item, config.weight_dtype, tensor_para_size, progress)
                for item in tensors
            ]
            try:
                entries = [future.result() for future in written]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    manifest = Manifest(MANIFEST_FORMAT, config.family, tensor_para_size, config.weight_dtype, entries)
    (directory / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return manifest


def _write_tensor(
    directory: Path, item: TensorToWrite, dtype: str, ranks: int, progress: Callable[[int], None]
) -> ManifestTensor:
    spec = item.spec
    tensor = _cast(item.load(), dtype, spec)
    assert tensor.shape == spec.shape, (spec, tensor.shape)
    files = []
    for rank in range(1 if spec.axis is None else ranks):
        shard = tensor if spec.axis is None else _shard(tensor, spec, rank, ranks)
        data = shard.contiguous().view(torch.uint8).flatten().numpy().data
        (directory / spec.file_name(rank)).write_bytes(data)
        files.append(ManifestFile(spec.file_name(rank), data.nbytes, hashlib.sha256(data).hexdigest()))
        progress(data.nbytes)
    return ManifestTensor(spec.name, list(spec.shape), dtype, spec.axis, list(spec.sections), files)


def _shard(tensor: Tensor, spec: WeightSpec, rank: int, ranks: int) -> Tensor:
    assert spec.axis is not None
    parts = [tensor.narrow(spec.axis, start, stop - start) for start, stop in spec.slices(rank, ranks)]
    return torch.cat(parts, dim=spec.axis)


def _cast(tensor: Tensor, dtype: str, spec: WeightSpec) -> Tensor:
    cast = tensor.to(TORCH_DTYPES[dtype])
    if torch.isfinite(cast).all():
        return cast
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{spec.name} {spec.shape} of the checkpoint holds values that are not finite")
    largest = tensor.abs().max().item()
    raise CheckpointError(
        f"{spec.name} {spec.shape} holds values up to {largest:g}, which {dtype} cannot; use bf16 or fp32"
    )
