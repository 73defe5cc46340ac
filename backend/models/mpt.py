"""MPT: ALiBi, LayerNorm without bias, no biases at all, optionally clipped queries, keys and values. MosaicML
2023.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import (
    IniSection,
    attention_scale_keys,
    read_attention_scale,
    read_common,
)
from tridecode.backend.models.context import Context, Ranks
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.layers import alibi_slopes
from tridecode.backend.models.specs import Layout
from tridecode.backend.models.weights import Weights
from tridecode.kernels.operands import CacheLayer, Heads, Norm

LAYOUT = Layout(norm_bias=False)
ACTIVATION = "gelu"


@dataclass(frozen=True)
class MptConfig(ModelConfig):
    """alibi_bias_max: `largest` of layers.alibi_slopes. qkv_limit: as in kernels.operands.Heads."""

    alibi_bias_max: float = 8.0
    qkv_limit: float = 0.0


def read(section: IniSection, tied_head: bool) -> MptConfig:
    """Section [mpt]: ours, in FasterTransformer's spelling."""
    return MptConfig(
        family="mpt",
        norm_eps=section.number("layernorm_eps", 1e-5),
        activation=ACTIVATION,
        attention_bias=False,
        mlp_bias=False,
        tied_head=tied_head,
        attention_scale=read_attention_scale(section),
        alibi_bias_max=section.number("alibi_bias_max", 8.0),
        qkv_limit=section.number("clip_qkv", 0.0),
        **read_common(section),
    )


def keys(config: MptConfig) -> dict[str, object]:
    return {
        "alibi_bias_max": config.alibi_bias_max,
        "clip_qkv": config.qkv_limit,
        **attention_scale_keys(config),
    }


class Model(Decoder):
    """MPT on one rank."""

    layout = LAYOUT
    config: MptConfig

    def stage_heads(self, ranks: Ranks, num_positions: int) -> list[Heads]:
        config = self.config
        slopes = alibi_slopes(config.num_heads, config.alibi_bias_max).to(self.device)
        return self.layer_heads(ranks, lambda layer: {"slopes": slopes, "qkv_limit": config.qkv_limit})

    def load_norm(self, weights: Weights, name: str) -> Norm:
        return weights.norm(name, self.config.norm_eps, centred=True)

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        self.sequential(context, x, ACTIVATION, caches)


FAMILY = Family("mpt", "MPT", read=read, keys=keys, weight_specs=LAYOUT.specs, model=Model)
