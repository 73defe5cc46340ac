"""GPT-J, CodeGen, Falcon, MPT, GPT-BigCode and GPT-Neo."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from transformers import CodeGenConfig, GPTJConfig, PreTrainedConfig

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
        "activation_function": random.choice(["gelu", "gelu_new", "relu"]),
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
}  # fmt: skip
