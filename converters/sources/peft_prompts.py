"""PEFT's adapters of prompt learning, as save_pretrained writes them: PROMPT_TUNING, P_TUNING, PREFIX_TUNING.

PEFT saves the output of its prompt encoder, so the encoder itself is not needed: (length, C) embeddings, or
(length, layers * 2 * kv heads * D) keys and values, in the order of past_key_values.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from tridecode.backend.base.checkpoint_files import read_json, require_file
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.backend.weights.lora import CONFIG_FILE, PICKLE_FILE, TENSOR_FILE
from tridecode.backend.wire.prompt_learning import P_TUNING, PREFIX_PROMPT
from tridecode.converters.prompts import PromptTable
from tridecode.converters.sources import TensorSource
from tridecode.converters.sources.tensor_files import PickleSource, SafetensorsSource

_KINDS = {"PROMPT_TUNING": P_TUNING, "P_TUNING": P_TUNING, "PREFIX_TUNING": PREFIX_PROMPT}
_TENSOR = "prompt_embeddings"
_MAX_BYTES = 1 << 30
_MAX_CONFIG_BYTES = 1 << 20


def open_peft_prompt(path: Path) -> PromptTable:
    """The table of an adapter's folder; the task has the folder's name. Raises CheckpointError for a file
    that is missing or damaged, UnsupportedError for another kind of adapter.
    """
    config = read_json(path / CONFIG_FILE, _MAX_CONFIG_BYTES)
    kind = _KINDS.get(str(config.get("peft_type")))
    where = path / CONFIG_FILE
    if kind is None:
        raise UnsupportedError(
            f"{where} has peft_type = {str(config.get('peft_type'))[:80]}; wanted {', '.join(_KINDS)}"
        )
    if config.get("num_transformer_submodules") not in (None, 1):
        raise UnsupportedError(f"{where} is of an encoder and a decoder; this version runs decoders")
    source = _tensors(path)
    if set(source.shapes) != {_TENSOR}:
        found = ", ".join(sorted(source.shapes)[:5]) or "nothing"
        raise CheckpointError(f"{path} holds the tensors {found}; wanted {_TENSOR} alone")
    shape = source.shapes[_TENSOR]
    if len(shape) != 2 or shape[0] != config.get("num_virtual_tokens"):
        raise CheckpointError(
            f"{path}: {_TENSOR} is {shape}; its config has num_virtual_tokens = "
            f"{str(config.get('num_virtual_tokens'))[:40]}"
        )
    return PromptTable(path.resolve().name, shape, partial(_read, source), kind)


def _tensors(path: Path) -> TensorSource:
    if (path / TENSOR_FILE).exists():
        return SafetensorsSource([require_file(path / TENSOR_FILE, _MAX_BYTES)])
    return PickleSource([require_file(path / PICKLE_FILE, _MAX_BYTES)])


def _read(source: TensorSource) -> Tensor:
    return source.read(_TENSOR).float()
