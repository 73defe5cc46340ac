"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one kv head for all queries. Ben Allal et al. 2023."""

from __future__ import annotations

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    IniSection,
    attention_scale_keys,
    read_attention_scale,
    read_common,
    read_kv_heads,
)
from tridecode.backend.models.gpt import LAYOUT
from tridecode.backend.models.gpt import Model as Gpt2


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    """Section [gptbigcode]: ours, in FasterTransformer's spelling."""
    common = read_common(section, None)
    common["num_kv_heads"] = read_kv_heads(section, common["num_heads"])
    return ModelConfig(
        family="gptbigcode",
        norm_eps=section.number("layernorm_eps", 1e-5),
        activation=section.choice("activation_type", "Gelu", ACTIVATIONS),
        tied_head=tied_head,
        attention_scale=read_attention_scale(section),
        **common,
    )


def keys(config: ModelConfig) -> dict[str, object]:
    return {
        "kv_head_num": config.num_kv_heads,
        "activation_type": ACTIVATION_NAMES[config.activation],
        **attention_scale_keys(config),
    }


class Model(Gpt2):
    """GPT-BigCode on one rank."""


FAMILY = Family("gptbigcode", "GPT-BigCode", read=read, keys=keys, weight_specs=LAYOUT.specs, model=Model)
