"""Qwen2: LLaMA with biases of query_key_value alone and a window in its upper layers. Yang et al. 2024."""

from __future__ import annotations

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import IniSection, read_windows, window_keys
from tridecode.backend.models.llama import LAYOUT, Model, llama_fields, llama_keys


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    fields = llama_fields(section, tied_head, attention_bias=True)
    windows = read_windows(section, fields["num_layers"])
    return ModelConfig(family="qwen2", **fields, dense_bias=False, windows=windows)


def keys(config: ModelConfig) -> dict[str, object]:
    return {**llama_keys(config), **window_keys(config)}


FAMILY = Family("qwen2", "Qwen2", read=read, keys=keys, weight_specs=LAYOUT.specs, model=Model)
