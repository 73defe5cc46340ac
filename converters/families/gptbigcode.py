"""GPT-BigCode: c_attn holds all queries, then the one key and value; without multi_query it holds queries,
keys and values head by head."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.families.gpt import learned_position_settings
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules
from tridecode.converters.hf_config import activation, demand, shape
from tridecode.converters.rules import (
    Rule,
    module_rules,
    split_group_bias,
    split_groups_transposed,
    transpose,
)

EMBEDDING = "transformer.wte.weight"


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    demand(hf, "GPT-BigCode", add_cross_attention=False)
    return ModelConfig(
        family="gptbigcode",
        **{**shape(hf), "num_kv_heads": 1 if hf.multi_query else hf.n_head},
        mlp_size=hf.n_inner if hf.n_inner is not None else 4 * hf.n_embd,
        max_positions=hf.n_positions,
        norm_eps=hf.layer_norm_epsilon,
        activation=activation(hf, "activation_function", "GPT-BigCode"),
        attention_scale=None if hf.scale_attn_weights else 1.0,
        **common,
    )


def rules(num_heads: int, head_size: int | None = None) -> list[Rule]:
    layer, out = "transformer.h.{i}", "model.layers.{i}"
    weight = partial(split_groups_transposed, num_heads, head_size)
    bias = partial(split_group_bias, num_heads, head_size)
    source, qkv = f"{layer}.attn.c_attn", f"{out}.attention.query_key_value"
    return [
        Rule(EMBEDDING, "model.wte"),
        Rule("transformer.wpe.weight", "model.wpe"),
        *module_rules(f"{layer}.ln_1", f"{out}.input_layernorm"),
        Rule(f"{source}.weight", f"{qkv}.weight", weight),
        Rule((f"{source}.bias", f"{source}.weight"), f"{qkv}.bias", bias),
        *module_rules(f"{layer}.attn.c_proj", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.ln_2", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.mlp.c_fc", f"{out}.mlp.dense_h_to_4h", transpose),
        *module_rules(f"{layer}.mlp.c_proj", f"{out}.mlp.dense_4h_to_h", transpose),
        *module_rules("transformer.ln_f", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    """Refuse more than one KV head: llama.cpp's converter does not reorder query_key_value."""
    kv_heads = header.size("attention.head_count_kv", header.size("attention.head_count"))
    if kv_heads != 1:
        raise UnsupportedError(f"{header.path}: GPT-BigCode with {kv_heads} kv heads; this version reads 1")
    return {**learned_position_settings(header), "multi_query": True}


_IGNORED = ("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias", "transformer.bias")
_GGUF = GgufRules("starcoder", _gguf_settings)
FAMILY = CheckpointFamily(
    ("gpt_bigcode",), EMBEDDING, model_config, rules, takes_head_size=True, ignored=_IGNORED, gguf=_GGUF
)
