"""Reads a weight directory at any tensor-parallel degree, independent of the degree at which it was written.

All files are checked, to the byte, before the first is read. Files are memory-mapped: a tensor is a view if
one file holds it, otherwise it is merged or cut while it is copied. docs/design/weight_files.md describes the
bytes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tridecode.backend.base.errors import ConfigError, WeightFileError
from tridecode.backend.base.file_digest import file_sha256
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import file_specs
from tridecode.backend.weights.directory_files import find_num_ranks, stored_files, unread_tensor
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.manifest import (
    MANIFEST_FILE,
    ManifestFile,
    check_manifest,
    file_kind,
    read_manifest,
    sample_sha256,
)
from tridecode.backend.weights.pieces import Piece, join_neighbours

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: also for the parts of quantised matrices
FILE_DTYPES = {
    **TORCH_DTYPES,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "fp8": torch.float8_e4m3fn,
}
_MAX_STORED = 64  # numbers of ranks whose file lengths an error compares
_CHECK_THREADS = 8  # reading and hashing release the interpreter


class WeightReader:
    """The tensors of one weight directory. Reading is safe from several threads.

    specs: the WeightSpecs that the directory holds, by name. stored_size: the tensor-parallel degree it was
    written at. dtype: for files whose spec names none. Raises WeightFileError, before any weight is read, if
    the manifest belongs to another model than `config`, or if a file is missing or has the wrong length for
    its shape.
    """

    def __init__(self, directory: Path, config: ModelConfig):
        self.directory = Path(directory)
        self.config = config
        self.dtype = TORCH_DTYPES[config.weight_dtype]
        self.specs = {spec.name: spec for spec in file_specs(config)}
        self.manifest = read_manifest(self.directory)
        if self.manifest is not None:
            check_manifest(self.manifest, self.directory, config, self.specs.values())
        self.stored_size = self._find_stored_size()
        problems = self.problems()
        if problems:
            more = f"; {len(problems) - 1} more files are missing or wrong" if len(problems) > 1 else ""
            raise WeightFileError(problems[0] + more)

    def _find_stored_size(self) -> int:
        """Return the size recorded in the manifest, or found from the file names, which must be those of
        `config`'s tensors.
        """
        if self.manifest is not None:
            return self.manifest.tensor_para_size
        stored = stored_files(self.directory)
        if other := unread_tensor(stored, self.specs.values(), self.config.num_layers):
            raise WeightFileError(
                f"{self.directory / 'config.ini'} describes {other}; wanted a config.ini of the model whose "
                "files these are"
            )
        size = find_num_ranks(stored, self.specs.values())
        if size == 0:
            split = next(spec for spec in self.specs.values() if spec.num_files(2) == 2)
            raise WeightFileError(
                f"{self.directory / split.file_name(0)} is missing; {self._describe(split)}"
            )
        return size

    def _describe(self, spec: WeightSpec) -> str:
        return f"{spec.name} {spec.shape} {spec.dtype or self.config.weight_dtype}"

    def file_dtype(self, spec: WeightSpec) -> torch.dtype:
        return FILE_DTYPES[spec.dtype] if spec.dtype else self.dtype

    def files(self, spec: WeightSpec) -> list[Path]:
        """The files of a tensor, in rank order."""
        return [self.directory / spec.file_name(rank) for rank in range(spec.num_files(self.stored_size))]

    def file_bytes(self, spec: WeightSpec) -> int:
        """The length that each of its files must have."""
        return math.prod(spec.file_shape(self.stored_size)) * self.file_dtype(spec).itemsize

    def problems(self) -> list[str]:
        """Return a sentence for each file that is missing or has a wrong length."""
        found = []
        for spec in self.specs.values():
            try:
                self.file_bytes(spec)
            except ConfigError as error:
                missing = "" if self.manifest else "; files of a rank may be missing"
                return [f"{self.directory} has files of {self.stored_size} ranks, but {error}{missing}"]
            for path in self.files(spec):
                problem = self.problem(path, spec)
                if problem:
                    found.append(problem)
        return found

    def problem(self, path: Path, spec: WeightSpec) -> str | None:
        """Return a sentence if one of the tensor's files is missing or has a wrong length."""
        wanted = self.file_bytes(spec)
        try:
            status = path.stat()
        except FileNotFoundError:
            link = f" (it is a link to {os.readlink(path)})" if path.is_symlink() else ""
            text = f"{path} is missing{link}; {self._describe(spec)} needs it ({wanted:,} bytes)"
            rounded = path.with_name(re.sub(r"\.weight\.(\d+\.bin)$", r".weight.int8.\1", path.name))
            if rounded != path and rounded.exists():
                text += f". {rounded.name}, for FasterTransformer's int8_mode 2, does not replace it"
            return text
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}; {self._describe(spec)} needs it"
        if kind := file_kind(status):
            return f"{path} is {kind}; {self._describe(spec)} needs a regular file of {wanted:,} bytes"
        length = status.st_size
        if length == wanted:
            return None
        hint = self._length_hint(spec, length, wanted)
        return f"{path} holds {length:,} bytes; {self._describe(spec)} needs {wanted:,}{hint}"

    def _length_hint(self, spec: WeightSpec, length: int, wanted: int) -> str:
        """Explain a wrong length: missing ranks, another dtype, or a wrong size in config.ini."""
        is_split = spec.num_files(2) == 2 and spec.name in self.specs  # not a prefix of prompt learning
        if is_split and self._has_whole_embedding():
            for ranks in range(self.stored_size + 1, _MAX_STORED + 1):
                item = self.file_dtype(spec).itemsize
                if _splits(spec, ranks) and math.prod(spec.file_shape(ranks)) * item == length:
                    return (
                        f" (the length of one of {ranks} ranks' files; those of {ranks - self.stored_size} "
                        "ranks are missing)"
                    )
        elif not spec.dtype and (length * 2 == wanted or length == wanted * 2):
            other = "fp16 or bf16" if length < wanted else "fp32"
            return f" (the length of {other}; weight_data_type in config.ini is {self.config.weight_dtype})"
        return self._size_hint(spec, length, wanted)

    def _size_hint(self, spec: WeightSpec, length: int, wanted: int) -> str:
        """Return the key of config.ini that explains the length with another value."""
        config = self.config
        keys = {"model.wpe": ("max_pos_seq_len", config.max_positions)}
        keys |= dict.fromkeys(("model.wte", "model.lm_head.weight"), ("vocab_size", config.vocab_size))
        if ".mlp." in spec.name and not config.layer_sizes:
            keys[spec.name] = "inter_size", config.mlp_size
        key, value = keys.get(spec.name, ("", 0))
        if key and length and length * value % wanted == 0:
            return f" ({key} in config.ini is {value}; the length is that of {length * value // wanted})"
        if spec.name == "model.wte":
            sizes = f"vocab_size = {config.vocab_size} rows of {spec.shape[1]} values"
            return f" ({sizes}, head_num * size_per_head unless config.ini says otherwise)"
        return ""

    def _has_whole_embedding(self) -> bool:
        """Return whether model.wte, which is never split, has the expected length, so that the dtype is
        right.
        """
        spec = self.specs["model.wte"]
        try:
            return self.files(spec)[0].stat().st_size == self.file_bytes(spec)
        except OSError:
            return False

    def pieces(self, spec: WeightSpec, rank: int = 0, world: int = 1) -> list[Piece]:
        """Return the parts of files that make up a rank's shard at degree `world`, in the order of the shard.

        Padding is in no piece. Raises ConfigError if the tensor cannot be split over `world` ranks.
        """
        dtype = self.file_dtype(spec)
        if spec.axis is None:
            whole = (0, spec.shape[0])
            return [Piece(self.files(spec)[0], spec.shape, dtype, 0, whole, whole)]
        spec.check_divides(world)
        files = self.files(spec)
        stored = [spec.slices(index, len(files)) for index in range(len(files))]
        file_shape, stored_sizes = spec.file_shape(self.stored_size), spec.share_sizes(len(files))
        pieces, filled, held_before = [], 0, 0  # the last two are the sizes of the sections before this one
        sizes = spec.share_sizes(world)
        for section, (start, stop) in enumerate(spec.slices(rank, world)):
            at = start
            for path, held in zip(files, stored):
                low, high = max(at, held[section][0]), min(stop, held[section][1])
                if low >= high:
                    continue  # not in this file, or already in an earlier one: ranks that share a head
                first = held_before + low - held[section][0]
                source, to = (first, first + high - low), filled + low - start
                pieces.append(Piece(path, file_shape, dtype, spec.axis, source, (to, to + high - low)))
                at = high
            assert at == stop, (spec, rank, world, self.stored_size)
            filled, held_before = filled + sizes[section], held_before + stored_sizes[section]
        return join_neighbours(pieces)

    def read(self, spec: WeightSpec, rank: int = 0, world: int = 1) -> Tensor:
        """Return a rank's shard at degree `world`, spec.shard_shape(world), on the CPU in the file's dtype.

        It is a view of the mapped file if one file suffices (strided if its columns are cut), else a new
        tensor. Treat it as read-only.
        """
        pieces = self.pieces(spec, rank, world)
        if spec.divided:
            return pieces[0].view() * self.stored_size
        if len(pieces) == 1 and not self._padding(spec, pieces, world):
            return pieces[0].view()
        return self._merged(spec, pieces, world, self.file_dtype(spec))

    def copy(self, spec: WeightSpec, rank: int, world: int, dtype: torch.dtype) -> Tensor:
        """Return the shard of `read` as a new tensor in `dtype`."""
        pieces = self.pieces(spec, rank, world)
        if spec.divided:
            return (pieces[0].view() * self.stored_size).to(dtype)
        return self._merged(spec, pieces, world, dtype)

    def copied_bytes(self, spec: WeightSpec, rank: int, world: int) -> int:
        """Bytes that a contiguous `read` allocates: 0 if the result is a view of one file."""
        pieces = self.pieces(spec, rank, world)
        if len(pieces) == 1 and not self._padding(spec, pieces, world):
            whole_rows = pieces[0].source == (0, pieces[0].file_shape[pieces[0].axis])
            if pieces[0].axis == 0 or whole_rows:
                return 0
        return math.prod(spec.shard_shape(world)) * self.file_dtype(spec).itemsize

    @staticmethod
    def _padding(spec: WeightSpec, pieces: list[Piece], world: int) -> int:
        """Columns or rows of a shard that are in no piece."""
        if spec.axis is None:
            return 0
        return spec.shard_shape(world)[spec.axis] - sum(p.source[1] - p.source[0] for p in pieces)

    def _merged(self, spec: WeightSpec, pieces: list[Piece], world: int, dtype: torch.dtype) -> Tensor:
        make = torch.zeros if self._padding(spec, pieces, world) else torch.empty
        shard = make(spec.shard_shape(world), dtype=dtype)
        for piece in pieces:
            piece.fill(shard)
        return shard

    def verify(self, mode: str, specs: Iterable[WeightSpec] | None = None) -> None:
        """Compare the files of `specs` (None: of all tensors) with manifest.json.

        mode: "sizes": only the checks of the constructor; "sampled": the digest of 4 KiB in each MiB, if the
        manifest has it; "full": SHA-256 of every byte. Raises WeightFileError naming the first file that
        differs.
        """
        if mode == "sizes" or (mode == "sampled" and self.manifest is None):
            return
        problems = list(self._digest_problems(mode == "full", specs))
        if problems:
            more = f"; {len(problems) - 1} more files differ" if len(problems) > 1 else ""
            raise WeightFileError(problems[0] + more)

    def verify_checksums(self, progress: Callable[[int], None] | None = None) -> None:
        """Compare every file with manifest.json. Raises WeightFileError naming the first that differs.

        progress: called with the number of bytes read since it was last called.
        """
        for problem in self.checksum_problems(progress):
            raise WeightFileError(problem)

    def checksum_problems(self, progress: Callable[[int], None] | None = None) -> Iterator[str]:
        """Yield a sentence for each file whose bytes are not those that were written."""
        yield from self._digest_problems(True, None, progress)

    def sample_problems(self) -> Iterator[str]:
        """Yield a sentence for each file whose sampled digest is not that of the manifest."""
        yield from self._digest_problems(False, None)

    def _digest_problems(
        self, full: bool, specs: Iterable[WeightSpec] | None, progress: Callable[[int], None] | None = None
    ) -> Iterator[str]:
        if self.manifest is None:
            yield f"{self.directory / MANIFEST_FILE} is missing; it holds the checksums"
            return
        listed = {file.name: file for tensor in self.manifest.tensors for file in tensor.files}
        wanted = self.specs.values() if specs is None else specs
        paths = [path for spec in wanted for path in self.files(spec)]
        check = partial(_full_problem, progress) if full else _sample_problem
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:
            yield from filter(None, pool.map(check, paths, [listed[path.name] for path in paths]))


def _splits(spec: WeightSpec, ranks: int) -> bool:
    try:
        spec.check_divides(ranks)
    except ConfigError:
        return False
    return True


def _full_problem(progress: Callable[[int], None] | None, path: Path, file: ManifestFile) -> str:
    found = file_sha256(path, progress)
    return "" if found == file.sha256 else f"{path} has SHA-256 {found}; {MANIFEST_FILE} says {file.sha256}"


def _sample_problem(path: Path, file: ManifestFile) -> str:
    found = sample_sha256(path) if file.sample else ""
    if found == file.sample:
        return ""
    return (
        f"{path} is not the file that was converted: the SHA-256 of its samples is {found}; {MANIFEST_FILE} "
        f"says {file.sample} (both of {path.stat().st_size:,} bytes)"
    )
