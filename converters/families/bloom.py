"""BLOOM: query_key_value is stored head by head, with q, k and v of each head together."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.configuration.model_config import DEFAULT_MAX_POSITIONS, ModelConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, decoder_settings
from tridecode.converters.hf_config import shape
from tridecode.converters.rules import (
    Rule,
    join_heads,
    module_rules,
    split_heads,
    split_heads_transposed,
    transpose,
)

EMBEDDING = "transformer.word_embeddings.weight"


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    return ModelConfig(
        family="bloom",
        **shape(hf),
        mlp_size=4 * hf.hidden_size,
        max_positions=DEFAULT_MAX_POSITIONS,  # ALiBi has no position table; this is FasterTransformer's limit
        norm_eps=hf.layer_norm_epsilon,
        residual="from_norm" if hf.apply_residual_connection_post_layernorm else "sequential",
        **common,
    )


def rules(num_heads: int) -> list[Rule]:
    layer, out = "transformer.h.{i}", "model.layers.{i}"
    fused = partial(split_heads_transposed, num_heads), partial(split_heads, num_heads)
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules("transformer.word_embeddings_layernorm", "model.pre_decoder_layernorm"),
        *module_rules(f"{layer}.input_layernorm", f"{out}.input_layernorm"),
        *module_rules(f"{layer}.self_attention.query_key_value", f"{out}.attention.query_key_value", *fused),
        *module_rules(f"{layer}.self_attention.dense", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.post_attention_layernorm", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.mlp.dense_h_to_4h", f"{out}.mlp.dense_h_to_4h", transpose),
        *module_rules(f"{layer}.mlp.dense_4h_to_h", f"{out}.mlp.dense_4h_to_h", transpose),
        *module_rules("transformer.ln_f", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


def _by_head(name: str, tensor: Tensor, hf: PreTrainedConfig) -> Tensor:
    """Undo llama.cpp's order: it stores all queries, then keys, then values; transformers head by head."""
    return join_heads(hf.num_attention_heads, tensor) if ".attn_qkv." in name else tensor


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    held = decoder_settings(header)
    names = ("vocab_size", "hidden_size", "tie_word_embeddings")
    return {
        **{name: held[name] for name in names},
        "n_layer": held["num_hidden_layers"],
        "n_head": held["num_attention_heads"],
        "layer_norm_epsilon": float(header.number("attention.layer_norm_epsilon")),
    }


_GGUF = GgufRules("bloom", _gguf_settings, restore=_by_head)
FAMILY = CheckpointFamily(("bloom",), EMBEDDING, model_config, rules, gguf=_GGUF)
