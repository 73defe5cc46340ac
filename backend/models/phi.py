"""Phi-1, Phi-1.5, Phi-2: attention and MLP in parallel after one LayerNorm, partial rotary positions, biases
everywhere, also in the head. Li et al. 2023."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tridecode.backend.config import ModelConfig
from tridecode.backend.errors import ConfigError
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    IniSection,
    read_common,
    read_rope,
    rope_keys,
)
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.layers import Context, Ranks, Weights
from tridecode.backend.models.specs import Layout, norm_specs
from tridecode.backend.weight_layout import WeightSpec
from tridecode.kernels.ops import CacheLayer, Heads

LAYOUT = Layout(mlp_norm="input_layernorm")
HEAD_NORMS = "q_norm", "k_norm"


@dataclass(frozen=True)
class PhiConfig(ModelConfig):
    """head_norms: a LayerNorm of each query head and one of each key head, shared by the heads of a layer."""

    head_norms: bool = False


def read(section: IniSection, tied_head: bool) -> PhiConfig:
    """Section [phi]: ours, in FasterTransformer's spelling."""
    return PhiConfig(
        family="phi",
        norm_eps=section.number("layernorm_eps", 1e-5),
        activation=section.choice("activation_type", "Gelu", ACTIVATIONS),
        rope=read_rope(section, None),
        residual="parallel",
        tied_head=tied_head,
        head_bias=True,
        head_norms=section.flag("qk_layernorm", False),
        **read_grouped(section),
    )


def read_grouped(section: IniSection) -> dict:
    """read_common, with kv_head_num and hidden_units. Raises ConfigError if heads cannot share their keys."""
    common = read_common(section)
    heads, kv_heads = common["num_heads"], section.integer("kv_head_num", common["num_heads"], minimum=1)
    if heads % kv_heads:
        found = f"[{section.name}] head_num = {heads}, kv_head_num = {kv_heads}"
        raise ConfigError(f"{section.path}: {found}; wanted a head_num that is a multiple of it")
    hidden = section.integer("hidden_units", common["hidden_size"], minimum=1)
    return {**common, "num_kv_heads": kv_heads, "hidden_size": hidden}


def keys(config: PhiConfig) -> dict[str, object]:
    return {
        "kv_head_num": config.num_kv_heads,
        "hidden_units": config.hidden_size,
        "activation_type": ACTIVATION_NAMES[config.activation],
        "qk_layernorm": config.head_norms,
        **rope_keys(config),
    }


def weight_specs(config: PhiConfig) -> list[WeightSpec]:
    layers = range(config.num_layers if config.head_norms else 0)
    return LAYOUT.specs(config) + [
        spec
        for layer in layers
        for name in HEAD_NORMS
        for spec in norm_specs(f"model.layers.{layer}.attention.{name}", config.head_size, True, layer)
    ]


class Model(Decoder):
    """Phi on one rank."""

    layout = LAYOUT
    config: PhiConfig

    def __init__(self, config: PhiConfig, weights: Weights, ranks: Ranks, num_positions: int):
        super().__init__(config, weights, ranks, num_positions)
        if config.head_norms:
            self.heads = self.with_norms(self.heads, weights)

    def with_norms(self, heads: Sequence[Heads], weights: Weights) -> list[Heads]:
        def normed(held: Heads, layer: int) -> Heads:
            prefix = f"model.layers.{layer}.attention"
            query, key = (weights.norm(f"{prefix}.{name}", self.config.norm_eps) for name in HEAD_NORMS)
            return replace(held, query_norm=query, key_norm=key)

        return [normed(held, layer) for held, layer in zip(heads, self.stage)]

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        self.parallel(context, x, self.config.activation, caches)


FAMILY = Family(
    name="phi",
    title="Phi",
    section="phi",
    model_type="Phi",
    read=read,
    keys=keys,
    weight_specs=weight_specs,
    model=Model,
)
