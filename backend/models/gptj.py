"""GPT-J: interleaved partial rotary positions, attention and MLP in parallel after one LayerNorm, a head with
a bias. Wang and Komatsuzaki 2021. CodeGen is the same network (Nijkamp et al. 2022).

Its section of config.ini, [gptj], is FasterTransformer's.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import ACTIVATION_NAMES, ACTIVATIONS, IniSection, read_common
from tridecode.backend.models.context import Context
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.rope_ini import read_rope, rope_keys
from tridecode.backend.models.specs import Layout
from tridecode.kernels.operands import CacheLayer

LAYOUT = Layout(mlp_norm="input_layernorm")


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    """FasterTransformer's keys, with its constant 1e-6 for layernorm_eps; activation_type, layernorm_eps and
    rope_* are ours."""
    return ModelConfig(
        family="gptj",
        norm_eps=section.number("layernorm_eps", 1e-6),
        activation=section.choice("activation_type", "Gelu", ACTIVATIONS),
        rope=replace(read_rope(section, None), interleaved=True),
        residual="parallel",
        attention_bias=False,
        tied_head=tied_head,
        head_bias=True,
        **read_common(section),
    )


def keys(config: ModelConfig) -> dict[str, object]:
    return {"activation_type": ACTIVATION_NAMES[config.activation], **rope_keys(config)}


class Model(Decoder):
    """GPT-J on one rank."""

    layout = LAYOUT

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        self.parallel(context, x, self.config.activation, caches)


FAMILY = Family("gptj", "GPT-J", read=read, keys=keys, weight_specs=LAYOUT.specs, model=Model)
