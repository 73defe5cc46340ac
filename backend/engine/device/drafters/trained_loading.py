"""Reads the trained drafter of an engine's settings; refuses one that cannot draft for the served model."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.weights.draft_files import (
    FORMAT,
    GLIDE,
    TRAINED,
    DraftInfo,
    TrainedDraft,
    layer_fields,
    open_trained,
    other_target,
    read_info,
    usual_width,
)
from tridecode.backend.weights.manifest import read_manifest

log = logging.getLogger("tridecode.engine")

#: depth of a drafter with random weights, for benchmarks without a checkpoint
_RANDOM_DEPTH = 4
_RANDOM_SCALE = 0.02  # standard deviation of its matrices
#: why the stages of a pipeline cannot use it
_NEEDS = {GLIDE: "only one stage of a pipeline has the cache that it reads"}
_NEEDS_STATES = "only the last stage of a pipeline has the hidden states"


def trained_info(config: EngineConfig, model: ModelConfig) -> DraftInfo | None:
    """Return the description of the trained drafter; None if the settings want none.

    Raises ConfigError for a folder or a file that is missing, damaged or of another model, and for settings
    with which this kind does not work.
    """
    kind, wanted = config.drafter, f"parameter speculation is {config.speculation}"
    if kind not in TRAINED:
        return None
    if config.pipeline_para_size > 1:
        raise ConfigError(
            f"{wanted} with pipeline_para_size {config.pipeline_para_size}; wanted 1: "
            f"{_NEEDS.get(kind, _NEEDS_STATES)}"
        )
    if kind == GLIDE and model.long_prompt_tokens:
        raise ConfigError(
            f"{wanted}, and the served model rotates long prompts with other factors (longrope); wanted "
            "speculation = off"
        )
    if config.draft_path != "none":
        return read_info(Path(config.draft_path), model, kind)
    if config.weights == "random":
        return _random_info(kind, model)
    raise ConfigError(f"{wanted} and draft_path none; wanted the folder that `tridecode train-draft` wrote")


def load_trained(config: EngineConfig, model: ModelConfig, directory: Path) -> TrainedDraft | None:
    """Return the trained drafter, if the settings want one; log a warning if it is another checkpoint's.

    directory: weights of the served model. Raises ConfigError and WeightFileError.
    """
    info = trained_info(config, model)
    if info is None:
        return None
    if config.draft_path == "none":
        generator = torch.Generator().manual_seed(0)
        drawn = {name: _random(name, shape, generator) for name, shape in info.shapes.items()}
        return TrainedDraft(info, drawn)
    manifest = read_manifest(directory) if config.weights == "files" else None
    warning = other_target(info, "" if manifest is None else manifest.source)
    if warning:
        log.warning("draft_path %s: %s", config.draft_path, warning)
    return open_trained(Path(config.draft_path), model, info.kind)


def shapes_of_trained(config: EngineConfig, model: ModelConfig) -> TrainedDraft | None:
    """Return the drafter without data, on torch's meta device, if the settings want one."""
    info = trained_info(config, model)
    if info is None:
        return None
    shapes = info.shapes.items()
    return TrainedDraft(info, {name: torch.empty(shape, device="meta") for name, shape in shapes})


def _random_info(kind: str, model: ModelConfig) -> DraftInfo:
    size, width = model.hidden_size, usual_width(model.hidden_size)
    info = DraftInfo(FORMAT, kind, model.family, size, model.vocab_size, _RANDOM_DEPTH, width)
    if kind != GLIDE:
        return info
    layer = model.num_layers - 1
    return replace(layer_fields(info, model, layer), width=model.of_layer(layer).mlp_size)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    drawn = _RANDOM_SCALE * torch.randn(shape, generator=generator)
    return drawn + 1 if name.endswith("norm.weight") else drawn
