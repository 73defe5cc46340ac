"""Writes a weight directory: shards, config.ini, manifest.json (docs/design/weight_files.md has the bytes).

Tensors are written in parts of a few MiB, so that memory holds only the tensors that the rules are making. An
interrupted conversion continues where it stopped.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tridecode.backend.base.byte_budget import ByteBudget
from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.base.file_digest import file_sha256
from tridecode.backend.configuration.model_config import ModelConfig, check_tensor_size
from tridecode.backend.models import model_config_ini
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.manifest import (
    MANIFEST_FORMAT,
    Manifest,
    ManifestFile,
    ManifestTensor,
    SampleDigest,
    config_values,
)
from tridecode.backend.weights.reader import FILE_DTYPES
from tridecode.converters.journal import PART, Header, Journal
from tridecode.converters.mapped_files import is_mapped
from tridecode.converters.progress import byte_progress
from tridecode.converters.pruning.zeros import ZeroCounter

_MAX_WORKERS = 32  # threads; reading, hashing and writing release the interpreter
_CHUNK_BYTES = 2 << 20  # bytes of a part of a tensor; each worker holds several copies
_IN_FLIGHT_BYTES = 256 << 20  # bytes of all tensors that are being written; a larger tensor is written alone
# rows of a transposition tile: (8192, 2048) bf16, one thread: 0.55 GB/s; untiled 0.6, tiles of 1024 0.5
_BLOCK_ROWS = 128
#: they have no infinity; the values of fp8 are rounded from finite ones
_UNCHECKED = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn)
Progress = Callable[[int], None]


@dataclass(frozen=True)
class TensorToWrite:
    """One tensor of the directory; `load` returns it whole, spec.shape, in any floating dtype, or in the
    files' dtype if spec.dtype is an integer or fp8. bytes: memory that `load` needs; 0: the size of the
    tensor in the files' dtype.
    """

    spec: WeightSpec
    load: Callable[[], Tensor]
    bytes: int = 0


def write_weights(
    directory: Path,
    config: ModelConfig,
    tensors: Iterable[TensorToWrite],
    tensor_para_size: int = 1,
    source: str = "",
    more_keys: str = "",
) -> Manifest:
    """Write config.ini, manifest.json and every tensor in its dtype, split over the ranks.

    more_keys: text appended to the model's description in config.ini.

    Creates the directory. If it holds a conversion of the same config and `source` (a digest of the
    checkpoint), interrupted or complete, finished files whose checksums agree are kept. Raises ConfigError
    before anything is written if a tensor cannot be split, FileExistsError for any other directory that
    exists, and CheckpointError for a value that is not finite or does not fit the dtype.
    """
    check_tensor_size(config, tensor_para_size)
    tensors = list(tensors)
    for item in tensors:
        item.spec.check_divides(tensor_para_size)
    header = Header(model_config_ini(config, tensor_para_size) + more_keys, tensor_para_size, source)
    journal = Journal(directory, header)
    writer = _Writer(directory, config.weight_dtype, tensor_para_size, journal, tensors)
    entries = writer.run()
    manifest = Manifest(
        MANIFEST_FORMAT,
        config.family,
        tensor_para_size,
        config.weight_dtype,
        entries,
        config_values(directory),
        *sparsity_of([entry for item, entry in zip(tensors, entries) if is_matrix(item.spec)]),
        source,
    )
    journal.close(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return manifest


def is_matrix(spec: WeightSpec) -> bool:
    """Return whether the tensor is an unquantised matrix of a layer: only these are checked for 2:4 zeros."""
    return spec.layer is not None and len(spec.shape) == 2 and not spec.dtype


def sparsity_of(matrices: list[ManifestTensor]) -> tuple[float, str]:
    """Manifest.weight_sparsity and sparsity_pattern of the matrices of all layers."""
    weights = sum(math.prod(entry.shape) for entry in matrices)
    pattern = "2:4" if matrices and all(entry.two_of_four for entry in matrices) else ""
    return sum(entry.zeros for entry in matrices) / max(weights, 1), pattern


class _Writer:
    """Writes the tensors of one directory, several at a time."""

    def __init__(
        self, directory: Path, dtype: str, ranks: int, journal: Journal, tensors: list[TensorToWrite]
    ):
        self._directory, self._dtype, self._ranks = directory, dtype, ranks
        self._journal, self._tensors = journal, tensors
        sizes = [self._tensor_bytes(item) for item in tensors]
        self._budget = ByteBudget(max([_IN_FLIGHT_BYTES, *sizes]))

    def _dtype_of(self, spec: WeightSpec) -> str:
        return spec.dtype or self._dtype

    def _tensor_bytes(self, item: TensorToWrite) -> int:
        return item.bytes or math.prod(item.spec.shape) * FILE_DTYPES[self._dtype_of(item.spec)].itemsize

    def _file_bytes(self, spec: WeightSpec) -> int:
        return math.prod(spec.file_shape(self._ranks)) * FILE_DTYPES[self._dtype_of(spec)].itemsize

    def run(self) -> list[ManifestTensor]:
        """The entries of the manifest, in the order of the tensors."""
        total = sum(self._file_bytes(item.spec) * item.spec.num_files(self._ranks) for item in self._tensors)
        workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
        with (
            byte_progress(f"writing {self._dtype} weights", total) as progress,
            _one_torch_thread(),
            ThreadPoolExecutor(workers, thread_name_prefix="write") as pool,
        ):
            written = [pool.submit(self._settle, item, progress) for item in self._tensors]
            try:
                return [future.result() for future in written]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _settle(self, item: TensorToWrite, progress: Progress) -> ManifestTensor:
        """Return the tensor's entry, from its finished files, or else from files that are written now."""
        held = self._journal.finished.get(item.spec.name)
        if held is not None and self._is_intact(item.spec, held):
            progress(sum(file.bytes for file in held.files))
            return held
        with self._budget.hold(self._tensor_bytes(item)):
            entry = self._write(item, progress)
        self._journal.add(entry)
        return entry

    def _is_intact(self, spec: WeightSpec, held: ManifestTensor) -> bool:
        """Return whether the files of a finished tensor are those that were written."""
        names = [spec.file_name(rank) for rank in range(spec.num_files(self._ranks))]
        if [file.name for file in held.files] != names:
            return False
        for path, file in ((self._directory / file.name, file) for file in held.files):
            if not path.is_file() or path.is_symlink() or path.stat().st_size != self._file_bytes(spec):
                return False
            if file_sha256(path) != file.sha256:
                return False
        return True

    def _write(self, item: TensorToWrite, progress: Progress) -> ManifestTensor:
        spec, tensor = item.spec, item.load()
        assert tensor.shape == spec.shape, (spec, tensor.shape)
        try:
            files, zeros = self._write_files(spec, tensor, progress)
        except _NotFinite as error:
            raise CheckpointError(f"{spec.name} {spec.shape} {error.finding(self._dtype_of(spec))}") from None
        sections = list(spec.sections)
        return ManifestTensor(
            spec.name,
            list(spec.shape),
            self._dtype_of(spec),
            spec.axis,
            sections,
            files,
            sum(counter.zeros for counter in zeros),
            bool(zeros) and all(counter.two_of_four for counter in zeros),
        )

    def _write_files(
        self, spec: WeightSpec, tensor: Tensor, progress: Progress
    ) -> tuple[list[ManifestFile], list[ZeroCounter]]:
        """The files of a tensor and, if it is a matrix of a layer, the zeros of each."""
        dtype, files = FILE_DTYPES[self._dtype_of(spec)], []
        zeros: list[ZeroCounter] = []
        tensor = _row_major(tensor, dtype)
        for rank in range(spec.num_files(self._ranks)):
            parts, padding = _shard(tensor, spec, rank, spec.num_files(self._ranks))
            path = self._directory / spec.file_name(rank)
            chunks = _chunks(parts, padding, spec.axis or 0, dtype)
            if is_matrix(spec):
                zeros.append(ZeroCounter())
                chunks = _counted(chunks, zeros[-1])
            files.append(_write_file(path, chunks, progress))
        return files, zeros


def _counted(chunks: Iterator[Tensor], counter: ZeroCounter) -> Iterator[Tensor]:
    for chunk in chunks:
        counter.update(chunk)
        yield chunk


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The workers are threads: each operation of theirs needs no more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _shard(tensor: Tensor, spec: WeightSpec, rank: int, ranks: int) -> tuple[list[Tensor], list[int]]:
    """Yield views of a rank's slice of each section, and the number of zeros that follow each along
    spec.axis.
    """
    if spec.axis is None or ranks == 1:
        return [tensor], [0]
    slices = spec.slices(rank, ranks)
    parts = [tensor.narrow(spec.axis, start, stop - start) for start, stop in slices]
    padding = [size - (stop - start) for size, (start, stop) in zip(spec.share_sizes(ranks), slices)]
    return parts, padding


def _row_major(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor, copied if it is a large mapped matrix that is stored column by column.

    Its rows would be read from all over the file, which may not fit in memory: the copy reads it once, in
    file order.
    """
    if (
        tensor.ndim != 2
        or tensor.stride(0) >= tensor.stride(1)
        or tensor.nbytes <= _CHUNK_BYTES
        or not is_mapped(tensor)
    ):
        return tensor
    out = torch.empty(tensor.shape, dtype=dtype)
    for start in range(0, tensor.shape[1], _BLOCK_ROWS):
        columns = slice(start, start + _BLOCK_ROWS)
        out[:, columns].copy_(_cast(tensor[:, columns].t(), dtype).t().contiguous())
    return out


def _chunks(parts: list[Tensor], padding: list[int], axis: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a shard's rows in order, a few MiB at a time, contiguous in `dtype`; parts lie along `axis`."""
    if axis == 0:
        for part, zeros in zip(parts, padding):
            for start, stop in _row_ranges(part):
                yield _rows(part, start, stop, dtype)
            if zeros:
                yield torch.zeros((zeros, *part.shape[1:]), dtype=dtype)
        return
    for start, stop in _row_ranges(torch.cat([part.to("meta") for part in parts], dim=axis)):
        held = []
        for part, zeros in zip(parts, padding):
            held.append(_rows(part, start, stop, dtype))
            if zeros:
                held.append(torch.zeros((stop - start, zeros, *part.shape[2:]), dtype=dtype))
        yield held[0] if len(held) == 1 else torch.cat(held, dim=axis)


def _row_ranges(tensor: Tensor) -> Iterator[tuple[int, int]]:
    row_bytes = 4 * max(math.prod(tensor.shape[1:]), 1)
    step = max(_CHUNK_BYTES // row_bytes, 1)
    for start in range(0, tensor.shape[0], step):
        yield start, min(start + step, tensor.shape[0])


def _rows(tensor: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    part = tensor[start:stop]
    if part.ndim == 2 and part.stride(0) < part.stride(1):  # read in memory order, then transposed
        return _cast(part.t().contiguous(), dtype).t().contiguous()
    return _cast(part, dtype).contiguous()


class _NotFinite(Exception):
    """largest: largest magnitude before the cast, or None if the values were already not finite."""

    def __init__(self, largest: float | None):
        self._largest = largest

    def finding(self, dtype: str) -> str:
        if self._largest is None:
            return "of the checkpoint holds values that are not finite"
        return f"holds values up to {self._largest:g}, which {dtype} cannot; use bf16 or fp32"


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`. Raises _NotFinite for a value that is not finite there."""
    cast = tensor.to(dtype)
    if dtype in _UNCHECKED:
        return cast
    if not _is_finite(cast):
        raise _NotFinite(tensor.abs().max().item() if _is_finite(tensor) else None)
    return cast


def _is_finite(tensor: Tensor) -> bool:
    """Check both extremes of a contiguous tensor: 15 GB/s; torch.isfinite 0.5 GB/s (bf16, one thread)."""
    return tensor.numel() == 0 or all(math.isfinite(value.item()) for value in torch.aminmax(tensor))


def _write_file(path: Path, chunks: Iterator[Tensor], progress: Progress) -> ManifestFile:
    """Write one file under a temporary name, to the disk, and rename it."""
    whole, sample, length = hashlib.sha256(), SampleDigest(), 0
    part = path.with_name(path.name + PART)
    with open(part, "wb", buffering=0) as file:
        for chunk in chunks:
            data = chunk.flatten().view(torch.uint8).numpy().data
            whole.update(data)
            sample.update(data)
            length += data.nbytes
            progress(data.nbytes)
            while data:  # a full disk accepts a part before it refuses
                data = data[file.write(data) :]
        os.fsync(file.fileno())
    part.rename(path)
    return ManifestFile(path.name, length, whole.hexdigest(), sample.hexdigest())
