"""Phi-3: tensor names as in LLaMA, with q, k and v fused into one matrix, and gate and up into another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.families.llama import EMBEDDING, llama_fields
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import QKV_PARTS, GgufRules, decoder_settings, partial_rope
from tridecode.converters.hf_config import rope_config, shape, windows
from tridecode.converters.rules import Rule, module_rules, transpose


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    share = hf.rope_parameters.get("partial_rotary_factor", 1.0)
    rotated = int(shape(hf)["head_size"] * share)
    if rotated < 1:
        raise UnsupportedError(
            f"Phi-3 with partial_rotary_factor = {share}; this version rotates 1 dimension or more of a head"
        )
    rope = rope_config(hf, rotated, "Phi-3")
    return ModelConfig(
        family="phi3",
        **llama_fields(hf, "Phi-3"),
        rope=replace(rope, recompute=rope.scaling == "longrope"),
        attention_bias=False,
        mlp_bias=False,
        windows=windows(hf, "Phi-3"),
        **common,
    )


def _gate(weight: Tensor) -> Tensor:
    return transpose(weight.chunk(2)[0])


def _up(weight: Tensor) -> Tensor:
    return transpose(weight.chunk(2)[1])


def rules(num_heads: int) -> list[Rule]:
    layer, out = "model.layers.{i}", "model.layers.{i}"
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules(f"{layer}.input_layernorm", f"{out}.input_layernorm"),
        *module_rules(f"{layer}.self_attn.qkv_proj", f"{out}.attention.query_key_value", transpose),
        *module_rules(f"{layer}.self_attn.o_proj", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.post_attention_layernorm", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.mlp.gate_up_proj", f"{out}.mlp.gate_proj", _gate),
        *module_rules(f"{layer}.mlp.gate_up_proj", f"{out}.mlp.up_proj", _up),
        *module_rules(f"{layer}.mlp.down_proj", f"{out}.mlp.down_proj", transpose),
        *module_rules("model.norm", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    """Return the settings that llama.cpp omits: the window, which the published models have."""
    held, rope = decoder_settings(header), partial_rope(header)
    original = header.number("rope.scaling.original_context_length", held["max_position_embeddings"])
    return {
        **held,
        "rms_norm_eps": float(header.number("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": header.number("attention.sliding_window", 0) or None,
    }


_GGUF = GgufRules("phi3", _gguf_settings, joined={"self_attn.qkv_proj": QKV_PARTS})
FAMILY = CheckpointFamily(("phi3",), EMBEDDING, model_config, rules, gguf=_GGUF)
