"""LLaMA 1 to 3 and models of the same network."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.configuration.model_config import ModelConfig, RopeConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, rms_decoder_settings
from tridecode.converters.hf_config import (
    demand_whole_rotary,
    gated_activation,
    max_positions,
    rope_config,
    shape,
)
from tridecode.converters.rules import Rule, join, join_transposed, module_rules, transpose

EMBEDDING = "model.embed_tokens.weight"


def llama_fields(hf: PreTrainedConfig, title: str, act_key: str = "hidden_act") -> dict[str, Any]:
    """Return the ModelConfig fields, except rotary positions and biases, of a decoder with grouped heads and
    a gated MLP.

    title: the family's name, for errors. act_key: key of the activation.
    """
    return {
        **shape(hf),
        "mlp_size": hf.intermediate_size,
        "max_positions": max_positions(hf),
        "norm_eps": hf.rms_norm_eps,
        "activation": gated_activation(hf, act_key, title),
    }


def whole_rope(hf: PreTrainedConfig, title: str) -> RopeConfig:
    """Return the rope of heads that are rotated as a whole; partial rotation is refused."""
    demand_whole_rotary(hf.rope_parameters, title)
    return rope_config(hf, shape(hf)["head_size"], title)


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    return ModelConfig(
        family="llama",
        **llama_fields(hf, "LLaMA"),
        rope=whole_rope(hf, "LLaMA"),
        attention_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
        **common,
    )


def rules(num_heads: int) -> list[Rule]:
    layer, out = "model.layers.{i}", "model.layers.{i}"
    qkv = tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv")
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules(f"{layer}.input_layernorm", f"{out}.input_layernorm"),
        *module_rules(qkv, f"{out}.attention.query_key_value", join_transposed, join),
        *module_rules(f"{layer}.self_attn.o_proj", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.post_attention_layernorm", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.mlp.gate_proj", f"{out}.mlp.gate_proj", transpose),
        *module_rules(f"{layer}.mlp.up_proj", f"{out}.mlp.up_proj", transpose),
        *module_rules(f"{layer}.mlp.down_proj", f"{out}.mlp.down_proj", transpose),
        *module_rules("model.norm", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


def halves_of_heads(name: str, tensor: Tensor, hf: PreTrainedConfig) -> Tensor:
    """Reorder rows of q and k: llama.cpp rotates pairs of neighbouring rows, transformers halves."""
    kv_heads = getattr(hf, "num_key_value_heads", hf.num_attention_heads)
    heads = {".attn_q.": hf.num_attention_heads, ".attn_k.": kv_heads}
    for part, count in heads.items():
        if part in name:
            rows = tensor.reshape(count, -1, 2, *tensor.shape[1:])  # (H, D / 2, 2, C)
            return rows.transpose(1, 2).reshape(tensor.shape)
    return tensor


def gguf_settings(header: GgufHeader) -> dict[str, Any]:
    """Return the settings; llama.cpp has no setting for biases, which are detected from the tensors."""
    return {
        **rms_decoder_settings(header, takes_factors=True),
        "attention_bias": header.in_layers("attn_output.bias"),
        "mlp_bias": header.in_layers("ffn_up.bias"),
    }


#: of old checkpoints; follows from rope_theta
_IGNORED = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)
_GGUF = GgufRules("llama", gguf_settings, restore=halves_of_heads)
FAMILY = CheckpointFamily(("llama",), EMBEDDING, model_config, rules, ignored=_IGNORED, gguf=_GGUF)
