"""LLaMA 1 to 3 and their like (transformers' model_type llama) -> a LLaMA weight directory."""

from __future__ import annotations

from transformers import PreTrainedConfig

from tridecode.backend.config import ModelConfig, RopeConfig
from tridecode.backend.errors import UnsupportedError
from tridecode.converters.rules import Rule, join, join_transposed, transpose

PREFIX = "model."
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
#: a buffer that old checkpoints carry; it follows from rope_theta
IGNORED = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    """ModelConfig of a LlamaConfig. common: model_name, start_id, end_id, weight_dtype, tied_head."""
    if hf.hidden_act != "silu":
        raise UnsupportedError(f"LLaMA with hidden_act = {hf.hidden_act}; this version runs silu")
    return ModelConfig(
        family="llama",
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_size=hf.head_dim,
        mlp_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        max_positions=hf.max_position_embeddings,
        norm_eps=hf.rms_norm_eps,
        activation="silu",
        rope=rope_config(hf),
        attention_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
        **common,
    )


def rope_config(hf: PreTrainedConfig) -> RopeConfig:
    """From rope_parameters, where transformers 5 moves a top-level rope_theta and rope_scaling."""
    rope = hf.rope_parameters
    scaling = rope["rope_type"]
    if scaling not in ("default", "linear", "llama3"):
        raise UnsupportedError(
            f"LLaMA with rope scaling {scaling}; this version runs default, linear and llama3"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(
            f"LLaMA with partial_rotary_factor = {rope['partial_rotary_factor']}; this version runs 1.0"
        )
    config = RopeConfig(size=hf.head_dim, theta=float(rope["rope_theta"]), scaling=scaling)
    if scaling == "default":
        return config
    if scaling == "linear":
        return RopeConfig(config.size, config.theta, scaling, factor=float(rope["factor"]))
    return RopeConfig(
        config.size,
        config.theta,
        scaling,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )


def rules(config: ModelConfig) -> list[Rule]:
    layer, out = "model.layers.{i}", "model.layers.{i}"
    heads = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
    return [
        Rule(EMBEDDING, "model.wte"),
        Rule(f"{layer}.input_layernorm.weight", f"{out}.input_layernorm.weight"),
        Rule(tuple(f"{x}.weight" for x in heads), f"{out}.attention.query_key_value.weight", join_transposed),
        Rule(tuple(f"{x}.bias" for x in heads), f"{out}.attention.query_key_value.bias", join),
        Rule(f"{layer}.self_attn.o_proj.weight", f"{out}.attention.dense.weight", transpose),
        Rule(f"{layer}.self_attn.o_proj.bias", f"{out}.attention.dense.bias"),
        Rule(f"{layer}.post_attention_layernorm.weight", f"{out}.post_attention_layernorm.weight"),
        Rule(f"{layer}.mlp.gate_proj.weight", f"{out}.mlp.gate_proj.weight", transpose),
        Rule(f"{layer}.mlp.gate_proj.bias", f"{out}.mlp.gate_proj.bias"),
        Rule(f"{layer}.mlp.up_proj.weight", f"{out}.mlp.up_proj.weight", transpose),
        Rule(f"{layer}.mlp.up_proj.bias", f"{out}.mlp.up_proj.bias"),
        Rule(f"{layer}.mlp.down_proj.weight", f"{out}.mlp.down_proj.weight", transpose),
        Rule(f"{layer}.mlp.down_proj.bias", f"{out}.mlp.down_proj.bias"),
        Rule("model.norm.weight", "model.final_layernorm.weight"),
        Rule(HEAD, "model.lm_head.weight"),
    ]
