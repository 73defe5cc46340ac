"""LLaMA: rotary positions, RMSNorm, grouped heads, SwiGLU. Touvron et al. 2023; LLaMA-3's rope scaling.

Mistral, Qwen, Phi-3 and Gemma extend it, each in its own file.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import ACTIVATION_NAMES, ACTIVATIONS, IniSection, read_grouped
from tridecode.backend.models.context import Context
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.rope_ini import read_rope, rope_keys
from tridecode.backend.models.specs import Layout
from tridecode.kernels.operands import CacheLayer

LAYOUT = Layout(norm_bias=False, up=("gate_proj", "up_proj"), down="down_proj")
#: ModelConfig.activation -> the gated activation of kernels.ops
GATED = {"silu": "swiglu", "gelu_tanh": "geglu_tanh", "gelu": "geglu"}


def llama_fields(
    section: IniSection, tied_head: bool, attention_bias: bool = False, odd_rotary: bool = False
) -> dict[str, Any]:
    """Return the ModelConfig fields, except family, of a decoder with grouped heads, rotary positions and a
    gated MLP.

    The keys are ours, in FasterTransformer's spelling. attention_bias: default of attn_bias. odd_rotary: as
    in read_rope.
    """
    common = read_grouped(section)
    gates = {key: value for key, value in ACTIVATIONS.items() if value in GATED}
    return {
        "norm_eps": section.number("layernorm_eps", 1e-6),
        "activation": section.choice("activation_type", "silu", gates),
        "rope": read_rope(section, common["head_size"], odd_rotary),
        "attention_bias": section.flag("attn_bias", attention_bias),
        "mlp_bias": section.flag("mlp_bias", False),
        "tied_head": tied_head,
        **common,
    }


def llama_keys(config: ModelConfig) -> dict[str, object]:
    """The keys that llama_fields reads."""
    return {
        "kv_head_num": config.num_kv_heads,
        "hidden_units": config.hidden_size,
        "activation_type": ACTIVATION_NAMES[config.activation],
        "attn_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        **rope_keys(config),
    }


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    return ModelConfig(family="llama", **llama_fields(section, tied_head))


class Model(Decoder):
    """LLaMA on one rank."""

    layout = LAYOUT

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        self.sequential(context, x, GATED[self.config.activation], caches)


FAMILY = Family("llama", "LLaMA", read=read, keys=llama_keys, weight_specs=LAYOUT.specs, model=Model)
