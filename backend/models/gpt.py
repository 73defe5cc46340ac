"""GPT-2: learned positions, pre-LayerNorm, fused QKV, GELU. Radford et al. 2019.

FasterTransformer uses its section of config.ini, [gpt], also for BLOOM and OPT.
"""

from __future__ import annotations

from torch import Tensor

from tridecode.backend.configuration.model_config import DEFAULT_MAX_POSITIONS, ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    IniSection,
    attention_scale_keys,
    read_attention_scale,
    read_common,
)
from tridecode.backend.models.context import Context, Ranks
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.layers import attention_scale
from tridecode.backend.models.specs import Layout
from tridecode.backend.models.weights import Weights
from tridecode.kernels.operands import CacheLayer, Heads

LAYOUT = Layout(positions=True)
#: flags that distinguish the families of this section; FasterTransformer's defaults mean GPT-2
GPT2_FLAGS = {
    "has_positional_encoding": True,
    "has_pre_decoder_layernorm": False,
    "use_attention_linear_bias": False,
}


def has_flags(section: IniSection, flags: dict[str, bool]) -> bool:
    """Return whether the section's flags are those of this family."""
    return all(section.flag(key, default) == flags[key] for key, default in GPT2_FLAGS.items())


def is_opt(section: IniSection) -> bool:
    """Return whether the section describes an OPT, which has GPT-2's flags but another name or norm
    placement.

    A pre-norm OPT written by FasterTransformer's converter has the network of GPT-2 and is read as such.
    """
    return (
        section.text("model_variant", "").lower().startswith("opt-")
        or section.text("layernorm_type", "pre_layernorm").lower() == "post_layernorm"
        or not section.flag("has_post_decoder_layernorm", True)
    )


def recognises(section: IniSection) -> bool:
    return has_flags(section, GPT2_FLAGS) and not is_opt(section)


def read_gpt_section(
    family: str, section: IniSection, tied_head: bool, norm_types: tuple[str, ...] = (), **extra
) -> ModelConfig:
    """Return the ModelConfig of a pre-norm decoder with a final LayerNorm.

    norm_types: values of layernorm_type that the family accepts besides pre_layernorm. Raises
    UnsupportedError for another network.
    """
    known = ("pre_layernorm", *norm_types)
    section.choice("layernorm_type", "pre_layernorm", dict(zip(known, known)))
    section.demand("has_adapters", False)
    section.demand("has_post_decoder_layernorm", True)
    has_positions = section.flag("has_positional_encoding", True)
    return ModelConfig(
        family=family,
        norm_eps=section.number("layernorm_eps", 1e-6),
        activation=section.choice("activation_type", "Gelu", ACTIVATIONS),
        tied_head=tied_head,
        **read_common(section, None if has_positions else DEFAULT_MAX_POSITIONS),
        **extra,
    )


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    """attention_scale and scale_attn_by_inverse_layer_idx are ours."""
    return read_gpt_section(
        "gpt",
        section,
        tied_head,
        attention_scale=read_attention_scale(section),
        scale_by_layer=section.flag("scale_attn_by_inverse_layer_idx", False),
    )


def keys(config: ModelConfig) -> dict[str, object]:
    return {
        **gpt_section_keys(config, GPT2_FLAGS),
        **attention_scale_keys(config),
        "scale_attn_by_inverse_layer_idx": config.scale_by_layer,
    }


def gpt_section_keys(config: ModelConfig, flags: dict[str, bool]) -> dict[str, object]:
    """Return the keys that read_gpt_section and has_flags read."""
    return {
        "layernorm_type": "pre_layernorm",
        "activation_type": ACTIVATION_NAMES[config.activation],
        "has_post_decoder_layernorm": True,
        **flags,
    }


class Model(Decoder):
    """GPT-2 on one rank."""

    layout = LAYOUT

    def __init__(self, config: ModelConfig, weights: Weights, ranks: Ranks, num_positions: int):
        super().__init__(config, weights, ranks, num_positions)
        self.positions = weights.tensor("model.wpe")

    def stage_heads(self, ranks: Ranks, num_positions: int) -> list[Heads]:
        if not self.config.scale_by_layer:
            return super().stage_heads(ranks, num_positions)
        scale = attention_scale(self.config)
        return self.layer_heads(ranks, lambda layer: {"scale": scale / (layer + 1)})

    def embed(self, context: Context, x: Tensor) -> None:
        self.look_up(context, x, self.positions)

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        self.sequential(context, x, self.config.activation, caches)


FAMILY = Family(
    name="gpt",
    title="GPT-2 (learned positions)",
    model_type="GPT",
    recognises=recognises,
    read=read,
    keys=keys,
    weight_specs=LAYOUT.specs,
    model=Model,
)
