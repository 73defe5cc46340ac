"""GPT-J, CodeGen, Falcon, MPT, GPT-BigCode and GPT-Neo."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st
from transformers import (
    CodeGenConfig,
    FalconConfig,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    MptConfig,
    PreTrainedConfig,
)

from tests.checkpoints import GELUS, ROPE, FamilyCase


def _draw_gptj(random: Random) -> dict[str, Any]:
    heads, size = random.choice([1, 3, 5, 7]), random.choice([6, 8, 10, 16])
    return {
        "n_head": heads,
        "n_embd": heads * size,
        "n_layer": random.randint(1, 4),
        "n_inner": random.choice([None, 52, 77]),
        "rotary_dim": 2 * random.randint(1, size // 2),
        "layer_norm_epsilon": random.choice([1e-5, 1e-3]),
        "activation_function": random.choice(["gelu", "gelu_new", "relu", "silu"]),
        "tie_word_embeddings": random.random() < 0.5,
    }


def _draw_codegen(random: Random) -> dict[str, Any]:
    size = random.choice([6, 8, 10])
    heads = random.choice([4, 8, 12])
    rotary = 2 * random.randint(1, size // 2)
    return {**_draw_gptj(random), "n_head": heads, "n_embd": heads * size, "rotary_dim": rotary}


def _codegen_heads(hf: PreTrainedConfig, *qkv: np.ndarray) -> tuple[np.ndarray, ...]:
    """Four blocks, in each the queries, values and keys of a quarter of the heads."""
    q, k, v = (np.split(part, 4, axis=1) for part in qkv)
    return (np.concatenate([part for block in zip(q, v, k) for part in block], axis=1),)


def _grouped_heads(hf: PreTrainedConfig, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray]:
    """Join the rows by KV head: the queries of its group, its key, its value."""
    size = hf.hidden_size // hf.num_attention_heads
    groups = k.shape[1] // size
    by_group = [part.reshape(part.shape[0], groups, -1) for part in (q, k, v)]
    return (np.concatenate(by_group, axis=2).reshape(q.shape[0], -1),)


def _falcon_kv_heads(hf: PreTrainedConfig) -> int:
    return 1 if hf.multi_query and not hf.new_decoder_architecture else hf.num_kv_heads


def _draw_falcon(random: Random) -> dict[str, Any]:
    kv_heads, group = random.choice([1, 2, 3]), random.choice([1, 2, 3, 5])
    heads, new, parallel = kv_heads * group, random.random() < 0.5, random.random() < 0.5
    alibi = random.random() < 0.4
    return {
        "num_attention_heads": heads,
        "hidden_size": heads * random.choice([6, 8, 10, 16]),
        "num_hidden_layers": random.randint(1, 4),
        "ffn_hidden_size": random.choice([None, 51, 88]),
        "new_decoder_architecture": new,
        "num_kv_heads": kv_heads if new else None,
        "num_ln_in_parallel_attn": random.choice([None, 1, 2]) if new else random.choice([None, 1]),
        "parallel_attn": new or parallel,
        "multi_query": random.random() < 0.5,
        "bias": random.random() < 0.5,
        "alibi": alibi,
        "activation": random.choice(["gelu", "gelu_new", "relu", "silu"]),
        "layer_norm_epsilon": random.choice([1e-5, 1e-3]),
        "rope_parameters": {"rope_type": "default", "rope_theta": random.choice([100.0, 10000.0])},
        "tie_word_embeddings": random.random() < 0.5,
    }


def _draw_bigcode(random: Random) -> dict[str, Any]:
    heads = random.choice([1, 3, 5, 7])
    return {
        "n_head": heads,
        "n_embd": heads * random.choice([6, 8, 10, 16]),
        "n_layer": random.randint(1, 4),
        "n_inner": random.choice([None, 52, 77]),
        "multi_query": random.random() < 0.5,
        "scale_attn_weights": random.random() < 0.7,
        "activation_function": random.choice(["gelu", "gelu_pytorch_tanh", "relu"]),
        "tie_word_embeddings": random.random() < 0.5,
    }


def _draw_mpt(random: Random) -> dict[str, Any]:
    """Draw a config, with the settings that transformers omits."""
    heads = random.choice([1, 3, 5, 7, 12])
    return {
        "n_heads": heads,
        "d_model": heads * random.choice([6, 8, 10, 16]),
        "n_layers": random.randint(1, 4),
        "expansion_ratio": random.choice([2, 4]),
        "no_bias": random.random() < 0.5,
        "logit_scale": random.choice([None, 0.5, "inv_sqrt_d_model"]),
        "layer_norm_epsilon": random.choice([1e-5, 1e-3]),
        "attn_config": {
            "clip_qkv": random.choice([None, 0.8, 3.0]),
            "softmax_scale": random.choice([None, 0.2]),
            "alibi": random.random() < 0.5,
            "alibi_bias_max": random.choice([8, 16]),
            "qk_ln": random.random() < 0.5,
        },
        "tie_word_embeddings": random.random() < 0.5,
    }


def _draw_gpt_neo(random: Random) -> dict[str, Any]:
    heads, layers = random.choice([1, 3, 5, 7]), random.randint(1, 4)
    return {
        "num_heads": heads,
        "hidden_size": heads * random.choice([6, 8, 10, 16]),
        "num_layers": layers,
        "attention_types": [[[random.choice(["global", "local"])], 1] for _ in range(layers)],
        "window_size": random.choice([1, 4, 9, 256]),
        "intermediate_size": random.choice([None, 52, 77]),
        "activation_function": random.choice(["gelu", "gelu_new", "relu", "silu"]),
        "tie_word_embeddings": random.random() < 0.5,
    }


GPTJ_NAMES: dict[str, str | tuple[str, ...]] = {
    "model.wte": "transformer.wte",
    "model.layers.{i}.input_layernorm": "transformer.h.{i}.ln_1",
    "model.layers.{i}.attention.dense": "transformer.h.{i}.attn.out_proj",
    "model.layers.{i}.mlp.dense_h_to_4h": "transformer.h.{i}.mlp.fc_in",
    "model.layers.{i}.mlp.dense_4h_to_h": "transformer.h.{i}.mlp.fc_out",
    "model.final_layernorm": "transformer.ln_f",
    "model.lm_head": "lm_head",
}
GPTJ_INI = {"activation": GELUS, "rope": ROPE.map(lambda rope: replace(rope, interleaved=True))}
GPTJ_SETTINGS = {"n_layer": 2, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}


GPT2_NAMES: dict[str, str | tuple[str, ...]] = {
    "model.wte": "transformer.wte",
    "model.wpe": "transformer.wpe",
    "model.layers.{i}.input_layernorm": "transformer.h.{i}.ln_1",
    "model.layers.{i}.post_attention_layernorm": "transformer.h.{i}.ln_2",
    "model.layers.{i}.mlp.dense_h_to_4h": "transformer.h.{i}.mlp.c_fc",
    "model.layers.{i}.mlp.dense_4h_to_h": "transformer.h.{i}.mlp.c_proj",
    "model.final_layernorm": "transformer.ln_f",
    "model.lm_head": "lm_head",
}

CASES = {
    "gptj": FamilyCase(
        GPTJConfig,
        seed=2,
        settings={"n_embd": 48, "n_head": 3, "rotary_dim": 4, **GPTJ_SETTINGS},
        model_type="GPT-J",
        variants={
            "whole-tied": {"rotary_dim": 16, "tie_word_embeddings": True, "n_inner": 77},
            "erf": {"n_embd": 80, "n_head": 5, "activation_function": "gelu"},
        },
        shared={"n_head": 12, "n_embd": 96, "n_layer": 3},
        draw=_draw_gptj,
        names={
            **GPTJ_NAMES,
            "model.layers.{i}.attention.query_key_value": (
                "transformer.h.{i}.attn.q_proj",
                "transformer.h.{i}.attn.k_proj",
                "transformer.h.{i}.attn.v_proj",
            ),
        },
        heads="apart",
        ini=GPTJ_INI,
    ),
    "codegen": FamilyCase(
        CodeGenConfig,
        seed=3,
        settings={"n_embd": 64, "n_head": 4, "rotary_dim": 8, **GPTJ_SETTINGS},
        model_type="GPT-J",
        variants={},
        shared={"n_head": 12, "n_embd": 96, "n_layer": 3},
        draw=_draw_codegen,
        names={
            **GPTJ_NAMES,
            "model.layers.{i}.attention.query_key_value": "transformer.h.{i}.attn.qkv_proj",
        },
        heads=_codegen_heads,
        ini=GPTJ_INI,
    ),
    "falcon": FamilyCase(
        FalconConfig,
        seed=2,
        settings={
            "hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "bos_token_id": 0,
            "eos_token_id": 0, "max_position_embeddings": 128,
        },
        model_type="Falcon",
        variants={
            "40b": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 77},
            "one-norm-bias": {
                "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1,
                "bias": True,
            },
            "sequential-alibi": {
                "alibi": True, "parallel_attn": False, "multi_query": False, "bias": True,
                "num_attention_heads": 12, "tie_word_embeddings": False,
            },
            "alibi-40b": {
                "alibi": True, "new_decoder_architecture": True, "num_attention_heads": 12, "num_kv_heads": 4,
            },
        },
        shared={
            "num_attention_heads": 12, "hidden_size": 96, "num_hidden_layers": 3, "num_kv_heads": 4,
            "new_decoder_architecture": True, "bias": True,
        },
        draw=_draw_falcon,
        names={
            "model.wte": "transformer.word_embeddings",
            "model.layers.{i}.input_layernorm": "transformer.h.{i}.input_layernorm",
            "model.layers.{i}.ln_attn": "transformer.h.{i}.ln_attn",
            "model.layers.{i}.ln_mlp": "transformer.h.{i}.ln_mlp",
            "model.layers.{i}.attention.query_key_value": "transformer.h.{i}.self_attention.query_key_value",
            "model.layers.{i}.attention.dense": "transformer.h.{i}.self_attention.dense",
            "model.layers.{i}.post_attention_layernorm": "transformer.h.{i}.post_attention_layernorm",
            "model.layers.{i}.mlp.dense_h_to_4h": "transformer.h.{i}.mlp.dense_h_to_4h",
            "model.layers.{i}.mlp.dense_4h_to_h": "transformer.h.{i}.mlp.dense_4h_to_h",
            "model.final_layernorm": "transformer.ln_f",
            "model.lm_head": "lm_head",
        },
        heads=_grouped_heads,
        kv_heads=_falcon_kv_heads,
        mlp_size=lambda hf: hf.ffn_hidden_size,
        ini={
            "num_kv_heads": st.integers(1, 12), "activation": GELUS, "rope": ROPE | st.none(),
            "residual": st.sampled_from(["parallel", "sequential"]), "mlp_norm": st.booleans(),
        },
    ),
    "gpt_bigcode": FamilyCase(
        GPTBigCodeConfig,
        seed=2,
        settings={
            "n_embd": 40, "n_head": 5, "n_layer": 2, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0,
        },
        model_type="GPT-BigCode",
        variants={
            "all-heads": {"multi_query": False, "tie_word_embeddings": False, "n_inner": 77},
            "unscaled": {"scale_attn_weights": False, "activation_function": "gelu"},
        },
        shared={"n_head": 12, "n_embd": 48, "n_layer": 3},
        draw=_draw_bigcode,
        names={
            **GPT2_NAMES,
            "model.layers.{i}.attention.query_key_value": "transformer.h.{i}.attn.c_attn",
            "model.layers.{i}.attention.dense": "transformer.h.{i}.attn.c_proj",
        },
        heads=_grouped_heads,
        kv_heads=lambda hf: 1 if hf.multi_query else hf.n_head,
        ini={
            "num_kv_heads": st.integers(1, 12), "activation": GELUS,
            "attention_scale": st.none() | st.floats(0.01, 2.0),
        },
    ),
    "mpt": FamilyCase(
        MptConfig,
        seed=2,
        settings={
            "d_model": 40, "n_heads": 5, "n_layers": 2, "max_seq_len": 128, "bos_token_id": 0,
            "eos_token_id": 0,
        },
        model_type="MPT",
        variants={
            "clipped": {"attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.3}},
            "12-heads-untied": {"d_model": 72, "n_heads": 12, "tie_word_embeddings": False},
        },
        shared={"n_heads": 12, "d_model": 48, "n_layers": 3},
        draw=_draw_mpt,
        names={
            "model.wte": "transformer.wte",
            "model.layers.{i}.input_layernorm": "transformer.blocks.{i}.norm_1",
            "model.layers.{i}.attention.query_key_value": "transformer.blocks.{i}.attn.Wqkv",
            "model.layers.{i}.attention.dense": "transformer.blocks.{i}.attn.out_proj",
            "model.layers.{i}.post_attention_layernorm": "transformer.blocks.{i}.norm_2",
            "model.layers.{i}.mlp.dense_h_to_4h": "transformer.blocks.{i}.ffn.up_proj",
            "model.layers.{i}.mlp.dense_4h_to_h": "transformer.blocks.{i}.ffn.down_proj",
            "model.final_layernorm": "transformer.norm_f",
            "model.lm_head": "lm_head",
        },
        heads="joined",
        ini={
            "attention_scale": st.none() | st.floats(0.01, 2.0), "alibi_bias_max": st.floats(1.0, 32.0),
            "qkv_limit": st.floats(0.0, 8.0),
        },
    ),
    "gpt_neo": FamilyCase(
        GPTNeoConfig,
        seed=2,
        settings={
            "hidden_size": 40, "num_heads": 5, "num_layers": 2, "max_position_embeddings": 128,
            "attention_types": [[["global", "local"], 1]], "window_size": 7, "bos_token_id": 0,
            "eos_token_id": 0,
        },
        model_type="GPT-Neo",
        variants={"global-untied": {
            "attention_types": [[["global"], 2]], "intermediate_size": 77, "tie_word_embeddings": False,
        }},
        shared={
            "num_heads": 12, "hidden_size": 48, "num_layers": 3, "attention_types": [[["local"], 3]],
        },
        draw=_draw_gpt_neo,
        names={
            **GPT2_NAMES,
            "model.layers.{i}.attention.query_key_value": (
                "transformer.h.{i}.attn.attention.q_proj",
                "transformer.h.{i}.attn.attention.k_proj",
                "transformer.h.{i}.attn.attention.v_proj",
            ),
            "model.layers.{i}.attention.dense": "transformer.h.{i}.attn.attention.out_proj",
        },
        heads="apart",
        ini={
            "activation": GELUS, "num_layers": st.just(3),
            "windows": st.just(()) | st.tuples(*[st.integers(0, 5000)] * 3),
        },
    ),
}  # fmt: skip
