"""OPT, XGLM, Phi, Baichuan and StableLM."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import strategies as st
from transformers import OPTConfig, PhiConfig, PreTrainedConfig, StableLmConfig, XGLMConfig

from tests.baichuan import BaichuanConfig
from tests.checkpoints import GELUS, LLAMA3_ROPE, ROPE, FamilyCase

ACTIVATIONS = ["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"]


def _sizes(random: Random, heads: str, hidden: str, layers: str) -> dict[str, Any]:
    """Odd head counts, and head sizes that no power of two divides."""
    count, size = random.choice([1, 3, 5, 7]), random.choice([5, 6, 8, 10, 16])
    return {heads: count, hidden: count * size, layers: random.randint(1, 4)}


def _draw_opt(random: Random) -> dict[str, Any]:
    # small: layers with post-norm and wide-drawn weights amplify rounding, in transformers as here
    heads, size = random.choice([1, 3, 5, 7]), random.choice([5, 6, 8])
    return {
        "num_attention_heads": heads,
        "hidden_size": heads * size,
        "num_hidden_layers": random.randint(1, 3),
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


def _partial_rope(random: Random, size: int) -> dict[str, Any]:
    """An even number of rotated dimensions of `size`."""
    factor = (2 * random.randint(1, size // 2) + 0.1) / size
    scaling = random.choice(
        [
            {"rope_type": "default", "rope_theta": 1e4},
            {
                "rope_type": "linear",
                "rope_theta": 100.0,
                "factor": 3.0,
            },
            {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32},
            LLAMA3_ROPE,
        ]
    )
    return {"rope_parameters": {**scaling, "partial_rotary_factor": min(factor, 1.0)}}


def _draw_phi(random: Random) -> dict[str, Any]:
    kv_heads, group = random.choice([1, 2, 3]), random.choice([1, 2, 3, 5])
    size = random.choice([5, 6, 8, 10])
    return {
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "hidden_size": kv_heads * group * size,
        "intermediate_size": random.choice([20, 51, 88]),
        "num_hidden_layers": random.randint(1, 4),
        "hidden_act": random.choice(ACTIVATIONS),
        "qk_layernorm": random.random() < 0.5,
        "layer_norm_eps": random.choice([1e-5, 1e-3]),
        **_partial_rope(random, size),
        "tie_word_embeddings": random.random() < 0.5,
    }


def _draw_baichuan(random: Random) -> dict[str, Any]:
    positions = random.choice(["max_position_embeddings", "model_max_length"])  # rotary, ALiBi
    heads, size = random.choice([1, 3, 5, 7]), random.choice([6, 8, 10, 16])
    return {
        "num_attention_heads": heads,
        "hidden_size": heads * size,
        "num_hidden_layers": random.randint(1, 4),
        "intermediate_size": random.choice([20, 51, 88]),
        "rms_norm_eps": random.choice([1e-6, 1e-5]),
        "max_position_embeddings": None,
        positions: 128,
        "rope_theta": random.choice([100.0, 10000.0]),
        "tie_word_embeddings": random.random() < 0.5,
    }


def _draw_stablelm(random: Random) -> dict[str, Any]:
    shared = {key: value for key, value in _draw_phi(random).items() if key != "hidden_act"}
    return {
        **shared,
        "hidden_act": random.choice(["silu", "gelu", "gelu_pytorch_tanh"]),
        "use_qkv_bias": random.random() < 0.5,
        "use_parallel_residual": random.random() < 0.5,
    }


def _stored_stablelm(hf: PreTrainedConfig, state: dict) -> dict:
    """Without the norms of heads, which share a file; the engine's tests see them."""
    return {name: array for name, array in state.items() if "_layernorm.norms." not in name}


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
                "word_embed_proj_dim": 12, "tie_word_embeddings": False,
            },
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
    "phi": FamilyCase(
        PhiConfig,
        seed=51,
        settings={
            "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 3,
            "max_position_embeddings": 128,
        },
        model_type="Phi",
        variants={
            "norms-tied": {"qk_layernorm": True, "tie_word_embeddings": True, "num_attention_heads": 6,
                "num_key_value_heads": 2},
        },
        shared={"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 3,
            "qk_layernorm": True},
        draw=_draw_phi,
        names={
            "model.wte": "model.embed_tokens",
            "model.layers.{i}.input_layernorm": "model.layers.{i}.input_layernorm",
            "model.layers.{i}.attention.query_key_value": tuple(
                f"model.layers.{{i}}.self_attn.{name}_proj" for name in "qkv"
            ),
            "model.layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_layernorm",
            "model.layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_layernorm",
            "model.layers.{i}.attention.dense": "model.layers.{i}.self_attn.dense",
            "model.layers.{i}.mlp.dense_h_to_4h": "model.layers.{i}.mlp.fc1",
            "model.layers.{i}.mlp.dense_4h_to_h": "model.layers.{i}.mlp.fc2",
            "model.final_layernorm": "model.final_layernorm",
            "model.lm_head": "lm_head",
        },
        heads="apart",
        ini={
            "hidden_size": st.integers(1, 20000),
            "num_kv_heads": st.integers(1, 12),
            "activation": GELUS,
            "rope": ROPE,
            "head_norms": st.booleans(),
        },
    ),
    "baichuan": FamilyCase(
        BaichuanConfig,
        seed=5,
        settings={
            "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 3,
            "max_position_embeddings": 128,
        },
        model_type="Baichuan",
        variants={
            "13b": {"max_position_embeddings": None, "model_max_length": 128, "num_attention_heads": 6},
        },
        shared={
            "num_attention_heads": 12, "num_hidden_layers": 3, "max_position_embeddings": None,
            "model_max_length": 128,
        },
        draw=_draw_baichuan,
        names={
            "model.wte": "model.embed_tokens",
            "model.layers.{i}.input_layernorm": "model.layers.{i}.input_layernorm",
            "model.layers.{i}.attention.query_key_value": "model.layers.{i}.self_attn.W_pack",
            "model.layers.{i}.attention.dense": "model.layers.{i}.self_attn.o_proj",
            "model.layers.{i}.post_attention_layernorm": "model.layers.{i}.post_attention_layernorm",
            "model.layers.{i}.mlp.gate_proj": "model.layers.{i}.mlp.gate_proj",
            "model.layers.{i}.mlp.up_proj": "model.layers.{i}.mlp.up_proj",
            "model.layers.{i}.mlp.down_proj": "model.layers.{i}.mlp.down_proj",
            "model.final_layernorm": "model.norm",
            "model.lm_head": "lm_head",
        },
        heads="joined",
        ini={"activation": st.just("silu"), "rope": st.none() | ROPE},
    ),
    "stablelm": FamilyCase(
        StableLmConfig,
        seed=18,
        settings={
            "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 3,
            "num_key_value_heads": 3, "max_position_embeddings": 128, "partial_rotary_factor": 0.5,
        },
        model_type="StableLM",
        variants={
            "12b": {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True,
                "num_attention_heads": 6, "num_key_value_heads": 2},
        },
        shared={"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 3,
            "qk_layernorm": True},
        draw=_draw_stablelm,
        names={
            "model.wte": "model.embed_tokens",
            "model.layers.{i}.input_layernorm": "model.layers.{i}.input_layernorm",
            "model.layers.{i}.attention.query_key_value": tuple(
                f"model.layers.{{i}}.self_attn.{name}_proj" for name in "qkv"
            ),
            "model.layers.{i}.attention.dense": "model.layers.{i}.self_attn.o_proj",
            "model.layers.{i}.post_attention_layernorm": "model.layers.{i}.post_attention_layernorm",
            "model.layers.{i}.mlp.gate_proj": "model.layers.{i}.mlp.gate_proj",
            "model.layers.{i}.mlp.up_proj": "model.layers.{i}.mlp.up_proj",
            "model.layers.{i}.mlp.down_proj": "model.layers.{i}.mlp.down_proj",
            "model.final_layernorm": "model.norm",
            "model.lm_head": "lm_head",
        },
        heads="apart",
        ini={
            "hidden_size": st.integers(1, 20000),
            "num_kv_heads": st.integers(1, 12),
            "activation": st.sampled_from(["silu", "gelu", "gelu_tanh"]),
            "rope": ROPE,
            "residual": st.sampled_from(["sequential", "parallel"]),
            "attention_bias": st.booleans(),
            "head_norms": st.booleans(),
        },
        stored=_stored_stablelm,
    ),
}  # fmt: skip
