"""GPT-2: its matrices are (in, out) already."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, decoder_settings
from tridecode.converters.hf_config import activation, demand, shape
from tridecode.converters.rules import Rule, module_rules

EMBEDDING = "transformer.wte.weight"


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    """Return the ModelConfig.

    reorder_and_upcast_attn is ignored: it concerns float16 arithmetic, not the network.
    """
    demand(hf, "GPT-2", add_cross_attention=False)
    return ModelConfig(
        family="gpt",
        **shape(hf),
        mlp_size=hf.n_inner if hf.n_inner is not None else 4 * hf.n_embd,
        max_positions=hf.n_positions,
        norm_eps=hf.layer_norm_epsilon,
        activation=activation(hf, "activation_function", "GPT-2"),
        attention_scale=None if hf.scale_attn_weights else 1.0,
        scale_by_layer=hf.scale_attn_by_inverse_layer_idx,
        **common,
    )


def rules(num_heads: int) -> list[Rule]:
    layer, out = "transformer.h.{i}", "model.layers.{i}"
    return [
        Rule(EMBEDDING, "model.wte"),
        Rule("transformer.wpe.weight", "model.wpe"),
        *module_rules(f"{layer}.ln_1", f"{out}.input_layernorm"),
        *module_rules(f"{layer}.attn.c_attn", f"{out}.attention.query_key_value"),
        *module_rules(f"{layer}.attn.c_proj", f"{out}.attention.dense"),
        *module_rules(f"{layer}.ln_2", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.mlp.c_fc", f"{out}.mlp.dense_h_to_4h"),
        *module_rules(f"{layer}.mlp.c_proj", f"{out}.mlp.dense_4h_to_h"),
        *module_rules("transformer.ln_f", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


def learned_position_settings(header: GgufHeader) -> dict[str, Any]:
    """Settings of GPT-2's kin by its names of them."""
    held = decoder_settings(header)
    return {
        "vocab_size": held["vocab_size"],
        "n_embd": held["hidden_size"],
        "n_layer": held["num_hidden_layers"],
        "n_head": held["num_attention_heads"],
        "n_inner": held["intermediate_size"],
        "n_positions": held["max_position_embeddings"],
        "layer_norm_epsilon": float(header.number("attention.layer_norm_epsilon")),
        "tie_word_embeddings": held["tie_word_embeddings"],
    }


#: causal masks, once stored
_IGNORED = (
    "transformer.h.{i}.attn.bias",
    "transformer.h.{i}.attn.masked_bias",
)
_GGUF = GgufRules(
    "gpt2",
    learned_position_settings,
    transposed=("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"),
)
FAMILY = CheckpointFamily(("gpt2",), EMBEDDING, model_config, rules, ignored=_IGNORED, gguf=_GGUF)
