"""GPT-2 (transformers' model_type gpt2) -> a GPT weight directory. Its matrices are (in, out) already."""

from __future__ import annotations

from transformers import PreTrainedConfig

from tridecode.backend.config import ModelConfig
from tridecode.backend.errors import UnsupportedError
from tridecode.converters.rules import Rule

PREFIX = "transformer."
EMBEDDING = "transformer.wte.weight"
HEAD = "lm_head.weight"
#: buffers of the causal mask that old checkpoints carry
IGNORED = ("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias")

# the three spellings of transformers compute one tanh formula
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
#: settings that change the network and that this version runs with one value only
_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    """ModelConfig of a GPT2Config. common: model_name, start_id, end_id, weight_dtype, tied_head."""
    for key, value in _FIXED.items():
        if getattr(hf, key) != value:
            raise UnsupportedError(f"GPT-2 with {key} = {getattr(hf, key)}; this version runs {value}")
    if hf.activation_function not in _ACTIVATIONS:
        raise UnsupportedError(
            f"GPT-2 with activation_function = {hf.activation_function}; "
            f"this version runs {', '.join(_ACTIVATIONS)}"
        )
    return ModelConfig(
        family="gpt",
        num_layers=hf.n_layer,
        hidden_size=hf.n_embd,
        num_heads=hf.n_head,
        num_kv_heads=hf.n_head,
        head_size=hf.n_embd // hf.n_head,
        mlp_size=hf.n_inner if hf.n_inner is not None else 4 * hf.n_embd,
        vocab_size=hf.vocab_size,
        max_positions=hf.n_positions,
        norm_eps=hf.layer_norm_epsilon,
        activation=_ACTIVATIONS[hf.activation_function],
        **common,
    )


def rules(config: ModelConfig) -> list[Rule]:
    layer, out = "transformer.h.{i}", "model.layers.{i}"
    return [
        Rule(EMBEDDING, "model.wte"),
        Rule("transformer.wpe.weight", "model.wpe"),
        Rule(f"{layer}.ln_1.weight", f"{out}.input_layernorm.weight"),
        Rule(f"{layer}.ln_1.bias", f"{out}.input_layernorm.bias"),
        Rule(f"{layer}.attn.c_attn.weight", f"{out}.attention.query_key_value.weight"),
        Rule(f"{layer}.attn.c_attn.bias", f"{out}.attention.query_key_value.bias"),
        Rule(f"{layer}.attn.c_proj.weight", f"{out}.attention.dense.weight"),
        Rule(f"{layer}.attn.c_proj.bias", f"{out}.attention.dense.bias"),
        Rule(f"{layer}.ln_2.weight", f"{out}.post_attention_layernorm.weight"),
        Rule(f"{layer}.ln_2.bias", f"{out}.post_attention_layernorm.bias"),
        Rule(f"{layer}.mlp.c_fc.weight", f"{out}.mlp.dense_h_to_4h.weight"),
        Rule(f"{layer}.mlp.c_fc.bias", f"{out}.mlp.dense_h_to_4h.bias"),
        Rule(f"{layer}.mlp.c_proj.weight", f"{out}.mlp.dense_4h_to_h.weight"),
        Rule(f"{layer}.mlp.c_proj.bias", f"{out}.mlp.dense_4h_to_h.bias"),
        Rule("transformer.ln_f.weight", "model.final_layernorm.weight"),
        Rule("transformer.ln_f.bias", "model.final_layernorm.bias"),
        Rule(HEAD, "model.lm_head.weight"),
    ]
