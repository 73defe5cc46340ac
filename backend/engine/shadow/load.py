"""The reference of shadow runs while an engine is loaded: its weights, and whether they fit."""

from __future__ import annotations

from pathlib import Path

import torch

from tridecode.backend import models
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.host_memory import available_memory
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.loader import DTYPES, FileWeights
from tridecode.backend.engine.shadow.options import (
    check_reference,
    needs_second_weights,
    reference_config,
)
from tridecode.backend.models import read_model_config
from tridecode.backend.weights.reader import WeightReader
from tridecode.kernels.ops import Ops


def open_reference(
    directory: Path, model: ModelConfig, config: EngineConfig, ops: Ops, device: torch.device
) -> FileWeights | None:
    """The weights of the reference, to be closed; None: the engine needs none. config: resolved.

    directory: of the model that is served, whose files int8_mode rounds and the reference takes as they are.
    Raises ConfigError for a reference of another shape, or one that does not fit beside the served model;
    WeightFileError.
    """
    if not config.shadow_share:
        return None
    source = reference_config(model)
    if config.shadow_weights != "none":
        directory = Path(config.shadow_weights)
        source = read_reference(model, directory)
    refuse_without_room(model, config, device)
    if not needs_second_weights(model, config):
        return None
    specs = models.family(model.family).weight_specs(source)
    reader = WeightReader(directory, source)
    if config.shadow_weights != "none":  # else the files are those that have been verified
        reader.verify(config.verify_weights, specs)
    return FileWeights(reader, specs, 0, 1, DTYPES[config.data_type], ops, device)


def read_reference(served: ModelConfig, directory: Path) -> ModelConfig:
    """The model of shadow_weights. Raises ConfigError unless it is `served`, unquantised."""
    if not (directory / "config.ini").is_file():
        raise ConfigError(
            f"parameter shadow_weights names {directory}, without config.ini; wanted a weight directory"
        )
    reference = read_model_config(directory)
    check_reference(served, reference, str(directory))
    return reference


def refuse_without_room(
    model: ModelConfig, config: EngineConfig, device: torch.device, memory: int | None = None
) -> None:
    """Raises ConfigError where the engine and its reference do not fit with one block of the cache.

    memory: bytes that may be used; None: the share of the GPU's free memory, or the host's available memory.
    """
    from tridecode.backend.engine.device import memory as plans  # it runs the engine, which needs this module

    planned, libraries = plans.plan_rank(model, config, 0, 0, device.type), 0
    if device.type == "cuda":
        libraries = plans.LIBRARY_BYTES
    if memory is None and device.type == "cuda":
        memory = int(torch.cuda.mem_get_info(device)[0] * config.memory_fraction)
    elif memory is None:
        memory = available_memory()
    served = planned.fixed - planned.shadow + planned.block + libraries
    if served + planned.shadow > memory:
        raise ConfigError(
            f"parameter shadow_share is {config.shadow_share:g}: the served model needs {served:,} bytes and "
            f"its 16-bit reference {planned.shadow:,} more; {memory:,} may be used. Wanted a smaller model, "
            "more memory, or shadow_share = 0"
        )
