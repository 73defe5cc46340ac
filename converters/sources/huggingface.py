"""Checkpoints in Hugging Face's layout: a directory, or a repository of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_gguf_pytorch_utils as transformers_gguf
from torch.nn import Module
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from tridecode.backend.base.checkpoint_files import read_json
from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.families import family_of
from tridecode.converters.pruning.config import uniform_config
from tridecode.converters.sources import Checkpoint, TensorSource
from tridecode.converters.sources.bitmasks import DESCRIPTIONS, BitmaskSource, has_bitmasks
from tridecode.converters.sources.quantized import QuantizedSource, quantization_of
from tridecode.converters.sources.runtime_scales import WithoutRuntimeScales
from tridecode.converters.sources.tensor_files import check_dtypes, tensor_files

_MAX_COUNT = 10_000  # limit of the numbers of layers and of classifier labels
_MAX_END_IDS = 1000


def open_directory(path: Path) -> Checkpoint:
    """Open a directory with config.json without reading tensors. Raises CheckpointError or
    UnsupportedError."""
    raw = read_json(path / "config.json")
    _check_counts(raw, path / "config.json")
    family = family_of(raw.get("model_type"), path / "config.json")
    quantization = quantization_of(raw, path / "config.json")
    is_container = quantization is None and has_bitmasks(raw, path / "config.json")
    settings = uniform_config({key: value for key, value in raw.items() if key not in DESCRIPTIONS})
    if family.config_class is not None:
        config = _config_of(family.config_class, settings, path)
    elif settings != raw:
        config = _config_of(CONFIG_MAPPING[str(raw["model_type"])], settings, path)
    else:
        config = transformers_config(path)
    generation = path / "generation_config.json"
    ids = read_json(generation) if generation.exists() else {}
    where = generation if generation.exists() else path / "config.json"
    eos = _token_ids(ids.get("eos_token_id", config.eos_token_id), "eos_token_id", where)
    bos = _token_ids(ids.get("bos_token_id", config.bos_token_id), "bos_token_id", where)
    stored = WithoutRuntimeScales(tensor_files(path))
    tensors: TensorSource = stored
    notes: list[str] = []
    if is_container:
        tensors = BitmaskSource(stored, path)
    elif quantization is not None:
        method, unknown = quantization
        tensors = QuantizedSource(stored, path, method, str(raw["model_type"]))
        notes = tensors.notes + [
            f"settings of the quantisation that are not read: {', '.join(unknown)}"
        ] * bool(unknown)
    check_dtypes(tensors, path)
    checkpoint = Checkpoint(
        path, config, tensors, bos[0] if bos else None, eos, tokenizer_dir=path, notes=notes + stored.notes
    )
    is_described = any(raw.get(key) for key in DESCRIPTIONS)
    checkpoint.fills_reference = is_described or bool(stored.left_out)
    if family.reference is not None:
        checkpoint.reference = partial(family.reference, checkpoint)
    elif family.config_class is None:
        softcap = getattr(config, "attn_logit_softcapping", None)
        checkpoint.reference = partial(_transformers_model, path, "eager" if softcap else None)
    return checkpoint


def _transformers_model(path: Path, attention: str | None, dtype: torch.dtype) -> Module:
    """Load transformers' model.

    attention: implementation of attention; None: the default, which ignores soft-capping of scores in some
    versions before 5.21.
    """
    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, local_files_only=True, trust_remote_code=False
        ).eval()


def _check_counts(raw: dict[str, Any], where: Path) -> None:
    """Raise CheckpointError for an implausibly large count that transformers would expand to a list or
    dict.
    """
    for key, value in raw.items():
        if isinstance(value, int) and ("layer" in key or key == "num_labels") and value > _MAX_COUNT:
            raise CheckpointError(f"{where} has {key} = {str(value)[:40]}; wanted at most {_MAX_COUNT:,}")
        if isinstance(value, dict) and key.endswith("_config"):
            _check_counts(value, where)


def _token_ids(ids: Any, key: str, where: Path) -> list[int]:
    found: list[Any] = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if len(found) > _MAX_END_IDS:
        raise CheckpointError(f"{where}: {key} has {len(found):,} ids; wanted at most {_MAX_END_IDS:,}")
    if not all(isinstance(token, int) and -1 <= token < 1 << 31 for token in found):
        raise CheckpointError(f"{where}: {key} is {str(ids)[:80]}; wanted token ids")
    return found


def transformers_config(path: Path, **kwargs) -> PreTrainedConfig:
    """Return transformers' config of a directory. CheckpointError if it cannot be read."""
    try:
        with no_progress_bars():
            return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False, **kwargs)
    except Exception as error:  # transformers raises errors of its own and of huggingface_hub
        reason = " ".join(str(error).split())
        raise CheckpointError(f"transformers cannot read the config of {path}: {reason}") from None


def _config_of(config_class: type[PreTrainedConfig], raw: dict[str, Any], path: Path) -> PreTrainedConfig:
    """Return the config of a model type unknown to transformers, without its references to code."""
    settings = {key: value for key, value in raw.items() if key not in ("auto_map", "model_type")}
    try:
        return config_class.from_dict(settings)
    except Exception as error:  # as in transformers_config
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path / 'config.json'} does not describe a model: {reason}") from None


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which write carriage returns into logs; the command has a
    spinner."""
    shown, bar = transformers_logging.is_progress_bar_enabled(), transformers_gguf.tqdm
    transformers_logging.disable_progress_bar()
    transformers_gguf.tqdm = lambda items, **_options: items
    try:
        yield
    finally:
        transformers_gguf.tqdm = bar
        if shown:
            transformers_logging.enable_progress_bar()
