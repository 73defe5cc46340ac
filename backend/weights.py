"""Reads a weight directory at any tensor-parallel degree, whatever degree it was written at.

All files are checked, to the byte, before the first is read. Files are memory-mapped: a tensor is a view if
one file holds it, otherwise it is merged or cut while it is copied. The bytes: docs/weight_files.md.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Optional

import msgspec
import torch
from torch import Tensor

from tridecode.backend.config import ModelConfig
from tridecode.backend.errors import ConfigError, WeightFileError
from tridecode.backend.models import family
from tridecode.backend.weight_layout import WeightSpec

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MANIFEST_FILE = "manifest.json"
#: changes with the meaning of manifest.json
MANIFEST_FORMAT = "tridecode-weights-1"


class ManifestFile(msgspec.Struct, frozen=True):
    """One file: its name within the directory, its length and the SHA-256 of its bytes in hexadecimal."""

    name: str
    bytes: int
    sha256: str


class ManifestTensor(msgspec.Struct, frozen=True):
    """One tensor as its WeightSpec has it, and its files in rank order."""

    name: str
    shape: list[int]
    dtype: str
    axis: Optional[int]  # noqa: UP045  msgspec evaluates it, on Python 3.9 too
    sections: list[int]
    files: list[ManifestFile]


class Manifest(msgspec.Struct, frozen=True):
    """manifest.json: what the converter wrote. Directories of FasterTransformer's converters have none."""

    format: str
    family: str
    tensor_para_size: int
    dtype: str
    tensors: list[ManifestTensor]


def read_manifest(directory: Path) -> Manifest | None:
    """manifest.json of a directory, or None if it has none. Raises WeightFileError if it is damaged."""
    path = Path(directory) / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise WeightFileError(f"{path} is not a valid manifest: {error}") from None
    if manifest.format != MANIFEST_FORMAT:
        raise WeightFileError(
            f"{path} has format {manifest.format!r}; this version reads {MANIFEST_FORMAT!r}"
        )
    return manifest


@dataclass(frozen=True)
class Piece:
    """A part of one file that fills a part of one rank's shard.

    path, file_shape: the file and the shape of what it holds. source: (start, stop) within the file, and
    destination: (start, stop) within the shard, both along `axis`; every other axis is taken whole.
    """

    path: Path
    file_shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int
    source: tuple[int, int]
    destination: tuple[int, int]

    @property
    def byte_range(self) -> tuple[int, int]:
        """(offset, length) of the file's bytes from the first to the last that this piece needs."""
        inner = math.prod(self.file_shape[self.axis + 1 :]) * self.dtype.itemsize
        outer = math.prod(self.file_shape[: self.axis])
        stride = self.file_shape[self.axis] * inner
        start, stop = self.source
        return start * inner, (outer - 1) * stride + (stop - start) * inner

    def view(self) -> Tensor:
        """The part of the file as a memory-mapped CPU tensor; strided where axis is not the first."""
        whole = _map_file(self.path, self.file_shape, self.dtype)
        return whole.narrow(self.axis, self.source[0], self.source[1] - self.source[0])

    def slot(self, shard: Tensor) -> Tensor:
        """The part of `shard` that this piece fills."""
        return shard.narrow(self.axis, self.destination[0], self.destination[1] - self.destination[0])


def _map_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # copy on write, and torch keeps no descriptor open: a model on the CPU holds hundreds of files for life
    return torch.from_file(str(path), shared=False, size=math.prod(shape), dtype=dtype).view(shape)


class WeightReader:
    """The tensors of one weight directory. Reading is safe from several threads.

    specs: the WeightSpecs that the directory holds, by name. stored_size: the tensor-parallel degree it was
    written at. dtype: of the files. Raises WeightFileError, before anything is read, where a file is missing
    or has another length than its shape needs.
    """

    def __init__(self, directory: Path, config: ModelConfig):
        self.directory = Path(directory)
        self.config = config
        self.dtype = TORCH_DTYPES[config.weight_dtype]
        self.specs = {spec.name: spec for spec in family(config.family).weight_specs(config)}
        self.manifest = read_manifest(self.directory)
        self.stored_size = self._find_stored_size()
        problems = self.problems()
        if problems:
            more = f"; {len(problems) - 1} more files are missing or wrong" if len(problems) > 1 else ""
            raise WeightFileError(problems[0] + more)

    def _find_stored_size(self) -> int:
        if self.manifest is not None:
            return self.manifest.tensor_para_size
        split = next(spec for spec in self.specs.values() if spec.axis is not None)
        size = 0
        while (self.directory / split.file_name(size)).exists():
            size += 1
        if size == 0:
            raise WeightFileError(
                f"{self.directory / split.file_name(0)} is missing; {self._describe(split)}"
            )
        return size

    def _describe(self, spec: WeightSpec) -> str:
        return f"{spec.name} {spec.shape} {self.config.weight_dtype}"

    def files(self, spec: WeightSpec) -> list[Path]:
        """The files of a tensor, in rank order."""
        ranks = 1 if spec.axis is None else self.stored_size
        return [self.directory / spec.file_name(rank) for rank in range(ranks)]

    def file_bytes(self, spec: WeightSpec) -> int:
        """The length that each of its files must have."""
        return math.prod(spec.shard_shape(self.stored_size)) * self.dtype.itemsize

    def problems(self) -> list[str]:
        """A sentence for each file that is missing or has a wrong length."""
        found = []
        for spec in self.specs.values():
            try:
                wanted = self.file_bytes(spec)
            except ConfigError as error:
                return [f"{self.directory} has files of {self.stored_size} ranks, but {error}"]
            for path in self.files(spec):
                problem = self._problem(path, spec, wanted)
                if problem:
                    found.append(problem)
        return found

    def _problem(self, path: Path, spec: WeightSpec, wanted: int) -> str | None:
        try:
            length = path.stat().st_size
        except FileNotFoundError:
            return f"{path} is missing; {self._describe(spec)} needs it ({wanted:,} bytes)"
        if length == wanted:
            return None
        hint = ""
        if length * 2 == wanted or length == wanted * 2:
            other = "fp16 or bf16" if length < wanted else "fp32"
            hint = f" (the length of {other}; weight_data_type in config.ini is {self.config.weight_dtype})"
        return f"{path} holds {length:,} bytes; {self._describe(spec)} needs {wanted:,}{hint}"

    def pieces(self, spec: WeightSpec, rank: int = 0, world: int = 1) -> list[Piece]:
        """The parts of files that make up rank's shard at degree `world`, in the order of the shard.

        Raises ConfigError where the tensor cannot be split over `world` ranks.
        """
        if spec.axis is None:
            whole = (0, spec.shape[0])
            return [Piece(self.files(spec)[0], spec.shape, self.dtype, 0, whole, whole)]
        spec.check_divides(world)
        file_shape = spec.shard_shape(self.stored_size)
        stored = [spec.slices(index, self.stored_size) for index in range(self.stored_size)]
        pieces, filled = [], 0
        for section, (start, stop) in enumerate(spec.slices(rank, world)):
            for path, file_slices in zip(self.files(spec), stored):
                low, high = max(start, file_slices[section][0]), min(stop, file_slices[section][1])
                if low >= high:
                    continue
                before = sum(part // self.stored_size for part in spec.parts[:section])
                first, size = before + low - file_slices[section][0], high - low
                source, destination = (first, first + size), (filled, filled + size)
                pieces.append(Piece(path, file_shape, self.dtype, spec.axis, source, destination))
                filled += size
        return _join(pieces)

    def read(self, spec: WeightSpec, rank: int = 0, world: int = 1) -> Tensor:
        """Rank's shard at degree `world`, spec.shard_shape(world), on the CPU in the files' dtype.

        A view of the mapped file where one file suffices (strided where its columns are cut), else a new
        tensor. Treat it as read-only.
        """
        pieces = self.pieces(spec, rank, world)
        if spec.divided:
            return pieces[0].view() * self.stored_size
        if len(pieces) == 1:
            return pieces[0].view()
        shard = torch.empty(spec.shard_shape(world), dtype=self.dtype)
        for piece in pieces:
            piece.slot(shard).copy_(piece.view())
        return shard

    def verify_checksums(self, progress: Callable[[int], None] | None = None) -> None:
        """Compare every file with manifest.json. Raises WeightFileError naming the first that differs.

        progress: called with the number of bytes read since it was last called.
        """
        for problem in self.checksum_problems(progress):
            raise WeightFileError(problem)

    def checksum_problems(self, progress: Callable[[int], None] | None = None):
        """Yield a sentence for each file whose bytes are not those that were written."""
        if self.manifest is None:
            yield f"{self.directory / MANIFEST_FILE} is missing; it holds the checksums"
            return
        listed = {file.name: file for tensor in self.manifest.tensors for file in tensor.files}
        for path in (path for spec in self.specs.values() for path in self.files(spec)):
            file = listed.get(path.name)
            if file is None:
                yield f"{path} is not listed in {MANIFEST_FILE}"
                continue
            found = file_sha256(path, progress)
            if found != file.sha256:
                yield f"{path} has SHA-256 {found}; {MANIFEST_FILE} says {file.sha256}"


def _join(pieces: list[Piece]) -> list[Piece]:
    """Merge neighbours that are neighbours in the file too, so that an unsplit tensor is one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.path == piece.path and last.source[1] == piece.source[0]:
            source, destination = last.source[0], last.destination[0]
            joined[-1] = replace(
                last, source=(source, piece.source[1]), destination=(destination, piece.destination[1])
            )
        else:
            joined.append(piece)
    return joined


def file_sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return digest.hexdigest()
