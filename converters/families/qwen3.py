"""Qwen3: LLaMA's names, and a norm of each query and key head."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.families import CheckpointFamily, llama
from tridecode.converters.families.llama import EMBEDDING, llama_fields, whole_rope
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, rms_decoder_settings
from tridecode.converters.hf_config import windows
from tridecode.converters.rules import Rule, module_rules


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        **llama_fields(hf, "Qwen3"),
        rope=whole_rope(hf, "Qwen3"),
        attention_bias=hf.attention_bias,
        mlp_bias=False,
        windows=windows(hf, "Qwen3"),
        **common,
    )


def head_norm_rules() -> list[Rule]:
    source, out = "model.layers.{i}.self_attn", "model.layers.{i}.attention"
    return [
        *module_rules(f"{source}.q_norm", f"{out}.q_norm"),
        *module_rules(f"{source}.k_norm", f"{out}.k_norm"),
    ]


def rules(num_heads: int) -> list[Rule]:
    return llama.rules(num_heads) + head_norm_rules()


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    return {**rms_decoder_settings(header), "attention_bias": header.in_layers("attn_output.bias")}


FAMILY = CheckpointFamily(("qwen3",), EMBEDDING, model_config, rules, gguf=GgufRules("qwen3", _gguf_settings))
