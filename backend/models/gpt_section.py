"""Section [gpt] of config.ini, which FasterTransformer uses for every decoder of the GPT-2 kind. No torch."""

from __future__ import annotations

from tridecode.backend.config import DEFAULT_MAX_POSITIONS, ModelConfig
from tridecode.backend.models.config_ini import ACTIVATION_NAMES, ACTIVATIONS, IniSection, read_common

#: the flags that tell the families of this section apart; FasterTransformer's defaults are GPT-2
GPT2_FLAGS = {
    "has_positional_encoding": True,
    "has_pre_decoder_layernorm": False,
    "use_attention_linear_bias": False,
}


def has_flags(section: IniSection, flags: dict[str, bool]) -> bool:
    """Whether the section is of the family with these flags."""
    return all(section.flag(key, default) == flags[key] for key, default in GPT2_FLAGS.items())


def read_gpt_section(family: str, section: IniSection, tied_head: bool, **extra) -> ModelConfig:
    """ModelConfig of a pre-norm decoder with a final LayerNorm. UnsupportedError for another network."""
    section.choice("layernorm_type", "pre_layernorm", {"pre_layernorm": "pre_layernorm"})
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


def gpt_section_keys(config: ModelConfig, flags: dict[str, bool]) -> dict[str, object]:
    """The keys that read_gpt_section and has_flags read."""
    return {
        "layernorm_type": "pre_layernorm",
        "activation_type": ACTIVATION_NAMES[config.activation],
        "has_post_decoder_layernorm": True,
        **flags,
    }
