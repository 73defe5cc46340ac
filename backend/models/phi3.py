"""Phi-3: LLaMA with partial rotary positions, LongRoPE and a sliding window. Abdin et al. 2024.

With LongRoPE, a sequence that grows beyond the original length is recomputed with the long factors
(RopeConfig.recompute), as transformers does.
"""

from __future__ import annotations

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import IniSection, read_windows, window_keys
from tridecode.backend.models.llama import LAYOUT, Model, llama_fields, llama_keys


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    fields = llama_fields(section, tied_head, odd_rotary=True)
    return ModelConfig(family="phi3", **fields, windows=read_windows(section, fields["num_layers"]))


def keys(config: ModelConfig) -> dict[str, object]:
    return {**llama_keys(config), **window_keys(config)}


FAMILY = Family("phi3", "Phi-3", read=read, keys=keys, weight_specs=LAYOUT.specs, model=Model)
