"""Gemma: LLaMA with a GELU gate and an embedding scaled by sqrt(hidden size). Gemma Team 2024.

Its norms scale by 1 + w; the files hold 1 + w.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family, llama
from tridecode.backend.models.config_ini import IniSection
from tridecode.backend.models.context import Ranks
from tridecode.backend.models.llama import LAYOUT, llama_fields, llama_keys
from tridecode.backend.models.weights import Weights


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    return ModelConfig(family="gemma", **llama_fields(section, tied_head))


class Model(llama.Model):
    """Gemma on one rank."""

    def __init__(self, config: Any, weights: Weights, ranks: Ranks, num_positions: int):
        super().__init__(config, weights, ranks, num_positions)
        # transformers rounds the scale to the dtype of the embedding
        self.embedding_scale = float(torch.tensor(math.sqrt(config.hidden_size), dtype=self.dtype))


FAMILY = Family("gemma", "Gemma", read=read, keys=llama_keys, weight_specs=LAYOUT.specs, model=Model)
