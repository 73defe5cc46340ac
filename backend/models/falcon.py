"""Falcon, Almazrouei et al. 2023.

Rotary embedding or ALiBi; attention and MLP in parallel or in sequence; multi-head, grouped or multi-query
attention. The "new decoder" (40B, 180B) has grouped heads, and separate norms for attention and MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    IniSection,
    read_common,
    read_kv_heads,
)
from tridecode.backend.models.context import Context, Ranks
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.layers import alibi_slopes
from tridecode.backend.models.rope_ini import read_rope, rope_keys
from tridecode.backend.models.specs import Layout
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import WeightSpec
from tridecode.kernels.operands import CacheLayer, Heads, Norm


@dataclass(frozen=True)
class FalconConfig(ModelConfig):
    """mlp_norm: parallel attention and MLP have separate norms, ln_attn and ln_mlp. rope None: ALiBi."""

    mlp_norm: bool = False


def read(section: IniSection, tied_head: bool) -> FalconConfig:
    """Read section [falcon], which is ours, in FasterTransformer's spelling."""
    common = read_common(section)
    common["num_kv_heads"] = read_kv_heads(section, common["num_heads"])
    alibi = section.flag("use_attention_linear_bias", False)
    parallel, biases = section.flag("parallel_attention", True), section.flag("linear_bias", False)
    return FalconConfig(
        family="falcon",
        norm_eps=section.number("layernorm_eps", 1e-5),
        activation=section.choice("activation_type", "gelu_erf", ACTIVATIONS),
        rope=None if alibi else read_rope(section, common["head_size"]),
        residual="parallel" if parallel else "sequential",
        attention_bias=biases,
        mlp_bias=biases,
        tied_head=tied_head,
        mlp_norm=section.flag("has_mlp_layernorm", False),
        **common,
    )


def keys(config: FalconConfig) -> dict[str, object]:
    return {
        "kv_head_num": config.num_kv_heads,
        "activation_type": ACTIVATION_NAMES[config.activation],
        "use_attention_linear_bias": config.rope is None,
        "parallel_attention": config.residual == "parallel",
        "has_mlp_layernorm": config.mlp_norm,
        "linear_bias": config.attention_bias,
        **(rope_keys(config) if config.rope is not None else {}),
    }


def layout(config: FalconConfig) -> Layout:
    if config.residual == "sequential":
        return Layout()
    return Layout(mlp_norm="ln_mlp" if config.mlp_norm else "input_layernorm")


def attention_norm(config: FalconConfig, name: str) -> str:
    """Return the name of attention's norm: ln_attn if there is ln_mlp, else input_layernorm."""
    return name.replace(".input_layernorm", ".ln_attn") if config.mlp_norm else name


def weight_specs(config: FalconConfig) -> list[WeightSpec]:
    return [replace(spec, name=attention_norm(config, spec.name)) for spec in layout(config).specs(config)]


def alibi_bias(num_heads: int, num_positions: int, scale: float) -> Tensor:
    """Return (num_heads, num_positions) float32: Falcon's ALiBi, which transformers rounds to bfloat16 and
    scales like the scores.
    """
    slopes = alibi_slopes(num_heads).bfloat16()[:, None]
    return (slopes * torch.arange(num_positions)).float() * scale


class Model(Decoder):
    """Falcon on one rank."""

    config: FalconConfig

    def __init__(self, config: FalconConfig, weights: Weights, ranks: Ranks, num_positions: int):
        self.layout = layout(config)
        super().__init__(config, weights, ranks, num_positions)

    def stage_heads(self, ranks: Ranks, num_positions: int) -> list[Heads]:
        """Return the heads of each layer.

        ALiBi is rounded as in transformers only in float32: in 16 bit the rounding is as coarse as the
        arithmetic, and the kernels have only slopes.
        """
        config, device = self.config, self.device
        if config.rope is not None:
            return super().stage_heads(ranks, num_positions)
        scale = config.head_size**-0.5
        if self.dtype == torch.float32:
            bias = alibi_bias(config.num_heads, num_positions, scale).to(device)
            return self.layer_heads(ranks, lambda layer: {"key_bias": bias})
        slopes = (alibi_slopes(config.num_heads).bfloat16().float() * scale).to(device)
        return self.layer_heads(ranks, lambda layer: {"slopes": slopes})

    def load_norm(self, weights: Weights, name: str) -> Norm:
        return super().load_norm(weights, attention_norm(self.config, name))

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        residual = self.parallel if self.config.residual == "parallel" else self.sequential
        residual(context, x, self.config.activation, caches)


FAMILY = Family("falcon", "Falcon", read=read, keys=keys, weight_specs=weight_specs, model=Model)
