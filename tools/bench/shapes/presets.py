"""Shapes of well-known models, for runs with random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.model_config import ModelConfig, RopeConfig
from tridecode.backend.weights.quantization import ROUNDED

#: `--quantization`: formats of the matrices of a preset's layers
QUANTIZATIONS = ROUNDED


@dataclass(frozen=True)
class Preset:
    """A model's shape and the dtype it is usually served in on a GPU."""

    model: ModelConfig
    dtype: str


def _bloom(name: str, hidden: int, layers: int, heads: int, vocab: int = 250880) -> ModelConfig:
    return ModelConfig(
        family="bloom",
        model_name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        mlp_size=4 * hidden,
        vocab_size=vocab,
        max_positions=2048,
        norm_eps=1e-5,
        start_id=1,
        end_id=2,
    )


_LLAMA3_8B = ModelConfig(
    family="llama",
    model_name="llama-3-8b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    mlp_size=14336,
    vocab_size=128256,
    max_positions=8192,
    norm_eps=1e-5,
    start_id=128000,
    end_id=128001,
    activation="silu",
    rope=RopeConfig(size=128, theta=500000.0),
    attention_bias=False,
    mlp_bias=False,
    tied_head=False,
)
_SMOLLM2 = replace(
    _LLAMA3_8B,
    model_name="smollm2-135m",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    mlp_size=1536,
    vocab_size=49152,
    start_id=1,
    end_id=2,
    rope=RopeConfig(size=64, theta=100000.0),
    tied_head=True,
)
_GPT2 = ModelConfig(
    family="gpt",
    model_name="gpt2",
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    num_kv_heads=12,
    head_size=64,
    mlp_size=3072,
    vocab_size=50257,
    max_positions=1024,
    norm_eps=1e-5,
    start_id=50256,
    end_id=50256,
)

PRESETS = {
    "bloom-7b1": Preset(_bloom("bloom-7b1", 4096, 30, 32), "fp16"),
    "bloom-560m": Preset(_bloom("bloom-560m", 1024, 24, 16), "fp16"),
    "llama-3-8b": Preset(_LLAMA3_8B, "bf16"),
    "smollm2-135m": Preset(_SMOLLM2, "bf16"),
    "gpt2": Preset(_GPT2, "fp16"),
    # a benchmark of it takes seconds on any machine
    "toy": Preset(_bloom("toy", 64, 2, 4, vocab=1024), "fp32"),
}


#: presets of family_presets.py, which imports torch: one that is unknown is to be refused before that
FAMILY_PRESETS = (
    "llama-3.2-1b",
    "mistral-7b",
    "qwen2-7b",
    "qwen3-8b",
    "gemma-2-9b",
    "gemma-3-4b",
    "phi-3-mini",
    "falcon-7b",
    "gpt-j-6b",
    "gpt-neox-20b",
    "opt-6.7b",
    "mpt-7b",
    "baichuan2-7b",
)


def check_preset(name: str) -> None:
    """Raises ConfigError for an unknown name."""
    if name not in PRESETS and name not in FAMILY_PRESETS:
        raise ConfigError(f"no preset {name!r}; wanted one of {', '.join((*PRESETS, *FAMILY_PRESETS))}")


def preset(name: str) -> Preset:
    """Raises ConfigError for an unknown name."""
    check_preset(name)
    if name in PRESETS:
        return PRESETS[name]
    from tridecode.tools.bench.shapes.family_presets import MODELS

    return next(Preset(model, "bf16") for model in MODELS if model.model_name == name)


def random_prompts(count: int, tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of `tokens` ids each, determined by the seed: every engine gets the same."""
    ids = np.random.default_rng(seed).integers(3, vocab_size, (count, tokens))  # 0 to 2 may be special
    return ids.tolist()
