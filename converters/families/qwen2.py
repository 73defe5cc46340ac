"""Qwen2: LLaMA's names, with biases of q, k and v alone."""

from __future__ import annotations

from transformers import PreTrainedConfig

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.families.llama import EMBEDDING, llama_fields, rules, whole_rope
from tridecode.converters.gguf.rules import GgufRules, rms_decoder_settings
from tridecode.converters.hf_config import windows


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    return ModelConfig(
        family="qwen2",
        **llama_fields(hf, "Qwen2"),
        rope=whole_rope(hf, "Qwen2"),
        attention_bias=True,
        dense_bias=False,
        mlp_bias=False,
        windows=windows(hf, "Qwen2"),
        **common,
    )


_GGUF = GgufRules("qwen2", rms_decoder_settings)
FAMILY = CheckpointFamily(("qwen2",), EMBEDDING, model_config, rules, gguf=_GGUF)
