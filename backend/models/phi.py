"""Phi-1, Phi-1.5, Phi-2: attention and MLP in parallel after one LayerNorm, partial rotary positions, biases
everywhere, also in the head. Li et al. 2023."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import ACTIVATION_NAMES, ACTIVATIONS, IniSection, read_grouped
from tridecode.backend.models.context import Context, Ranks
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.rope_ini import read_rope, rope_keys
from tridecode.backend.models.specs import Layout, head_norm_specs
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import WeightSpec
from tridecode.kernels.operands import CacheLayer

LAYOUT = Layout(mlp_norm="input_layernorm")


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


def keys(config: PhiConfig) -> dict[str, object]:
    return {
        "kv_head_num": config.num_kv_heads,
        "hidden_units": config.hidden_size,
        "activation_type": ACTIVATION_NAMES[config.activation],
        "qk_layernorm": config.head_norms,
        **rope_keys(config),
    }


def weight_specs(config: PhiConfig) -> list[WeightSpec]:
    return LAYOUT.specs(config) + (head_norm_specs(config, bias=True) if config.head_norms else [])


class Model(Decoder):
    """Phi on one rank."""

    layout = LAYOUT
    config: PhiConfig

    def __init__(self, config: PhiConfig, weights: Weights, ranks: Ranks, num_positions: int):
        super().__init__(config, weights, ranks, num_positions)
        if config.head_norms:
            self.heads = self.with_head_norms(weights)

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        self.parallel(context, x, self.config.activation, caches)


FAMILY = Family("phi", "Phi", read=read, keys=keys, weight_specs=weight_specs, model=Model)
