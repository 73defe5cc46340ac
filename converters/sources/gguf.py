"""Checkpoints in llama.cpp's format, .gguf."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gguf
import torch
import transformers.modeling_gguf_pytorch_utils as transformers_gguf
from torch import Tensor
from torch.nn import Module
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tridecode.backend.errors import CheckpointError, UnsupportedError
from tridecode.converters.families import CheckpointFamily, gguf_family
from tridecode.converters.files import require_file
from tridecode.converters.gguf_special_tokens import end_ids
from tridecode.converters.gguf_tokenizer import tokenizer_notes
from tridecode.converters.sources import Checkpoint
from tridecode.converters.sources.gguf_metadata import GgufMetadata
from tridecode.converters.sources.huggingface import no_progress_bars, transformers_config
from tridecode.converters.sources.tensor_files import foreign_format

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


def open_gguf(path: Path) -> Checkpoint:
    """A .gguf file; no tensor is read. CheckpointError or UnsupportedError."""
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
    config = transformers_config(path.parent, gguf_file=path.name)
    assert family.gguf is not None
    family.gguf.complete(config, fields)
    return Checkpoint(
        path,
        config,
        GgufSource(reader, family, config),
        fields.get("tokenizer.ggml.bos_token_id"),
        end_ids(fields),
        fields,
        reference=partial(_transformers_model, path, config),
        notes=tokenizer_notes(fields),
    )


def _transformers_model(path: Path, config: PreTrainedConfig, dtype: torch.dtype) -> Module:
    # a plain model: one that from_pretrained reads from .gguf wants accelerate and cannot be saved
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    with no_progress_bars():
        state = transformers_gguf.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(state["tensors"], strict=False)
    missing = [name for name in missing if not (config.tie_word_embeddings and name == "lm_head.weight")]
    if missing or unexpected:
        raise CheckpointError(f"{path}: transformers finds no {missing} and does not know {unexpected}")
    return model.eval()


def _read_gguf(path: Path) -> tuple[gguf.GGUFReader, GgufMetadata]:
    """The file's reader and its metadata. CheckpointError for a file that is damaged or foreign."""
    try:
        reader = gguf.GGUFReader(path)
        fields = GgufMetadata(reader.fields, path)
        for name, held in reader.fields.items():
            if held.types[:1] != [gguf.GGUFValueType.ARRAY]:
                fields[name]
    except Exception as error:  # the reader indexes past the end of a short file, and asserts little
        found = (
            foreign_format(path) or f"it is damaged or cut short at {path.stat().st_size:,} bytes ({error})"
        )
        raise CheckpointError(f"{path} is not a readable GGUF file: {' '.join(found.split())}") from None
    return reader, fields
