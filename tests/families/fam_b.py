"""OPT and XGLM."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import strategies as st
from transformers import OPTConfig, PreTrainedConfig, XGLMConfig

from tests.checkpoints import GELUS, FamilyCase

ACTIVATIONS = ["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"]


def _sizes(random: Random, heads: str, hidden: str, layers: str) -> dict[str, Any]:
    """Odd head counts, and head sizes that no power of two divides."""
    count, size = random.choice([1, 3, 5, 7]), random.choice([5, 6, 8, 10, 16])
    return {heads: count, hidden: count * size, layers: random.randint(1, 4)}


def _draw_opt(random: Random) -> dict[str, Any]:
    sizes = _sizes(random, "num_attention_heads", "hidden_size", "num_hidden_layers")
    return {
        **sizes,
        "ffn_dim": random.choice([20, 51, 88]),
        "activation_function": random.choice(ACTIVATIONS),
        "do_layer_norm_before": random.random() < 0.6,
        "_remove_final_layer_norm": random.random() < 0.3,
        "word_embed_proj_dim": random.choice([None, 9, 24, 130]),
        "enable_bias": random.random() < 0.7,
        "layer_norm_elementwise_affine": random.random() < 0.7,
        "tie_word_embeddings": random.random() < 0.5,
    }


def _draw_xglm(random: Random) -> dict[str, Any]:
    return {
        **_sizes(random, "attention_heads", "d_model", "num_layers"),
        "ffn_dim": random.choice([20, 51, 88]),
        "activation_function": random.choice(ACTIVATIONS),
        "scale_embedding": random.random() < 0.5,
        "pad_token_id": random.choice([None, 0, 1, 2, 5, 40]),
        "tie_word_embeddings": random.random() < 0.5,
    }


def _mlp(hf: PreTrainedConfig) -> int:
    return hf.ffn_dim


def _stored_opt(hf: PreTrainedConfig, state: dict) -> dict:
    """Without the two rows of positions that no position uses."""
    name = "model.decoder.embed_positions.weight"
    return {**state, name: state[name][2:]}


def _fairseq_names(decoder: str, final_norm: str) -> dict[str, str | tuple[str, ...]]:
    """What OPT and XGLM have in common."""
    layer, ours = f"{decoder}.layers.{{i}}", "model.layers.{i}"
    return {
        "model.wte": f"{decoder}.embed_tokens",
        f"{ours}.input_layernorm": f"{layer}.self_attn_layer_norm",
        f"{ours}.attention.query_key_value": tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv"),
        f"{ours}.attention.dense": f"{layer}.self_attn.out_proj",
        f"{ours}.post_attention_layernorm": f"{layer}.final_layer_norm",
        f"{ours}.mlp.dense_h_to_4h": f"{layer}.fc1",
        f"{ours}.mlp.dense_4h_to_h": f"{layer}.fc2",
        "model.final_layernorm": f"{decoder}.{final_norm}",
        "model.lm_head": "lm_head",
    }


CASES = {
    "opt": FamilyCase(
        OPTConfig,
        seed=5,
        settings={
            "hidden_size": 48, "ffn_dim": 72, "num_hidden_layers": 2, "num_attention_heads": 3,
            "max_position_embeddings": 128, "bos_token_id": 2, "eos_token_id": 2,
        },
        model_type="GPT",
        variants={
            "350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 12},
            "plain": {
                "enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu",
                "word_embed_proj_dim": 60, "tie_word_embeddings": False,
            },
            "without-final-norm": {"_remove_final_layer_norm": True, "num_attention_heads": 1},
        },
        shared={"num_attention_heads": 12, "num_hidden_layers": 3},
        draw=_draw_opt,
        names={
            **_fairseq_names("model.decoder", "final_layer_norm"),
            "model.wpe": "model.decoder.embed_positions",
            "model.project_in": "model.decoder.project_in",
            "model.project_out": "model.decoder.project_out",
        },
        heads="apart",
        ini={
            "activation": GELUS,
            "residual": st.sampled_from(["sequential", "post_norm"]),
            "attention_bias": st.booleans(),
            "mlp_bias": st.booleans(),
            "embedding_size": st.integers(1, 20000),
            "final_norm": st.booleans(),
            "norm_weights": st.booleans(),
        },
        mlp_size=_mlp,
        stored=_stored_opt,
    ),
    "xglm": FamilyCase(
        XGLMConfig,
        seed=61,
        settings={
            "d_model": 48, "ffn_dim": 72, "num_layers": 2, "attention_heads": 3,
            "max_position_embeddings": 128,
        },
        model_type="XGLM",
        variants={
            "zero-position": {
                "pad_token_id": 5, "scale_embedding": False, "d_model": 45, "tie_word_embeddings": False,
            },
        },
        shared={"attention_heads": 12, "num_layers": 3},
        draw=_draw_xglm,
        names=_fairseq_names("model", "layer_norm"),
        heads="apart",
        ini={
            "activation": GELUS,
            "scale_embedding": st.booleans(),
            "zero_position": st.integers(-1, 10**6),
        },
        mlp_size=_mlp,
    ),
}  # fmt: skip
