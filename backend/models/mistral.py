"""Mistral: LLaMA with a sliding window in every layer. Jiang et al. 2023."""

from __future__ import annotations

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import IniSection, read_windows, window_keys
from tridecode.backend.models.llama import LAYOUT, Model, llama_fields, llama_keys


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    fields = llama_fields(section, tied_head)
    return ModelConfig(family="mistral", **fields, windows=read_windows(section, fields["num_layers"]))


def keys(config: ModelConfig) -> dict[str, object]:
    return {**llama_keys(config), **window_keys(config)}


FAMILY = Family("mistral", "Mistral", read=read, keys=keys, weight_specs=LAYOUT.specs, model=Model)
