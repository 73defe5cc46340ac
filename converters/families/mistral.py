"""Mistral: tensor names as in LLaMA; either all layers have a window or none."""

from __future__ import annotations

from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.families.llama import EMBEDDING, llama_fields, rules, whole_rope
from tridecode.converters.hf_config import windows


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    found = windows(hf, "Mistral")
    if len(set(found)) > 1 or (not found and hf.sliding_window):  # transformers' mask ignores layer_types
        types = f"sliding_window = {hf.sliding_window} and layer_types = {hf.layer_types}"
        raise UnsupportedError(f"Mistral with {types[:200]}; this version runs one window for all layers")
    return ModelConfig(
        family="mistral",
        **llama_fields(hf, "Mistral"),
        rope=whole_rope(hf, "Mistral"),
        attention_bias=False,
        mlp_bias=False,
        windows=found,
        **common,
    )


FAMILY = CheckpointFamily(("mistral",), EMBEDDING, model_config, rules)
