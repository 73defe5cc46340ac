"""Qwen3: LLaMA with an RMSNorm of each query and key head before the rotation, and Qwen2's windows.
Yang et al. 2025."""

from __future__ import annotations

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family, llama
from tridecode.backend.models.config_ini import IniSection, read_windows, window_keys
from tridecode.backend.models.context import Ranks
from tridecode.backend.models.llama import LAYOUT, llama_fields, llama_keys
from tridecode.backend.models.specs import head_norm_specs
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import WeightSpec


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    fields = llama_fields(section, tied_head)
    return ModelConfig(family="qwen3", **fields, windows=read_windows(section, fields["num_layers"]))


def keys(config: ModelConfig) -> dict[str, object]:
    return {**llama_keys(config), **window_keys(config)}


def weight_specs(config: ModelConfig) -> list[WeightSpec]:
    return LAYOUT.specs(config) + head_norm_specs(config, bias=False)


class Model(llama.Model):
    """Qwen3 on one rank."""

    def __init__(self, config: ModelConfig, weights: Weights, ranks: Ranks, num_positions: int):
        super().__init__(config, weights, ranks, num_positions)
        self.heads = self.with_head_norms(weights)


FAMILY = Family("qwen3", "Qwen3", read=read, keys=keys, weight_specs=weight_specs, model=Model)
