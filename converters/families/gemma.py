"""Gemma: LLaMA's names; its norms scale by 1 + w."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.families import CheckpointFamily, llama
from tridecode.converters.families.llama import EMBEDDING, llama_fields, whole_rope
from tridecode.converters.gguf.rules import GgufRules, norms_less_one, rms_decoder_settings
from tridecode.converters.hf_config import demand
from tridecode.converters.rules import Rule


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    demand(hf, "Gemma", use_bidirectional_attention=False)
    return ModelConfig(
        family="gemma",
        **llama_fields(hf, "Gemma"),
        rope=whole_rope(hf, "Gemma"),
        attention_bias=hf.attention_bias,
        mlp_bias=False,
        **common,
    )


def one_more(weight: Tensor) -> Tensor:
    """1 + w in float32, as transformers adds it."""
    return 1.0 + weight.float()


def fold_norms(rules: list[Rule]) -> list[Rule]:
    """The rules with 1 + w for each norm."""
    return [replace(rule, transform=one_more) if "norm.weight" in rule.target else rule for rule in rules]


def rules(num_heads: int) -> list[Rule]:
    return fold_norms(llama.rules(num_heads))


_GGUF = GgufRules("gemma", rms_decoder_settings, restore=norms_less_one)
FAMILY = CheckpointFamily(("gemma",), EMBEDDING, model_config, rules, gguf=_GGUF)
