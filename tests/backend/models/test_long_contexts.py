"""Positions far beyond the training length: every rope scaling and sliding windows against transformers.

Prompts lie before, at and behind the original length, decoding crosses it, and steps of 16 tokens cut each
prompt into chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.backend.engine.offline_models import fp32_bound, hf_greedy, offline_engine, prompts_of
from tests.backend.hf_models import model_config, randomize
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.resolved_settings import resolve
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.hf_config import context_note

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
    # as published: max_position_embeddings is the length before the scaling
    "linear-extended": (
        LlamaConfig,
        {**LLAMA, **rope("linear", factor=4.0), "max_position_embeddings": ORIGINAL},
    ),
    "yarn-extended": (
        Qwen2Config,
        {**LLAMA, **rope("yarn", factor=4.0), "max_position_embeddings": ORIGINAL},
    ),
    "yarn-in-between": (
        Qwen3Config,
        {**LLAMA, **rope("yarn", factor=4.0), "head_dim": 8, "max_position_embeddings": ORIGINAL + 10},
    ),
    "partial-linear-extended": (
        GPTNeoXConfig,
        {
            **NEOX, **rope("linear", factor=4.0, partial_rotary_factor=0.5),
            "max_position_embeddings": ORIGINAL,
        },
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


TRAINED = "original_max_position_embeddings"
#: published settings -> (max_position_embeddings, rope settings, what the model is to accept)
CONTEXTS: dict[str, tuple[type[PreTrainedConfig], int, dict[str, Any], int]] = {
    "vicuna-v1.5-16k": (LlamaConfig, 4096, {"type": "linear", "factor": 4.0}, 16384),
    "linear with the trained length": (
        LlamaConfig, 16384, {"type": "linear", "factor": 4.0, TRAINED: 4096}, 16384,
    ),
    "Qwen2.5's recipe": (
        Qwen2Config, 32768, {"type": "yarn", "factor": 4.0, TRAINED: 32768}, 131072,
    ),
    "yarn, scaled already": (
        LlamaConfig, 131072, {"type": "yarn", "factor": 32.0, TRAINED: 4096}, 131072,
    ),
    "Qwen3's recipe": (
        Qwen3Config, 40960, {"type": "yarn", "factor": 4.0, TRAINED: 32768}, 131072,
    ),
    "yarn without the trained length": (LlamaConfig, 4096, {"type": "yarn", "factor": 2.5}, 10240),
    "dynamic": (LlamaConfig, 2048, {"type": "dynamic", "factor": 2.0}, 4096),
    "Llama 3.1": (
        LlamaConfig,
        131072,
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            TRAINED: 8192,
        },
        131072,
    ),
    "Phi-3 128k": (
        Phi3Config,
        131072,
        {
            "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            TRAINED: 4096,
        },
        131072,
    ),
    "no scaling": (LlamaConfig, 4096, {"rope_type": "default"}, 4096),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_context_is_that_of_the_rope_type_and_is_never_multiplied_twice(name: str) -> None:
    kind, stated, scaling, wanted = CONTEXTS[name]
    settings = {**LLAMA, "max_position_embeddings": stated, "rope_scaling": scaling, "pad_token_id": 0}
    assert model_config(kind(**settings)).max_positions == wanted


def test_the_factor_of_gemma_3_is_in_its_max_position_embeddings() -> None:
    config, settings = MODELS["local-and-global"]
    assert model_config(config(**settings)).max_positions == LONGEST


@pytest.mark.parametrize("tokens", [LONGEST + 1, 2 * LONGEST])
def test_more_tokens_than_stated_are_a_warning_where_positions_are_computed(tokens: int, caplog) -> None:
    """transformers computes them, too."""
    model = model_of("default")
    prompt = prompts_of([tokens - NEW], model.config.vocab_size)[0]
    ours = offline_engine(model, max_sequence_tokens=tokens).generate(
        [prompt], SamplingParams(max_tokens=NEW)
    )
    assert ours[0].tokens == hf_greedy(model, prompt, NEW)[0]
    assert f"max_sequence_tokens: {tokens} is beyond the model's {LONGEST} positions" in caplog.text


def test_more_tokens_than_a_learned_table_has_are_refused() -> None:
    config = model_config(GPT2Config(n_embd=16, n_head=2, n_layer=1, n_positions=64, vocab_size=31))
    with pytest.raises(
        ConfigError, match="max_sequence_tokens is 65; .*a learned table, model.wpe, of 64 rows"
    ):
        resolve(EngineConfig(max_sequence_tokens=65), config, torch.device("cpu"))
    assert resolve(EngineConfig(), config, torch.device("cpu")).max_sequence_tokens == 64


def test_more_tokens_than_float32_counts_are_refused() -> None:
    config = model_config(MODELS["default"][0](**MODELS["default"][1]))
    with pytest.raises(ConfigError, match="max_sequence_tokens is 16777217; wanted at most 16777216"):
        resolve(EngineConfig(max_sequence_tokens=(1 << 24) + 1), config, torch.device("cpu"))


def test_an_extended_context_is_said_with_the_option_that_changes_it() -> None:
    config, settings = MODELS["yarn-extended"]
    note = context_note(config(**settings), LONGEST)
    assert note.startswith("context: 192 tokens with rope scaling (max_position_embeddings is 48)")
    assert "--set max_sequence_tokens=N" in note
    assert context_note(config(**settings), ORIGINAL) == ""
