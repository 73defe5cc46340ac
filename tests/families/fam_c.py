"""LLaMA's kin: Mistral, Qwen2, Qwen3, Phi-3, Gemma 1 to 3."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.checkpoints import FAMILIES, LLAMA3_ROPE, ROPE, FamilyCase

LLAMA = FAMILIES["llama"]
SETTINGS = {
    "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
SHARED = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 3}
GATES = ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh"]
LAYER_TYPES = ["full_attention", "sliding_attention"]
LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


def longrope(size: int, original: int = 24) -> dict[str, Any]:
    """Of `size` rotated dimensions."""
    return {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0 + 0.1 * i for i in range(size // 2)],
        "long_factor": [1.0 + 0.7 * i for i in range(size // 2)],
        "original_max_position_embeddings": original,
        "factor": 4.0,
    }


def _shape(random: Random, act: str = "hidden_act") -> dict[str, Any]:
    """Odd sizes. A window is of 2 tokens or more: transformers' cache keeps all tokens of a window of 1."""
    kv_heads, group = random.choice([(1, 1), (3, 1), (5, 1), (7, 1), (1, 3), (1, 5), (1, 7), (2, 3), (3, 2)])
    layers = random.randint(1, 4)
    return {
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": random.choice([4, 6, 10, 16]),
        "hidden_size": kv_heads * group * max(random.choice([2, 4, 7]), -(-12 // (kv_heads * group))),
        "intermediate_size": random.choice([19, 51, 88]),
        "num_hidden_layers": layers,
        "rms_norm_eps": random.choice([1e-6, 1e-5, 1e-2]),
        "tie_word_embeddings": random.random() < 0.5,
        "vocab_size": random.choice([331, 127, 256]),
        act: random.choice(GATES),
    }


def _rope(random: Random, size: int) -> dict[str, Any]:
    theta = random.choice([100.0, 10000.0, 500000.0])
    plain = {"rope_type": "default", "rope_theta": theta}
    dynamic = {"rope_type": "dynamic", "rope_theta": theta, "factor": 2.5}
    truncated = {**YARN, "truncate": False, "beta_fast": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9}
    forms = [plain, {**LINEAR, "rope_theta": theta}, LLAMA3_ROPE, YARN, truncated, longrope(size), dynamic]
    return random.choice(forms)


def _draw_mistral(random: Random) -> dict[str, Any]:
    shape = _shape(random)
    return {
        **shape,
        "sliding_window": random.choice([None, 2, 5, 16, 4096]),
        "rope_parameters": _rope(random, shape["head_dim"]),
    }


def _draw_qwen(random: Random, **own) -> dict[str, Any]:
    shape = _shape(random)
    layers = shape["num_hidden_layers"]
    kinds = [random.choice(LAYER_TYPES) for _ in range(layers)]
    return {
        **shape,
        "use_sliding_window": random.random() < 0.7,
        "sliding_window": random.choice([2, 5, 16, 4096]),
        "max_window_layers": random.randint(0, layers),
        **random.choice([{}, {"layer_types": kinds, "use_sliding_window": True}]),
        "rope_parameters": _rope(random, shape["head_dim"]),
        **own,
    }


def _draw_qwen3(random: Random) -> dict[str, Any]:
    return _draw_qwen(random, attention_bias=random.random() < 0.5)


def _draw_phi3(random: Random) -> dict[str, Any]:
    """Phi-3 has no head_dim; an odd number of rotated dimensions is rounded up."""
    shape = _shape(random)
    size = shape.pop("head_dim")
    rotated = random.choice([size, size, 2 * random.randint(1, size // 2), random.randint(1, size - 1)])
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": random.choice([100.0, 10000.0])}
    if rotated % 2 == 0 and random.random() < 0.7:
        original = random.choice([5, 20, 24])
        rope = longrope(rotated, original)
    return {
        **shape,
        "hidden_size": shape["num_attention_heads"] * size,
        "sliding_window": random.choice([None, None, 5, 16, 4096]),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", 128),
        "rope_parameters": {**rope, "partial_rotary_factor": min((rotated + 0.1) / size, 1.0)},
    }


def _draw_gemma(random: Random) -> dict[str, Any]:
    shape = _shape(random)
    return {
        **shape,
        "attention_bias": random.random() < 0.3,
        "rope_parameters": _rope(random, shape["head_dim"]),
    }


def _draw_gemma2(random: Random) -> dict[str, Any]:
    shape = _shape(random, "hidden_activation")
    kinds = [random.choice(LAYER_TYPES) for _ in range(shape["num_hidden_layers"])]
    return {
        **shape,
        "attention_bias": random.random() < 0.3,
        "query_pre_attn_scalar": random.choice([3, 16, 144]),
        "sliding_window": random.choice([2, 5, 16, 4096]),
        **random.choice([{}, {"layer_types": kinds}]),
        "attn_logit_softcapping": random.choice([None, 2.0, 50.0]),
        "final_logit_softcapping": random.choice([None, 5.0, 30.0]),
        "rope_parameters": _rope(random, shape["head_dim"]),
    }


def _draw_gemma3(random: Random) -> dict[str, Any]:
    settings = _draw_gemma2(random)
    size = settings["head_dim"]
    ropes = {kind: _rope(random, size) for kind in LAYER_TYPES}
    return {**settings, **random.choice([{}, {"sliding_window_pattern": 2}]), "rope_parameters": ropes}


def one_more(hf: PreTrainedConfig, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gemma's norms scale by 1 + w."""
    one = np.float32(1)
    return {name: one + value if name.endswith("norm.weight") else value for name, value in state.items()}


WINDOWS = st.just(()) | st.lists(st.integers(0, 9999), min_size=3, max_size=3).map(tuple)
INI = {**LLAMA.ini, "activation": st.sampled_from(["silu", "gelu_tanh", "gelu"])}
WINDOWED = {**INI, "num_layers": st.just(3), "windows": WINDOWS}
HEAD_NORMS = {
    f"model.layers.{{i}}.attention.{name}": f"model.layers.{{i}}.self_attn.{name}"
    for name in ("q_norm", "k_norm")
}
OUTER_NORMS = {
    f"model.layers.{{i}}.{name}": f"model.layers.{{i}}.{name}"
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
}
CAPPED = {
    **WINDOWED,
    "query_scalar": st.floats(0.1, 1e4),
    "attention_softcap": st.floats(0, 100),
    "logit_softcap": st.floats(0, 100),
}
GEMMA = {**SETTINGS, "head_dim": 16, "num_key_value_heads": 3}

CASES = {
    "mistral": FamilyCase(
        MistralConfig,
        seed=6,
        settings={**SETTINGS, "sliding_window": 8},
        model_type="Mistral",
        variants={
            "all-tokens": {"sliding_window": None, "head_dim": 10, "hidden_act": "gelu"},
            "longrope": {"rope_parameters": longrope(8)},
        },
        shared=SHARED,
        draw=_draw_mistral,
        names=LLAMA.names,
        heads="apart",
        ini=WINDOWED,
    ),
    "qwen2": FamilyCase(
        Qwen2Config,
        seed=2,
        settings={
            **SETTINGS, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
        },
        model_type="Qwen2",
        variants={
            "one-kv-tied": {
                "use_sliding_window": False, "num_attention_heads": 5, "num_key_value_heads": 1,
                "hidden_size": 40, "tie_word_embeddings": True,
            },
        },
        shared=SHARED,
        draw=_draw_qwen,
        names=LLAMA.names,
        heads="apart",
        ini={**WINDOWED, "dense_bias": st.just(False)},
    ),
    "qwen3": FamilyCase(
        Qwen3Config,
        seed=3,
        settings={**SETTINGS, "head_dim": 10},
        model_type="Qwen3",
        variants={
            "biases-windows": {
                "attention_bias": True, "use_sliding_window": True, "sliding_window": 6,
                "layer_types": LAYER_TYPES[::-1], "tie_word_embeddings": True,
            },
        },
        shared=SHARED,
        draw=_draw_qwen3,
        names={**LLAMA.names, **HEAD_NORMS},
        heads="apart",
        ini=WINDOWED,
    ),
    "phi3": FamilyCase(
        Phi3Config,
        seed=3,
        settings={
            **SETTINGS, "rope_parameters": {
                "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
            },
        },
        model_type="Phi-3",
        variants={
            "longrope-window": {
                "original_max_position_embeddings": 24, "sliding_window": 20,
                "rope_parameters": {**longrope(8), "partial_rotary_factor": 1.0},
            },
            "one-head": {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 10,
                "intermediate_size": 33, "rope_parameters": {
                    "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
                }},
        },
        shared={"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96,
            "num_hidden_layers": 3},
        draw=_draw_phi3,
        names={
            **LLAMA.names,
            "model.layers.{i}.attention.query_key_value": "model.layers.{i}.self_attn.qkv_proj",
            "model.layers.{i}.mlp.gate_proj": "model.layers.{i}.mlp.gate_up_proj#0",
            "model.layers.{i}.mlp.up_proj": "model.layers.{i}.mlp.gate_up_proj#1",
        },
        heads="joined",
        ini=WINDOWED,
    ),
    "gemma": FamilyCase(
        GemmaConfig,
        seed=5,
        settings=GEMMA,
        model_type="Gemma",
        variants={"untied-biases": {"tie_word_embeddings": False, "attention_bias": True}},
        shared=SHARED,
        draw=_draw_gemma,
        names=LLAMA.names,
        heads="apart",
        ini=INI,
        stored=one_more,
        norm_centre=0.0,
    ),
    "gemma2": FamilyCase(
        Gemma2Config,
        seed=1,
        settings={
            **GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 20.0,
            "tie_word_embeddings": False,
        },
        model_type="Gemma2",
        variants={
            "uncapped": {
                "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True,
                "layer_types": LAYER_TYPES,
            },
        },
        shared=SHARED,
        draw=_draw_gemma2,
        names={**LLAMA.names, **OUTER_NORMS},
        heads="apart",
        ini={**CAPPED, "residual": st.just("sandwich")},
        stored=one_more,
        norm_centre=0.0,
    ),
    "gemma3_text": FamilyCase(
        Gemma3TextConfig,
        seed=1,
        settings={
            **GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2,
            "tie_word_embeddings": False,
        },
        model_type="Gemma3",
        variants={
            "scaled": {
                "layer_types": LAYER_TYPES, "final_logit_softcapping": 20.0, "attention_bias": True,
                "rope_parameters": {
                    "full_attention": LINEAR,
                    "sliding_attention": {**YARN, "truncate": False, "beta_fast": 4.0},
                },
            },
        },
        shared=SHARED,
        draw=_draw_gemma3,
        names={**LLAMA.names, **OUTER_NORMS, **HEAD_NORMS},
        heads="apart",
        ini={**CAPPED, "residual": st.just("sandwich"), "local_rope": ROPE},
        stored=one_more,
        norm_centre=0.0,
    ),
}  # fmt: skip
