"""Qwen3: LLaMA with an RMSNorm of each query and key head before the rotation, and Qwen2's windows.
Yang et al. 2025."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tridecode.backend.config import ModelConfig
from tridecode.backend.models import Family, llama
from tridecode.backend.models.config_ini import IniSection, read_windows, window_keys
from tridecode.backend.models.layers import Ranks, Weights
from tridecode.backend.models.llama import LAYOUT, llama_fields, llama_keys
from tridecode.backend.models.specs import norm_specs
from tridecode.backend.weight_layout import WeightSpec
from tridecode.kernels.ops import Heads


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    fields = llama_fields(section, tied_head)
    return ModelConfig(family="qwen3", **fields, windows=read_windows(section, fields["num_layers"]))


def keys(config: ModelConfig) -> dict[str, object]:
    return {**llama_keys(config), **window_keys(config)}


def head_norm_specs(config: ModelConfig) -> list[WeightSpec]:
    """attention.q_norm and attention.k_norm of each layer: (D,), shared by its heads."""
    return [
        spec
        for layer in range(config.num_layers)
        for name in ("q_norm", "k_norm")
        for spec in norm_specs(f"model.layers.{layer}.attention.{name}", config.head_size, False, layer)
    ]


def weight_specs(config: ModelConfig) -> list[WeightSpec]:
    return LAYOUT.specs(config) + head_norm_specs(config)


def load_head_norms(
    heads: Iterable[Heads], weights: Weights, layers: Iterable[int], eps: float
) -> list[Heads]:
    """`heads` with the norms of their layers."""

    def normed(held: Heads, layer: int) -> Heads:
        prefix = f"model.layers.{layer}.attention"
        query, key = (weights.norm(f"{prefix}.{name}", eps) for name in ("q_norm", "k_norm"))
        return replace(held, query_norm=query, key_norm=key)

    return [normed(held, layer) for held, layer in zip(heads, layers)]


class Model(llama.Model):
    """Qwen3 on one rank."""

    def __init__(self, config: ModelConfig, weights: Weights, ranks: Ranks, num_positions: int):
        super().__init__(config, weights, ranks, num_positions)
        self.heads = load_head_norms(self.heads, weights, self.stage, config.norm_eps)


FAMILY = Family(
    name="qwen3",
    title="Qwen3",
    section="qwen3",
    model_type="Qwen3",
    read=read,
    keys=keys,
    weight_specs=weight_specs,
    model=Model,
)
