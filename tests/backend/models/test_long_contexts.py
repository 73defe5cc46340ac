"""Positions far beyond the training length: every rope scaling and sliding windows against transformers.

Prompts lie before, at and behind the original length, decoding crosses it, and steps of 16 tokens cut each
prompt into chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)

from tests.backend.engine.offline_models import fp32_bound, hf_greedy, offline_engine, prompts_of
from tests.backend.hf_models import randomize
from tridecode.backend.messages import SamplingParams

ORIGINAL = 48  # positions of the training
LONGEST = 4 * ORIGINAL
NEW = 10
BEFORE, AFTER = [10, 43], [48, 97, 150]

LLAMA = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": LONGEST,
}  # fmt: skip
NEOX = {
    "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": LONGEST,
}  # fmt: skip
SHORT, LONG = [1.0, 1.1, 1.3, 1.9], [1.0, 2.0, 3.5, 4.0]


def rope(kind: str, **settings) -> dict[str, Any]:
    named = {"rope_type": kind, "rope_theta": 500.0, **settings}
    if kind in ("yarn", "longrope", "llama3"):
        named["original_max_position_embeddings"] = ORIGINAL
    return {"rope_parameters": named}


#: name -> (transformers' config, its settings)
MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "default": (LlamaConfig, {**LLAMA, **rope("default")}),
    "linear": (LlamaConfig, {**LLAMA, **rope("linear", factor=4.0)}),
    "dynamic": (LlamaConfig, {**LLAMA, **rope("dynamic", factor=4.0), "max_position_embeddings": ORIGINAL}),
    "yarn": (LlamaConfig, {**LLAMA, **rope("yarn", factor=4.0)}),
    "yarn-mscale": (
        LlamaConfig,
        {**LLAMA, **rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.2, beta_fast=8.0, truncate=False)},
    ),
    "longrope": (
        LlamaConfig,
        {**LLAMA, **rope("longrope", short_factor=SHORT, long_factor=LONG, factor=4.0)},
    ),
    "llama3": (
        LlamaConfig,
        {**LLAMA, **rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)},
    ),
    "partial": (GPTNeoXConfig, {**NEOX, **rope("default", partial_rotary_factor=0.25)}),
    "partial-linear": (GPTNeoXConfig, {**NEOX, **rope("linear", factor=4.0, partial_rotary_factor=0.5)}),
    "partial-yarn": (GPTNeoXConfig, {**NEOX, **rope("yarn", factor=4.0, partial_rotary_factor=0.5)}),
    "interleaved": (
        GPTJConfig,
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "n_positions": LONGEST, "vocab_size": 131},
    ),
    "local-and-global": (
        Gemma3TextConfig,
        {
            **LLAMA, "num_hidden_layers": 3, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "window": (MistralConfig, {**LLAMA, **rope("default"), "sliding_window": 20}),
    "window-of-one-block": (MistralConfig, {**LLAMA, **rope("yarn", factor=4.0), "sliding_window": 8}),
}  # fmt: skip
#: transformers rotates all of a longer prompt by its whole length, which the rows of one table cannot do
WHOLE_PROMPT = ("dynamic",)


def model_of(name: str):
    """A new model: transformers' rotary embedding remembers the longest sequence it has seen."""
    config, settings = MODELS[name]
    return randomize(AutoModelForCausalLM.from_config(config(**settings)), 3, scale=0.3)


@pytest.mark.parametrize("name", MODELS)
def test_long_prompts_and_texts_are_those_of_transformers(name: str) -> None:
    model = model_of(name)
    prompts = prompts_of(BEFORE if name in WHOLE_PROMPT else BEFORE + AFTER, model.config.vocab_size)
    offline = offline_engine(model)  # blocks of 8 tokens, steps of 16
    together = offline.generate(prompts, SamplingParams(max_tokens=NEW))
    seen: set[int] = set()
    for prompt, ours in zip(prompts, together):
        tokens, logits = hf_greedy(model_of(name), prompt, NEW)
        seen.update(tokens)
        assert ours.tokens == tokens, len(prompt)
        assert np.abs(np.stack(ours.logits) - logits).max() < fp32_bound(logits), len(prompt)
    assert len(seen) > 8, "the model repeats itself: the test sees nothing"
