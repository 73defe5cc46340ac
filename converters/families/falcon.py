"""Falcon: its query_key_value is stored by kv head, the queries of its group and then its key and value."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models.falcon import FalconConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, decoder_settings, head_size, rope_parameters
from tridecode.converters.hf_config import activation, max_positions, rope_config, shape
from tridecode.converters.rules import (
    Rule,
    module_rules,
    split_group_bias,
    split_groups_transposed,
    transpose,
)

EMBEDDING = "transformer.word_embeddings.weight"


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    sizes = {**shape(hf), "num_kv_heads": _num_kv_heads(hf)}
    return FalconConfig(
        family="falcon",
        **sizes,
        mlp_size=hf.ffn_hidden_size,
        max_positions=max_positions(hf),
        norm_eps=hf.layer_norm_epsilon,
        activation=activation(hf, "activation", "Falcon"),
        rope=None if hf.alibi else rope_config(hf, sizes["head_size"], "Falcon"),
        residual="parallel" if hf.parallel_attn else "sequential",
        attention_bias=bool(hf.bias),
        mlp_bias=bool(hf.bias),
        mlp_norm=_has_mlp_norm(hf),
        **common,
    )


def _num_kv_heads(hf: PreTrainedConfig) -> int:
    """multi_query is one kv head, whatever num_kv_heads says."""
    heads, kv_heads = hf.num_attention_heads, hf.num_kv_heads
    if not hf.new_decoder_architecture:
        if hf.multi_query:
            return 1
        if kv_heads != heads:
            raise UnsupportedError(
                f"Falcon with new_decoder_architecture = False, multi_query = False, num_kv_heads = "
                f"{kv_heads}; this version, as transformers, runs {heads} there, the number of heads"
            )
    if kv_heads < 1 or heads % kv_heads:
        raise UnsupportedError(
            f"Falcon with num_kv_heads = {kv_heads}; this version runs divisors of the {heads} heads"
        )
    return kv_heads


def _has_mlp_norm(hf: PreTrainedConfig) -> bool:
    """Return whether parallel attention and MLP have a norm each: the default of the new decoder, unless
    num_ln_in_parallel_attn is 1."""
    norms = hf.num_ln_in_parallel_attn
    if hf.new_decoder_architecture:
        if not hf.parallel_attn:
            raise UnsupportedError(
                "Falcon with new_decoder_architecture = True, parallel_attn = False; this version, as "
                "transformers, runs parallel_attn = True there"
            )
        wanted: tuple[int | None, ...] = (None, 1, 2)
    else:
        # a sequential layer has two norms in any case
        wanted = (None, 1, 2) if not hf.parallel_attn else (None, 1)
    if norms not in wanted:
        raise UnsupportedError(
            f"Falcon with new_decoder_architecture = {hf.new_decoder_architecture}, "
            f"num_ln_in_parallel_attn = {norms}; this version, as transformers, runs "
            f"{', '.join(str(count) for count in wanted)} there"
        )
    return bool(hf.new_decoder_architecture) and norms != 1


def rules(num_heads: int, head_size: int | None = None) -> list[Rule]:
    layer, out = "transformer.h.{i}", "model.layers.{i}"
    weight = partial(split_groups_transposed, num_heads, head_size)
    bias = partial(split_group_bias, num_heads, head_size)
    source, qkv = f"{layer}.self_attention.query_key_value", f"{out}.attention.query_key_value"
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules(f"{layer}.input_layernorm", f"{out}.input_layernorm"),
        *module_rules(f"{layer}.ln_attn", f"{out}.ln_attn"),
        *module_rules(f"{layer}.ln_mlp", f"{out}.ln_mlp"),
        Rule(f"{source}.weight", f"{qkv}.weight", weight),
        Rule((f"{source}.bias", f"{source}.weight"), f"{qkv}.bias", bias),
        *module_rules(f"{layer}.self_attention.dense", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.post_attention_layernorm", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.mlp.dense_h_to_4h", f"{out}.mlp.dense_h_to_4h", transpose),
        *module_rules(f"{layer}.mlp.dense_4h_to_h", f"{out}.mlp.dense_4h_to_h", transpose),
        *module_rules("transformer.ln_f", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    """llama.cpp runs parallel attention and MLP with rotary positions; tensors tell the number of norms."""
    held, has_two = decoder_settings(header), header.in_layers("attn_norm_2.weight")
    kv_heads = held.pop("num_key_value_heads")
    is_new = has_two or kv_heads > 1
    return {
        **held,
        "ffn_hidden_size": held.pop("intermediate_size"),
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": is_new,
        "multi_query": not is_new,
        "num_ln_in_parallel_attn": 2 if has_two else 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": header.in_layers("attn_qkv.bias"),
        "layer_norm_epsilon": float(header.number("attention.layer_norm_epsilon")),
        "rope_parameters": rope_parameters(header, head_size(header)),
    }


def _gguf_absent(header: GgufHeader) -> tuple[str, ...]:
    """llama.cpp calls input_layernorm and ln_mlp attn_norm."""
    return ("input_layernorm",) if header.in_layers("attn_norm_2.weight") else ("ln_attn", "ln_mlp")


def _by_group(name: str, tensor: Tensor, hf: PreTrainedConfig) -> Tensor:
    """llama.cpp stores all queries, keys and values; transformers by kv head."""
    if ".attn_qkv." not in name:
        return tensor
    kv_heads, heads = _num_kv_heads(hf), hf.num_attention_heads
    size = tensor.shape[0] // (heads + 2 * kv_heads)
    queries, keys, values = tensor.split([heads * size, kv_heads * size, kv_heads * size])
    parts = (part.reshape(kv_heads, -1, size, *tensor.shape[1:]) for part in (queries, keys, values))
    return torch.cat(list(parts), dim=1).reshape(tensor.shape)


#: of old checkpoints
_IGNORED = ("transformer.h.{i}.self_attention.rotary_emb.inv_freq",)
_GGUF = GgufRules("falcon", _gguf_settings, restore=_by_group, absent=_gguf_absent)
FAMILY = CheckpointFamily(
    ("falcon",), EMBEDDING, model_config, rules, takes_head_size=True, ignored=_IGNORED, gguf=_GGUF
)
