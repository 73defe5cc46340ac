"""GPT-Neo: GPT-2 with unscaled scores and, in some layers, a window. Black et al. 2021."""

from __future__ import annotations

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    IniSection,
    read_common,
    read_windows,
    window_keys,
)
from tridecode.backend.models.gpt import LAYOUT
from tridecode.backend.models.gpt import Model as Gpt2


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    """Section [gptneo]: ours, in FasterTransformer's spelling."""
    common = read_common(section, None)
    return ModelConfig(
        family="gptneo",
        norm_eps=section.number("layernorm_eps", 1e-5),
        activation=section.choice("activation_type", "Gelu", ACTIVATIONS),
        attention_bias=False,
        dense_bias=True,
        attention_scale=1.0,
        windows=read_windows(section, common["num_layers"]),
        tied_head=tied_head,
        **common,
    )


def keys(config: ModelConfig) -> dict[str, object]:
    return {"activation_type": ACTIVATION_NAMES[config.activation], **window_keys(config)}


class Model(Gpt2):
    """GPT-Neo on one rank."""


FAMILY = Family("gptneo", "GPT-Neo", read=read, keys=keys, weight_specs=LAYOUT.specs, model=Model)
