"""manifest.json: records what the converter wrote, and checks that a weight directory still matches it.

Every load runs the checks that read no weights; the sampled digest reads 0.4 % of the bytes. No torch.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tridecode.backend.base.errors import ConfigError, WeightFileError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models.config_ini import read_ini
from tridecode.backend.weights.layout import WeightSpec

MANIFEST_FILE = "manifest.json"
#: journal of an unfinished conversion; the converter removes it when manifest.json is written
JOURNAL_FILE = "conversion.journal"
#: changes with the meaning of manifest.json
MANIFEST_FORMAT = "tridecode-weights-1"
#: prompt-learning tables may be stored next to a model's tensors
PROMPT_TABLES = "model.prompt_table."

_MAX_BYTES = 64 << 20  # of manifest.json; 4 MB for 176B parameters over 8 ranks
_MAX_RANKS = 1024
_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "uint8": 1, "fp8": 1, "int32": 4}
_SAMPLE_BYTES = 4096
_SAMPLE_EVERY = 1 << 20
#: keys of config.ini that only clients see (names, tokens, tasks) and that change no tensor
_FREE_KEYS = (
    "model_name",
    "start_id",
    "end_id",
    "end_ids",
    "num_tasks",
    "prompt_learning_start_id",
    "prompt_learning_type",
)


class ManifestFile(msgspec.Struct, frozen=True):
    """One file: its name within the directory, its length, and digests of its bytes in hexadecimal.

    sha256: of all bytes. sample: see SampleDigest; empty in manifests of older versions.
    """

    name: str
    bytes: int
    sha256: str
    sample: str = ""


class ManifestTensor(msgspec.Struct, frozen=True):
    """One tensor as its WeightSpec has it, and its files in rank order.

    zeros: for a matrix of a layer, how many weights of its files are 0; two_of_four: whether at most two of
    every four consecutive inputs are nonzero. 0 and false in manifests of older versions.
    """

    name: str
    shape: list[int]
    dtype: str
    axis: int | None
    sections: list[int]
    files: list[ManifestFile]
    zeros: int = 0
    two_of_four: bool = False


class Manifest(msgspec.Struct, frozen=True):
    """manifest.json: what the converter wrote. Directories of FasterTransformer's converters have none.

    config: the values of config.ini by section and key; empty in manifests of older versions.
    weight_sparsity: the share of zeros among the weights of all matrices of layers, in [0, 1].
    sparsity_pattern: "2:4" if each of these matrices is 2:4 sparse; else "".
    source: a digest of the checkpoint's files (converters/convert.py); empty if it is not known.
    """

    format: str
    family: str
    tensor_para_size: int
    dtype: str
    tensors: list[ManifestTensor]
    config: dict[str, dict[str, str]] = {}
    weight_sparsity: float = 0.0
    sparsity_pattern: str = ""
    source: str = ""


class SampleDigest:
    """SHA-256 of 4 KiB at every multiple of 1 MiB, of the last 4 KiB and of the length (8 bytes, little
    end first).

    It detects a file that was truncated, swapped or partly written, without reading all of it. The writer
    feeds all bytes in order; sample_sha256 reads only the samples.
    """

    def __init__(self) -> None:
        self._digest, self._length, self._tail = hashlib.sha256(), 0, b""

    def update(self, data: memoryview) -> None:
        first = -(-self._length // _SAMPLE_EVERY) * _SAMPLE_EVERY
        if self._length % _SAMPLE_EVERY < _SAMPLE_BYTES:  # the last sample was incomplete
            first = self._length // _SAMPLE_EVERY * _SAMPLE_EVERY
        for start in range(first, self._length + len(data), _SAMPLE_EVERY):
            self._digest.update(
                data[max(start - self._length, 0) : max(start + _SAMPLE_BYTES - self._length, 0)]
            )
        self._length += len(data)
        self._tail = (self._tail + bytes(data[-_SAMPLE_BYTES:]))[-_SAMPLE_BYTES:]

    def hexdigest(self) -> str:
        self._digest.update(self._tail)
        self._digest.update(struct.pack("<Q", self._length))
        return self._digest.hexdigest()


def sample_sha256(path: Path) -> str:
    """The SampleDigest of a file in hexadecimal."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        length = os.fstat(descriptor).st_size
        for start in [*range(0, length, _SAMPLE_EVERY), max(length - _SAMPLE_BYTES, 0)]:
            digest.update(os.pread(descriptor, _SAMPLE_BYTES, start))
    finally:
        os.close(descriptor)
    digest.update(struct.pack("<Q", length))
    return digest.hexdigest()


def file_kind(status: os.stat_result) -> str:
    """The kind of a file in words; empty for a regular one."""
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = stat.S_IFMT(status.st_mode)
    return "" if kind == stat.S_IFREG else kinds.get(kind, "a device")


def read_manifest(directory: Path) -> Manifest | None:
    """manifest.json of a directory, or None if it has none.

    Raises WeightFileError if it is damaged, or if a conversion into the directory has not ended.
    """
    path = Path(directory) / MANIFEST_FILE
    try:
        status = path.stat()
    except OSError:
        if path.is_symlink():
            raise WeightFileError(f"{path} is a link to a file that is missing") from None
        if (path.parent / JOURNAL_FILE).exists():
            raise WeightFileError(
                f"{path} is missing: the conversion into {path.parent} has not ended ({JOURNAL_FILE}); run "
                f"the same conversion again, which continues where it stopped"
            ) from None
        return None
    if kind := file_kind(status):
        raise WeightFileError(f"{path} is {kind}; wanted a regular file")
    if status.st_size > _MAX_BYTES:
        raise WeightFileError(f"{path} holds {status.st_size:,} bytes; wanted at most {_MAX_BYTES:,}")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightFileError(f"{path} is not a valid manifest: {error}") from None
    if manifest.format != MANIFEST_FORMAT:
        raise WeightFileError(
            f"{path} has format {manifest.format!r}; this version reads {MANIFEST_FORMAT!r}"
        )
    if not 1 <= manifest.tensor_para_size <= _MAX_RANKS:
        raise WeightFileError(
            f"{path} has tensor_para_size {manifest.tensor_para_size}; wanted 1 to {_MAX_RANKS}"
        )
    return manifest


def config_values(directory: Path) -> dict[str, dict[str, str]]:
    """Return a directory's config.ini by section and key, as stored in the manifest. Raises ConfigError."""
    sections = read_ini(Path(directory) / "config.ini").values()
    return {
        section.name: {key: value.strip() for key, value in section.items.items()} for section in sections
    }


def check_manifest(
    manifest: Manifest, directory: Path, config: ModelConfig, specs: Iterable[WeightSpec]
) -> None:
    """Raise WeightFileError if the manifest does not describe the model of config.ini. No weight file is
    read.

    specs: those of `config`.
    """
    path = directory / MANIFEST_FILE
    for key, listed, found in (
        ("family", manifest.family, config.family),
        ("dtype", manifest.dtype, config.weight_dtype),
    ):
        if listed != found:
            raise WeightFileError(f"{path} is of {key} {listed}; {directory / 'config.ini'} says {found}")
    for problem in _config_problems(manifest, directory):
        raise WeightFileError(problem)
    by_name = {spec.name: spec for spec in specs}
    try:
        for problem in _tensor_problems(manifest, directory, by_name):
            raise WeightFileError(f"{path} {problem}")
    except ConfigError as error:
        raise WeightFileError(f"{path} is of {manifest.tensor_para_size} ranks, but {error}") from None


def free_edits(manifest: Manifest, directory: Path) -> list[str]:
    """Describe edits of config.ini since the conversion that change no tensor, as in "[gpt] end_id is 7 (was
    2)".

    These are edits of _FREE_KEYS and of prompt-learning tasks; check_manifest refuses all others.
    """
    found, edits = config_values(directory), []
    for name in sorted({*manifest.config, *found}):
        old, new = manifest.config.get(name, {}), found.get(name, {})
        keys = {*old, *new} if name.lower().startswith("task_") else {*old, *new} & set(_FREE_KEYS)
        for key in sorted(keys):
            before, after = old.get(key, "nothing"), new.get(key, "nothing")
            if before != after:
                edits.append(f"[{name}] {key} is {after} (was {before})")
    return edits


def _config_problems(manifest: Manifest, directory: Path) -> Iterator[str]:
    if not manifest.config or not (directory / "config.ini").exists():
        return
    hint = "restore it, or convert the checkpoint again"
    found = config_values(directory)
    for name, values in manifest.config.items():
        if name.lower().startswith("task_"):
            continue  # prompt-learning tasks may be added and removed
        for key in sorted({*values, *found.get(name, {})} - set(_FREE_KEYS)):
            old, new = (side.get(name, {}).get(key, "nothing") for side in (manifest.config, found))
            if old != new:
                where = f"{directory / 'config.ini'}: [{name}] {key}"
                yield f"{where} is {new}; the weights were converted with {old} ({MANIFEST_FILE}); {hint}"


def _tensor_problems(manifest: Manifest, directory: Path, specs: dict[str, WeightSpec]) -> Iterator[str]:
    seen: set[str] = set()
    for tensor in manifest.tensors:
        if tensor.name in seen:
            yield f"lists {tensor.name} twice"
        seen.add(tensor.name)
        spec = specs.get(tensor.name)
        if spec is None:
            if tensor.name.startswith(PROMPT_TABLES):
                continue
            gone = [
                file.name for file in tensor.files if not (directory / os.path.basename(file.name)).exists()
            ]
            why = f"{directory / gone[0]} is missing" if gone else "config.ini describes a model without it"
            yield f"lists {tensor.name[:200]!r}, but {why}"
            continue
        held = (tuple(tensor.shape), tensor.axis, tuple(tensor.sections))
        wanted = (spec.shape, spec.axis, spec.sections)
        if held != wanted:
            yield f"has {_split(tensor.name, *held)}; config.ini wants {_split(tensor.name, *wanted)}"
            continue
        dtype = spec.dtype or manifest.dtype
        if tensor.dtype != dtype:
            yield f"says that {tensor.name} is {tensor.dtype[:20]!r}; config.ini wants {dtype}"
            continue
        names = [spec.file_name(rank) for rank in range(spec.num_files(manifest.tensor_para_size))]
        listed = [file.name for file in tensor.files]
        if listed != names:
            odd = next((name for name in listed if name not in names), f"{len(listed)} files")
            yield f"lists {odd[:200]!r} for {tensor.name}; wanted {', '.join(names[:3])}"
            continue
        wanted_bytes = math.prod(spec.file_shape(manifest.tensor_para_size)) * _ITEM_BYTES[dtype]
        for file in tensor.files:
            if file.bytes != wanted_bytes:
                yield f"says that {file.name} has {file.bytes:,} bytes; its shape needs {wanted_bytes:,}"
    for name in specs:
        if name not in seen:
            yield f"does not list {name}, which config.ini wants"


def _split(name: str, shape: tuple[int, ...], axis: int | None, sections: tuple[int, ...]) -> str:
    parts = f" in parts of {sections}" if sections else ""
    return f"{name} {shape}" + ("" if axis is None else f" split along axis {axis}{parts}")
