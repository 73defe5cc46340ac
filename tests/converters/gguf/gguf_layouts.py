"""Applies llama.cpp's changes to the tensors of each architecture, and writes the same metadata.

Source: llama.cpp, conversion/*.py. test_gguf_families.py checks them against llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Named = Iterator[tuple[str, np.ndarray]]


def pairs_of_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k: element d and d + D / 2 of a head lie side by side."""
    by_half = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return by_half.swapaxes(1, 2).reshape(weight.shape)


def as_llama(name: str, weight: np.ndarray, hf: PreTrainedConfig) -> np.ndarray:
    heads = {"q_proj": hf.num_attention_heads, "k_proj": getattr(hf, "num_key_value_heads", None)}
    part = next((part for part in heads if part in name), None)
    return pairs_of_heads(weight, heads[part]) if part else weight


def as_gemma(name: str, weight: np.ndarray, hf: PreTrainedConfig) -> np.ndarray:
    return weight + 1 if name.endswith("norm.weight") else weight


def parts_together(name: str, weight: np.ndarray, hf: PreTrainedConfig) -> np.ndarray:
    """Heads of query, key and value -> all queries, all keys, all values."""
    if "query_key_value" not in name:
        return weight
    by_head = weight.reshape(hf.num_attention_heads, 3, -1, *weight.shape[1:])
    return by_head.swapaxes(0, 1).reshape(weight.shape)


def groups_together(name: str, weight: np.ndarray, hf: PreTrainedConfig) -> np.ndarray:
    if "query_key_value" not in name:
        return weight
    kv_heads = hf.num_kv_heads if hf.new_decoder_architecture else 1
    size = hf.hidden_size // hf.num_attention_heads
    groups = weight.reshape(kv_heads, hf.num_attention_heads // kv_heads + 2, size, -1)
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return np.concatenate([part.reshape(-1, weight.shape[1]) for part in parts])


def as_gpt2(name: str, weight: np.ndarray, hf: PreTrainedConfig) -> np.ndarray:
    return weight.T if weight.ndim == 2 and ".h." in name else weight


def usual(hf: PreTrainedConfig, writer: gguf.GGUFWriter) -> None:
    """Metadata that nearly all have."""
    writer.add_block_count(hf.num_hidden_layers)
    writer.add_context_length(getattr(hf, "max_position_embeddings", None) or 2048)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_head_count(hf.num_attention_heads)
    inner = getattr(hf, "intermediate_size", None) or getattr(hf, "n_inner", None) or 4 * hf.hidden_size
    writer.add_feed_forward_length(inner)
    if (kv_heads := getattr(hf, "num_key_value_heads", None)) is not None:
        writer.add_head_count_kv(kv_heads)
    for key in ("rms_norm_eps",):
        if hasattr(hf, key):
            writer.add_layer_norm_rms_eps(getattr(hf, key))
    for key in ("layer_norm_eps", "layer_norm_epsilon"):
        if hasattr(hf, key):
            writer.add_layer_norm_eps(getattr(hf, key))


def rope_keys(hf: PreTrainedConfig, writer: gguf.GGUFWriter) -> None:
    rope = hf.rope_parameters.get("full_attention", hf.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    size = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * size))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope and rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def heads(hf: PreTrainedConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(hf.head_dim)
    writer.add_value_length(hf.head_dim)


def gemma2(hf: PreTrainedConfig, writer: gguf.GGUFWriter) -> None:
    heads(hf, writer)
    writer.add_sliding_window(hf.sliding_window)
    writer.add_attn_logit_softcapping(hf.attn_logit_softcapping)
    writer.add_final_logit_softcapping(hf.final_logit_softcapping)


def gemma3(hf: PreTrainedConfig, writer: gguf.GGUFWriter) -> None:
    heads(hf, writer)
    rope_keys(hf, writer)
    writer.add_sliding_window(hf.sliding_window)


def phi3(hf: PreTrainedConfig, writer: gguf.GGUFWriter) -> None:
    rope_keys(hf, writer)
    writer.add_sliding_window(hf.sliding_window or 0)
    rope = hf.rope_parameters
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])


def mpt(hf: PreTrainedConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_max_alibi_bias(hf.attn_config.alibi_bias_max)
    if hf.attn_config.clip_qkv:
        writer.add_clamp_kqv(hf.attn_config.clip_qkv)


def falcon(hf: PreTrainedConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_head_count_kv(hf.num_kv_heads if hf.new_decoder_architecture else 1)


def neox(hf: PreTrainedConfig, writer: gguf.GGUFWriter) -> None:
    rope_keys(hf, writer)
    writer.add_parallel_residual(hf.use_parallel_residual)


def vectors(hf: PreTrainedConfig) -> Named:
    """rope_freqs of Llama 3's scaling, and the two lists of longrope."""
    rope = getattr(hf, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, torch.device("cpu"))
        size = 2 * len(scaled)
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2) / size)
        yield "rope_freqs.weight", (plain / scaled).numpy().astype(np.float32)
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)
