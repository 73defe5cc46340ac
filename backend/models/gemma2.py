"""Gemma 2: Gemma with norms around attention and MLP, soft caps of scores and logits, and a sliding window in
every other layer.

Gemma Team 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family, gemma
from tridecode.backend.models.config_ini import IniSection, read_windows, window_keys
from tridecode.backend.models.context import Context, Ranks
from tridecode.backend.models.llama import GATED, llama_fields, llama_keys
from tridecode.backend.models.specs import Layout, norm_specs
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import WeightSpec
from tridecode.kernels.operands import CacheLayer, Heads

LAYOUT = Layout(
    norm_bias=False, up=("gate_proj", "up_proj"), down="down_proj", mlp_norm="pre_feedforward_layernorm"
)
#: norms of the output of attention and MLP, before they are added
OUTER_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_NUMBERS = {
    "query_pre_attn_scalar": "query_scalar",
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "logit_softcap",
}


@dataclass(frozen=True)
class Gemma2Config(ModelConfig):
    """query_scalar: scores are divided by its square root. attention_softcap, logit_softcap: s becomes
    cap * tanh(s / cap); 0: no cap.
    """

    query_scalar: float = 256.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0


def gemma2_fields(section: IniSection, tied_head: bool) -> dict[str, Any]:
    """Return the fields of Gemma2Config except its family."""
    fields = llama_fields(section, tied_head)
    numbers = {field: section.number(key, getattr(Gemma2Config, field)) for key, field in _NUMBERS.items()}
    windows = read_windows(section, fields["num_layers"])
    return {**fields, **numbers, "residual": "sandwich", "windows": windows}


def read(section: IniSection, tied_head: bool) -> Gemma2Config:
    return Gemma2Config(family="gemma2", **gemma2_fields(section, tied_head))


def keys(config: Gemma2Config) -> dict[str, object]:
    numbers = {key: getattr(config, field) for key, field in _NUMBERS.items()}
    return {**llama_keys(config), **numbers, **window_keys(config)}


def weight_specs(config: Gemma2Config) -> list[WeightSpec]:
    return LAYOUT.specs(config) + [
        spec
        for layer in range(config.num_layers)
        for name in OUTER_NORMS
        for spec in norm_specs(f"model.layers.{layer}.{name}", config.hidden_size, False, layer)
    ]


class Model(gemma.Model):
    """Gemma 2 on one rank."""

    layout = LAYOUT
    config: Gemma2Config

    def __init__(self, config: Gemma2Config, weights: Weights, ranks: Ranks, num_positions: int):
        super().__init__(config, weights, ranks, num_positions)
        self.outer_norms = [
            (
                self.load_norm(weights, f"model.layers.{layer}.{OUTER_NORMS[0]}"),
                self.load_norm(weights, f"model.layers.{layer}.{OUTER_NORMS[1]}"),
            )
            for layer in self.stage
        ]

    def stage_heads(self, ranks: Ranks, num_positions: int) -> list[Heads]:
        held, config = super().stage_heads(ranks, num_positions), self.config
        scale, softcap = config.query_scalar**-0.5, config.attention_softcap
        kinds = {id(heads): replace(heads, scale=scale, softcap=softcap) for heads in held}
        return [kinds[id(heads)] for heads in held]

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        self.sandwich(context, x, GATED[self.config.activation], self.outer_norms, caches)

    def logits(self, context: Context, x: Tensor) -> Tensor:
        logits, softcap = super().logits(context, x), self.config.logit_softcap
        if softcap:
            context.ops.soft_cap(logits, softcap)
        return logits


FAMILY = Family(
    "gemma2", "Gemma 2", model_type="Gemma2", read=read, keys=keys, weight_specs=weight_specs, model=Model
)
