"""The target of a drafter: its engine in this process, its embedding and head, its tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tridecode.backend import models
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.resolved_settings import choose_device
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.models import read_model_config
from tridecode.backend.weights.manifest import read_manifest
from tridecode.backend.weights.reader import WeightReader
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.model_source import find_model
from tridecode.converters.sources import Checkpoint
from tridecode.converters.tokenizers.files import has_tokenizer, load_tokenizer, save_tokenizer
from tridecode.model_repo_templates.repository import TOKENIZER_DIR
from tridecode.tools.evaluate.in_process import ENGINE, repository_engine

#: maximum sequences that the engine decodes together
_SEQUENCES = {"cpu": 32, "cuda": 256}
#: share of a GPU's memory for the engine and its cache; training uses the rest
_MEMORY_FRACTION = 0.5


@dataclass(frozen=True)
class Target:
    """The model for which a drafter is trained.

    weights: its weight directory. config: its shape. digest: of the checkpoint that it was converted from;
    "": unknown. tokenizer: folder of its tokenizer, if any. settings: of its engine. checkpoint: None if the
    target was given as converted weights.
    """

    weights: Path
    config: ModelConfig
    digest: str
    tokenizer: Path | None
    settings: EngineConfig
    checkpoint: Checkpoint | None = None

    @property
    def device(self) -> torch.device:
        return choose_device(self.settings)

    def engine(self, longest: int) -> OfflineEngine:
        """Return a new engine for sequences of at most `longest` tokens."""
        kind = self.device.type
        slots, step = _SEQUENCES[kind], max(512 if kind == "cpu" else 8192, _SEQUENCES[kind])
        sizes: dict[str, Any] = {
            "max_sequences": slots,
            "max_sequence_tokens": longest,
            "max_step_tokens": step,
        }
        return OfflineEngine.load(self.weights, replace(self.settings, **sizes))

    def matrix(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the weight files, such as model.wte (V, C), on the CPU."""
        config = self.config
        specs = {spec.name: spec for spec in models.family(config.family).weight_specs(config)}
        return WeightReader(self.weights, config).copy(specs[name], 0, 1, dtype)

    def head(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the head's matrix (V, C) and its bias (V,), if it has one."""
        config = self.config
        matrix = self.matrix("model.wte" if config.tied_head else "model.lm_head.weight", dtype)
        return matrix, self.matrix("model.lm_head.bias", dtype) if config.head_bias else None


@contextmanager
def open_target(model: str, device: str, longest: int) -> Iterator[Target]:
    """Open a repository that build-repo made, a weight directory, or a checkpoint, which is converted into a
    temporary folder first.

    longest: tokens of its sequences. Raises CheckpointError, ConfigError or UnsupportedError.
    """
    path = find_model(model)
    with tempfile.TemporaryDirectory(prefix="train-draft-") as folder:
        tokenizer: Path | None = None
        checkpoint: Checkpoint | None = None
        if (path / ENGINE).is_dir():
            weights, settings = repository_engine(path)
            tokenizer = path / TOKENIZER_DIR
        elif (path / "config.ini").is_file():
            weights, settings = path, EngineConfig(data_type=read_model_config(path).weight_dtype)
        else:
            checkpoint = open_checkpoint(path)
            weights, settings, tokenizer = _converted(checkpoint, Path(folder), device)
        if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
            tokenizer = None
        config, manifest = read_model_config(weights), read_manifest(weights)
        if longest > config.max_positions:
            raise ConfigError(
                f"texts of {longest:,} tokens; {path} has {config.max_positions:,} positions (--text-tokens)"
            )
        settings = replace(
            settings, device=device, speculation="off", prefix_cache=False, lora_path="none", cache_bytes=None
        )
        settings = replace(settings, memory_fraction=_MEMORY_FRACTION, max_queued_requests=1 << 20)
        digest = manifest.source if manifest is not None else ""
        yield Target(weights, config, digest, tokenizer, settings, checkpoint)


def _converted(checkpoint: Checkpoint, folder: Path, device: str) -> tuple[Path, EngineConfig, Path | None]:
    """Convert a checkpoint: to its own dtype for a GPU, to fp32 for a CPU."""
    on_cpu = choose_device(EngineConfig(device=device)).type == "cpu"
    planned = plan_conversion(checkpoint, "fp32" if on_cpu else None)
    weights, tokenizer = folder / "weights", None
    planned.write(weights)
    if has_tokenizer(checkpoint):
        tokenizer = folder / "tokenizer"
        save_tokenizer(load_tokenizer(checkpoint), checkpoint.tokenizer_dir, tokenizer)
    settings = EngineConfig(data_type=planned.config.weight_dtype, verify_weights="sizes")
    return weights, settings, tokenizer
