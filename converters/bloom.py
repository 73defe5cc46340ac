"""BLOOM (transformers' model_type bloom) -> a GPT weight directory with ALiBi."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.config import DEFAULT_MAX_POSITIONS, ModelConfig
from tridecode.converters.rules import Rule, transpose

PREFIX = "transformer."
EMBEDDING = "transformer.word_embeddings.weight"
HEAD = "lm_head.weight"
IGNORED = ()


def split_heads(num_heads: int, tensor: Tensor) -> Tensor:
    """Output rows (heads, 3, head size) -> (3, heads, head size): all queries, all keys, all values."""
    by_head = tensor.reshape(num_heads, 3, -1, *tensor.shape[1:])  # (H, 3, D, ...)
    return by_head.transpose(0, 1).reshape(tensor.shape)


def split_heads_transposed(num_heads: int, weight: Tensor) -> Tensor:
    """(H * 3 * D, C) -> (C, 3 * H * D)."""
    return transpose(split_heads(num_heads, weight))


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    """ModelConfig of a BloomConfig. common: model_name, start_id, end_id, weight_dtype, tied_head."""
    return ModelConfig(
        family="bloom",
        num_layers=hf.n_layer,
        hidden_size=hf.hidden_size,
        num_heads=hf.n_head,
        num_kv_heads=hf.n_head,
        head_size=hf.hidden_size // hf.n_head,
        mlp_size=4 * hf.hidden_size,
        vocab_size=hf.vocab_size,
        max_positions=DEFAULT_MAX_POSITIONS,  # ALiBi has no table that ends; FasterTransformer's limit
        norm_eps=hf.layer_norm_epsilon,
        activation="gelu_tanh",
        residual="from_norm" if hf.apply_residual_connection_post_layernorm else "sequential",
        **common,
    )


def rules(config: ModelConfig) -> list[Rule]:
    layer, out = "transformer.h.{i}", "model.layers.{i}"
    fused_weight = partial(split_heads_transposed, config.num_heads)
    fused_bias = partial(split_heads, config.num_heads)
    return [
        Rule(EMBEDDING, "model.wte"),
        Rule("transformer.word_embeddings_layernorm.weight", "model.pre_decoder_layernorm.weight"),
        Rule("transformer.word_embeddings_layernorm.bias", "model.pre_decoder_layernorm.bias"),
        Rule(f"{layer}.input_layernorm.weight", f"{out}.input_layernorm.weight"),
        Rule(f"{layer}.input_layernorm.bias", f"{out}.input_layernorm.bias"),
        Rule(
            f"{layer}.self_attention.query_key_value.weight",
            f"{out}.attention.query_key_value.weight",
            fused_weight,
        ),
        Rule(
            f"{layer}.self_attention.query_key_value.bias",
            f"{out}.attention.query_key_value.bias",
            fused_bias,
        ),
        Rule(f"{layer}.self_attention.dense.weight", f"{out}.attention.dense.weight", transpose),
        Rule(f"{layer}.self_attention.dense.bias", f"{out}.attention.dense.bias"),
        Rule(f"{layer}.post_attention_layernorm.weight", f"{out}.post_attention_layernorm.weight"),
        Rule(f"{layer}.post_attention_layernorm.bias", f"{out}.post_attention_layernorm.bias"),
        Rule(f"{layer}.mlp.dense_h_to_4h.weight", f"{out}.mlp.dense_h_to_4h.weight", transpose),
        Rule(f"{layer}.mlp.dense_h_to_4h.bias", f"{out}.mlp.dense_h_to_4h.bias"),
        Rule(f"{layer}.mlp.dense_4h_to_h.weight", f"{out}.mlp.dense_4h_to_h.weight", transpose),
        Rule(f"{layer}.mlp.dense_4h_to_h.bias", f"{out}.mlp.dense_4h_to_h.bias"),
        Rule("transformer.ln_f.weight", "model.final_layernorm.weight"),
        Rule("transformer.ln_f.bias", "model.final_layernorm.bias"),
        Rule(HEAD, "model.lm_head.weight"),
    ]
