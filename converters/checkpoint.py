"""Source checkpoints: a directory in Hugging Face's layout, a .gguf file, or a repository's id on the hub.

All have transformers' config and tensors by transformers' names. Tensors are read one at a time: memory never
holds a whole checkpoint.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import gguf
import torch
import transformers.modeling_gguf_pytorch_utils as transformers_gguf
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from tridecode.backend.errors import CheckpointError, UnsupportedError
from tridecode.converters.families import CheckpointFamily, family_of, gguf_family
from tridecode.converters.files import member, read_json, require_file

_HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # beside the weights
_HUB_WEIGHTS = ["*.safetensors"], ["*.bin"]  # the second if there are none of the first


class TensorSource(Protocol):
    """Tensors by transformers' names; `shapes` is known before any is read."""

    shapes: dict[str, tuple[int, ...]]

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> Tensor: ...


class SafetensorsSource:
    """One .safetensors file or the shards of one checkpoint, memory-mapped."""

    def __init__(self, files: list[Path]):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files = {}
        for path in files:
            try:
                file = safe_open(str(path), framework="pt", device="cpu")
            except Exception as error:  # safetensors raises its own type, OSError and others
                found = _foreign_format(path) or error
                raise CheckpointError(f"{path} is not a readable safetensors file: {found}") from None
            for name in file.keys():  # noqa: SIM118  safe_open is not a mapping
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
                self._files[name] = file

    def dtype(self, name: str) -> torch.dtype:
        # of one element: get_slice names the dtype only in safetensors' own spelling
        return self._files[name].get_slice(name)[:1].dtype

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)


class PickleSource:
    """One pytorch_model.bin or its shards, memory-mapped where torch can; code in them is never run."""

    def __init__(self, files: list[Path]):
        self._tensors: dict[str, Tensor] = {}
        for path in files:
            self._tensors.update(self._load(path))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    @staticmethod
    def _load(path: Path) -> dict[str, Tensor]:
        _check_archive(path)
        try:
            try:
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # written before torch 1.6: not a zip file, cannot be mapped
                state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            found = _foreign_format(path) or _pickle_fault(error)
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


def _check_archive(path: Path) -> None:
    """CheckpointError for a zip that would grow when it is read: torch stores its records uncompressed."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path} is not a readable zip file: {error}") from None
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            found = (
                f"{record.filename} is compressed ({record.compress_size:,} of {record.file_size:,} bytes)"
            )
            raise CheckpointError(f"{path}: {found}; torch.save stores tensors uncompressed")
    total, size = sum(record.file_size for record in records), path.stat().st_size
    if total > size:
        raise CheckpointError(f"{path} holds {size:,} bytes; its records have {total:,}: they overlap")


def _pickle_fault(error: Exception) -> str:
    """torch's finding in one line; its own texts are paragraphs of advice."""
    text = " ".join(str(error).split())
    name = re.search(r"GLOBAL (\S+)", text)
    if name:
        return f"it holds the Python object {name.group(1)}, and code is never run; wanted tensors only"
    fault = re.search(r"WeightsUnpickler error: (.*?)(?: Check the documentation|$)", text)
    if fault:
        return f"its pickle holds more than tensors ({fault.group(1)})"
    if isinstance(error, (LookupError, ValueError, EOFError, struct.error)):  # of the unpickler's own reading
        return f"its pickle is damaged, or it is not a pickle ({type(error).__name__})"
    return f"{type(error).__name__}: {text}"


_MAGIC = {
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself (git lfs pull)",
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a zip file, as torch.save writes it",
    b"\x89HDF": "an HDF5 file (TensorFlow, Keras)",
    b"<!DOCTYPE": "an HTML page",
    b"<html": "an HTML page",
}


def _foreign_format(path: Path) -> str:
    """The format of a file by its first bytes, if its name says another; else ""."""
    expected = {".gguf": b"GGUF", ".bin": b"PK\x03\x04"}.get(path.suffix)
    with open(path, "rb") as file:
        start = file.read(64)
    if not start:
        return "it is empty"
    return next(
        (f"it is {kind}" for magic, kind in _MAGIC.items() if magic != expected and start.startswith(magic)),
        "",
    )


_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource:
    """A checkpoint in llama.cpp's format: a tensor is dequantised to float32 when it is read.

    `read` undoes what llama.cpp's converter changed, by the family's GgufRules.
    """

    def __init__(self, reader: gguf.GGUFReader, family: CheckpointFamily, config: PreTrainedConfig):
        assert family.gguf is not None
        self._rules, self._config = family.gguf, config
        layers = min(config.num_hidden_layers, len(reader.tensors))  # a damaged file may say millions
        names = _gguf_names(family, family.gguf.architecture, config.num_attention_heads, layers)
        self._tensors = {names.get(tensor.name, tensor.name): tensor for tensor in reader.tensors}
        self.shapes = {name: self._shape(tensor) for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Of a quantised tensor: float16, the dtype of its scales."""
        return _GGUF_DTYPES.get(self._tensors[name].tensor_type.name, torch.float16)

    def read(self, name: str) -> Tensor:
        held = self._tensors[name]
        stored = torch.from_numpy(gguf.dequantize(held.data, held.tensor_type).copy())
        stored = stored.reshape([int(n) for n in reversed(held.shape)])
        if held.name.endswith(self._rules.transposed):
            return stored.t()
        return self._rules.restore(held.name, stored, self._config)

    def _shape(self, held: gguf.ReaderTensor) -> tuple[int, ...]:
        sizes = [int(n) for n in held.shape]  # the fastest axis first
        return tuple(sizes if held.name.endswith(self._rules.transposed) else reversed(sizes))


def _gguf_names(family: CheckpointFamily, architecture: str, num_heads: int, layers: int) -> dict[str, str]:
    """llama.cpp's name -> transformers' of every tensor that the rules read, by gguf's own table."""
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(key, layers)
    names = {}
    for rule in (rule.of_layer(layer) for rule in family.rules(num_heads) for layer in range(layers)):
        for source in rule.sources:
            for spelling in (source, source.removeprefix(family.prefix)):
                if found := table.get_name(spelling, (".weight", ".bias")):
                    names[found] = source
    return names


@dataclass
class Checkpoint:
    """A source model. path: its directory or .gguf. Its ids: generation_config.json's, else the config's."""

    path: Path
    config: PreTrainedConfig
    tensors: TensorSource
    bos_id: int | None
    eos_ids: list[int]
    gguf_fields: dict[str, Any] = field(default_factory=dict)  # scalar metadata of a .gguf

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    @property
    def name(self) -> str:
        """A short name for people: of the folder or file."""
        return self.path.stem if self.is_gguf else self.path.resolve().name

    @property
    def has_reference(self) -> bool:
        """Whether there is an independent model to compare with; see CheckpointFamily.reference."""
        family = family_of(self.config.model_type, self.path)
        return family.reference is not None or family.config_class is None

    def reference_model(self, dtype: torch.dtype) -> Module:
        """An independent model of this checkpoint, in evaluation mode on the CPU: the family's, else
        transformers' own. Raises CheckpointError where there is none (has_reference)."""
        family = family_of(self.config.model_type, self.path)
        if family.reference is not None:
            return family.reference(self, dtype)
        if family.config_class is not None:
            raise CheckpointError(
                f"transformers has no class for {self.config.model_type}, nor has {family.source_file}"
            )
        if not self.is_gguf:
            with _no_progress_bars():
                return AutoModelForCausalLM.from_pretrained(
                    self.path, dtype=dtype, local_files_only=True, trust_remote_code=False
                ).eval()
        # a plain model: one that from_pretrained reads from .gguf wants accelerate and cannot be saved
        model = AutoModelForCausalLM.from_config(self.config, dtype=dtype, trust_remote_code=False)
        with _no_progress_bars():
            read = transformers_gguf.load_gguf_checkpoint
            state = read(str(self.path), return_tensors=True, model_to_load=model)["tensors"]
        missing, unexpected = model.load_state_dict(state, strict=False)
        missing = [
            name for name in missing if not (self.config.tie_word_embeddings and name == "lm_head.weight")
        ]
        if missing or unexpected:
            raise CheckpointError(
                f"{self.path}: transformers finds no {missing} and does not know {unexpected}"
            )
        return model.eval()


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a directory, a .gguf file or a hub id, reading no tensor. CheckpointError or UnsupportedError."""
    path = Path(model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path} is a file, but not a .gguf; wanted a checkpoint's directory or a .gguf file"
            )
        return _open_gguf(path)
    if not path.is_dir():
        path = _download(str(model))
    if (path / "config.json").is_file():
        return _open_directory(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0])
    found = f"{len(ggufs)} .gguf files (name one)" if ggufs else "neither config.json nor a .gguf file"
    raise CheckpointError(f"{path} holds {found}; wanted a Hugging Face checkpoint")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers' bars write carriage returns into logs; the command has a spinner of its own."""
    shown, bar = transformers_logging.is_progress_bar_enabled(), transformers_gguf.tqdm
    transformers_logging.disable_progress_bar()
    transformers_gguf.tqdm = lambda items, **_options: items
    try:
        yield
    finally:
        transformers_gguf.tqdm = bar
        if shown:
            transformers_logging.enable_progress_bar()


def _download(repository: str) -> Path:
    try:
        for weights in _HUB_WEIGHTS:
            path = Path(snapshot_download(repository, allow_patterns=[*_HUB_FILES, *weights]))
            if any(path.glob(weights[0])):
                break
        return path
    except Exception as error:  # the hub's client raises types of four libraries
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{repository!r} is not a directory, not a .gguf, and the hub could not be reached or "
            f"does not have it: {reason}"
        ) from None


def _open_directory(path: Path) -> Checkpoint:
    raw = read_json(path / "config.json")
    family = family_of(raw.get("model_type"), path / "config.json")
    quantization = raw.get("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method:
        raise UnsupportedError(
            f"{path}/config.json says quantised by {method}; convert the unquantised checkpoint"
        )
    config = (
        _transformers_config(path)
        if family.config_class is None
        else _config_of(family.config_class, raw, path)
    )
    generation = path / "generation_config.json"
    ids = read_json(generation) if generation.exists() else {}
    where = generation if generation.exists() else path / "config.json"
    eos = _token_ids(ids.get("eos_token_id", config.eos_token_id), "eos_token_id", where)
    bos = _token_ids(ids.get("bos_token_id", config.bos_token_id), "bos_token_id", where)
    return Checkpoint(path, config, _tensor_files(path), bos[0] if bos else None, eos)


def _token_ids(ids: Any, key: str, where: Path) -> list[int]:
    found: list[Any] = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) and -1 <= token < 1 << 31 for token in found):
        raise CheckpointError(f"{where}: {key} is {str(ids)[:80]}; wanted token ids")
    return found


def _transformers_config(path: Path, **kwargs) -> PreTrainedConfig:
    try:
        with _no_progress_bars():
            return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False, **kwargs)
    except Exception as error:  # transformers checks configs with errors of its own and of huggingface_hub
        reason = " ".join(str(error).split())
        raise CheckpointError(f"transformers cannot read the config of {path}: {reason}") from None


def _config_of(config_class: type[PreTrainedConfig], raw: dict[str, Any], path: Path) -> PreTrainedConfig:
    """The config of a model type that transformers does not know. What it says about code is left out."""
    settings = {key: value for key, value in raw.items() if key not in ("auto_map", "model_type")}
    try:
        return config_class.from_dict(settings)
    except Exception as error:  # as in _transformers_config
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path / 'config.json'} does not describe a model: {reason}") from None


def _tensor_files(path: Path) -> TensorSource:
    """The weights, in transformers' order of preference."""
    for stem, source in (("model.safetensors", SafetensorsSource), ("pytorch_model.bin", PickleSource)):
        if (path / stem).exists():
            return source([require_file(path / stem)])
        index = path / f"{stem}.index.json"
        if index.exists():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise CheckpointError(f'{index} has no "weight_map"; wanted the file of each tensor')
            files = {name: member(path, listed[name], index.name) for name in listed}
            return source(sorted(set(files.values())))
    raise CheckpointError(
        f"{path} has no weights; wanted model.safetensors, model.safetensors.index.json, pytorch_model.bin "
        "or pytorch_model.bin.index.json"
    )


def _open_gguf(path: Path) -> Checkpoint:
    reader, fields = _read_gguf(require_file(path))
    family = gguf_family(fields.get("general.architecture"), path)
    scaling_key = f"{fields['general.architecture']}.rope.scaling.type"
    scaled = f"{scaling_key} = {fields[scaling_key]}" if fields.get(scaling_key, "none") != "none" else ""
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        scaled = "rope_freqs.weight"
    if scaled:  # transformers' reader drops both: long prompts would silently be answered by another model
        raise UnsupportedError(
            f"{path} has {scaled}: its rope scaling would be lost; convert the safetensors checkpoint"
        )
    config = _transformers_config(path.parent, gguf_file=path.name)
    assert family.gguf is not None
    family.gguf.complete(config, fields)
    end_ids = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    return Checkpoint(
        path,
        config,
        GgufSource(reader, family, config),
        fields.get("tokenizer.ggml.bos_token_id"),
        list(dict.fromkeys(int(token) for token in end_ids if token is not None)),
        fields,
    )


def _read_gguf(path: Path) -> tuple[gguf.GGUFReader, dict[str, Any]]:
    """The file's reader and its scalar metadata. CheckpointError for a file that is damaged or foreign."""
    try:
        reader = gguf.GGUFReader(path)
        fields = {
            name: held.contents()
            for name, held in reader.fields.items()
            if held.types[:1] != [gguf.GGUFValueType.ARRAY]
        }
    except Exception as error:  # the reader indexes past the end of a short file, and asserts little
        found = (
            _foreign_format(path) or f"it is damaged or cut short at {path.stat().st_size:,} bytes ({error})"
        )
        raise CheckpointError(f"{path} is not a readable GGUF file: {' '.join(found.split())}") from None
    return reader, fields
