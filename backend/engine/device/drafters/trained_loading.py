"""Reads the one-pass heads of an engine's settings; refuses those that cannot draft for the served model."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.weights.draft_files import (
    FORMAT,
    HEADS,
    DraftInfo,
    TrainedDraft,
    head_shapes,
    open_heads,
    other_target,
    read_info,
    usual_width,
)
from tridecode.backend.weights.manifest import read_manifest

log = logging.getLogger("tridecode.engine")

#: depth of heads with random weights, for benchmarks without a checkpoint
_RANDOM_DEPTH = 4


def heads_info(config: EngineConfig, model: ModelConfig) -> DraftInfo | None:
    """Return the description of the heads; None if the settings want none.

    Raises ConfigError for a folder or a file that is missing, damaged or of another model, and for settings
    with which heads do not work.
    """
    if config.drafter != HEADS:
        return None
    if config.pipeline_para_size > 1:
        raise ConfigError(
            f"parameter speculation is {config.speculation} with pipeline_para_size "
            f"{config.pipeline_para_size}; wanted 1: only the last stage of a pipeline has the hidden states"
        )
    if config.draft_path != "none":
        return read_info(Path(config.draft_path), model, HEADS)
    if config.weights == "random":
        size, width = model.hidden_size, usual_width(model.hidden_size)
        return DraftInfo(FORMAT, HEADS, model.family, size, model.vocab_size, _RANDOM_DEPTH, width)
    raise ConfigError(
        f"parameter speculation is {config.speculation} and draft_path none; wanted the folder that "
        "`tridecode train-draft` wrote"
    )


def load_heads(config: EngineConfig, model: ModelConfig, directory: Path) -> TrainedDraft | None:
    """Return the heads, if the settings want them; log a warning if they are another checkpoint's.

    directory: weights of the served model. Raises ConfigError and WeightFileError.
    """
    info = heads_info(config, model)
    if info is None:
        return None
    if config.draft_path == "none":
        generator = torch.Generator().manual_seed(0)
        shapes = head_shapes(info.hidden_size, info.width, info.depth)
        drawn = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return TrainedDraft(info, drawn)
    manifest = read_manifest(directory) if config.weights == "files" else None
    warning = other_target(info, "" if manifest is None else manifest.source)
    if warning:
        log.warning("draft_path %s: %s", config.draft_path, warning)
    return open_heads(Path(config.draft_path), model)


def shapes_of_heads(config: EngineConfig, model: ModelConfig) -> TrainedDraft | None:
    """Return the heads without data, on torch's meta device, if the settings want them."""
    info = heads_info(config, model)
    if info is None:
        return None
    shapes = head_shapes(info.hidden_size, info.width, info.depth)
    return TrainedDraft(info, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
