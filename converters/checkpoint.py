"""Source checkpoints: a directory in Hugging Face's layout, a .gguf file, or a repository's id on the hub.

All give the same: transformers' config, and tensors under transformers' names that are read one at a time, so
that a checkpoint is never held in memory as a whole.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import gguf
import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tridecode.backend.errors import CheckpointError, UnsupportedError
from tridecode.converters.families import family_of

_HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # beside the weights
_HUB_WEIGHTS = ["*.safetensors"], ["*.bin"]  # the second where there is none of the first


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
            except (
                Exception
            ) as error:  # safetensors raises its own type, OSError and others for a damaged file
                raise CheckpointError(f"{path} is no readable safetensors file: {error}") from None
            for name in file.keys():  # noqa: SIM118  safe_open is no mapping
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
        try:
            try:
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # written before torch 1.6: no zip file, cannot be mapped
                state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be loaded as plain tensors: {error}") from None
        if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
            raise CheckpointError(
                f"{path} holds a {type(state).__name__}; wanted a dict of tensors (a state dict)"
            )
        return state

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


#: llama.cpp's tensor names -> transformers', for the architecture `llama`
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}
_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource:
    """A LLaMA in llama.cpp's format: each tensor is dequantised when it is read, as float32.

    llama.cpp stores the rows of the query and key matrices in the order of its own rotary embedding (pairs of
    neighbours); `read` puts them back into transformers' (halves).
    """

    def __init__(self, reader: gguf.GGUFReader, num_heads: int, num_kv_heads: int):
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads}
        self._tensors = {_gguf_name(tensor.name): tensor for tensor in reader.tensors}
        self.shapes = {
            name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }

    def dtype(self, name: str) -> torch.dtype:
        """Of a quantised tensor: float16, the dtype of its scales."""
        return _GGUF_DTYPES.get(self._tensors[name].tensor_type.name, torch.float16)

    def read(self, name: str) -> Tensor:
        held = self._tensors[name]
        tensor = torch.from_numpy(gguf.dequantize(held.data, held.tensor_type).copy()).reshape(
            self.shapes[name]
        )
        for projection, heads in self._heads.items():
            if f".self_attn.{projection}." in name:
                rows = tensor.reshape(heads, -1, 2, *tensor.shape[1:])  # (H, D/2, 2, C)
                return rows.transpose(1, 2).reshape(tensor.shape)
        return tensor


def _gguf_name(name: str) -> str:
    """transformers' name of a tensor, or the name as it is where there is none: no rule will consume it."""
    stem, _, kind = name.rpartition(".")
    match = re.match(r"blk\.(\d+)\.", stem)
    pattern = stem if match is None else stem.replace(match.group(0), "blk.{i}.", 1)
    renamed = _GGUF_NAMES.get(pattern)
    return name if renamed is None else f"{renamed.replace('{i}', match.group(1) if match else '')}.{kind}"


@dataclass
class Checkpoint:
    """A source model. path: its directory or .gguf. Its ids: generation_config.json's, else the config's."""

    path: Path
    config: PreTrainedConfig
    tensors: TensorSource
    bos_id: int | None
    eos_ids: list[int]
    gguf_fields: dict[str, object] = field(default_factory=dict)  # scalar metadata of a .gguf

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    @property
    def name(self) -> str:
        """A short name for people: of the folder or file."""
        return self.path.stem if self.is_gguf else self.path.resolve().name

    def reference_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """transformers' own model of this checkpoint, in evaluation mode on the CPU."""
        if not self.is_gguf:
            return AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype, local_files_only=True).eval()
        # a plain model: one that from_pretrained reads from .gguf wants accelerate and cannot be saved
        model = AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        state = load_gguf_checkpoint(str(self.path), return_tensors=True, model_to_load=model)["tensors"]
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
                f"{path} is a file, but no .gguf; wanted a checkpoint's directory or a .gguf file"
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


def _download(repository: str) -> Path:
    try:
        for weights in _HUB_WEIGHTS:
            path = Path(snapshot_download(repository, allow_patterns=[*_HUB_FILES, *weights]))
            if any(path.glob(weights[0])):
                break
        return path
    except (
        Exception
    ) as error:  # the hub's client raises types of four libraries: offline, unknown, gated, misspelt
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{repository!r} is not a directory, not a .gguf, and the hub could not be reached or "
            f"does not have it: {reason}"
        ) from None


def _open_directory(path: Path) -> Checkpoint:
    raw = _read_json(path / "config.json")
    family_of(raw.get("model_type"), path / "config.json")
    method = (raw.get("quantization_config") or {}).get("quant_method")
    if method:
        raise UnsupportedError(
            f"{path}/config.json says quantised by {method}; convert the unquantised checkpoint"
        )
    config = _transformers_config(path)
    generation = (
        _read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    )
    eos = generation.get("eos_token_id", config.eos_token_id)
    bos = generation.get("bos_token_id", config.bos_token_id)
    return Checkpoint(path, config, _tensor_files(path), bos, _as_list(eos))


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from None


def _transformers_config(path: Path, **kwargs) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, **kwargs)
    except Exception as error:  # transformers checks configs with errors of its own and of huggingface_hub
        reason = " ".join(str(error).split())
        raise CheckpointError(f"transformers cannot read the config of {path}: {reason}") from None


def _tensor_files(path: Path) -> TensorSource:
    """The weights, in transformers' order of preference."""
    for stem, source in (("model.safetensors", SafetensorsSource), ("pytorch_model.bin", PickleSource)):
        if (path / stem).is_file():
            return source([path / stem])
        index = path / f"{stem}.index.json"
        if index.is_file():
            files = sorted(set(_read_json(index)["weight_map"].values()))
            missing = [name for name in files if not (path / name).is_file()]
            if missing:
                raise CheckpointError(f"{path / missing[0]} is missing; {index.name} lists it")
            return source([path / name for name in files])
    raise CheckpointError(
        f"{path} has no weights; wanted model.safetensors, model.safetensors.index.json, pytorch_model.bin "
        "or pytorch_model.bin.index.json"
    )


def _open_gguf(path: Path) -> Checkpoint:
    reader = gguf.GGUFReader(path)
    fields = {
        name: held.contents()
        for name, held in reader.fields.items()
        if held.types[:1] != [gguf.GGUFValueType.ARRAY]
    }
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedError(f"{path} has the GGUF architecture {architecture!r}; this version reads llama")
    names = {tensor.name for tensor in reader.tensors}
    scaling = fields.get("llama.rope.scaling.type", "none")
    if "rope_freqs.weight" in names or scaling != "none":
        # transformers' reader drops both: long prompts would silently be answered by another model
        what = "rope_freqs.weight" if "rope_freqs.weight" in names else f"llama.rope.scaling.type = {scaling}"
        raise UnsupportedError(
            f"{path} has {what}: its rope scaling would be lost; convert the safetensors checkpoint"
        )
    config = _transformers_config(path.parent, gguf_file=path.name)
    end_ids = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    return Checkpoint(
        path,
        config,
        GgufSource(reader, config.num_attention_heads, config.num_key_value_heads),
        fields.get("tokenizer.ggml.bos_token_id"),
        list(dict.fromkeys(int(token) for token in end_ids if token is not None)),
        fields,
    )
