"""Tiny seeded checkpoints of each family, as transformers saves them, with a tokenizer trained on the spot.

FAMILIES is the one table of the families in the tests: docs/design/adding_a_family.md explains an entry. It
holds CORE and the CASES of every module of tests/families. Tests that take seconds for each family, and do
not depend on its network, run over CORE.

Weights are drawn wide enough that greedy continuations do not repeat themselves, norm weights around 1, and
biases away from 0, so that a wrong layout shows. With the default seeds the two best logits differ by 0.03 or
more at each of 16 steps after the prompts [5], [7, 9, 11] and 20 to 59.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import tests.families
from tridecode.backend.configuration.model_config import RopeConfig

TINY_VOCAB = 331  # no multiple of 8
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TEXTS = [
    "The history of the city begins with a small harbour, and the harbour begins with 3 boats.",
    "Il pleut sur la ville; les enfants comptent: 1, 2, 3, 40, 512.",
    "Все счастливые семьи похожи друг на друга.",
    "今日は天気がいいですね。明日は雨です。",
    "Emoji 🙂🚀 and accents: naïve façade, größer, mañana.",
    "def add(a, b):\n    return a + b  # 2 + 2 == 4",
]


def _settle(model: PreTrainedModel, seed: int, norm_centre: float = 1.0) -> PreTrainedModel:
    """Draw every parameter again from `seed`; keep what is tied tied. norm_centre: mean of norms' weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.1)
            else:  # a norm's weight
                parameter.copy_(norm_centre + noise * 0.1)
    return model.eval()


@dataclass(frozen=True)
class FamilyCase:
    """One family in the tests; they run for every entry of FAMILIES. Called, it makes the tiny model.

    config: transformers' class. seed, settings: of the tiny model. model_type: of config.pbtxt.
    variants: changed settings by name. shared: settings of 12 heads and 3 layers, for ranks.
    draw: settings of a random model of odd shape. names: stems of our files to transformers' modules,
    or to q, k and v; {i} is a layer. heads: how transformers stores query_key_value:
    "joined" as we do, "by head", "apart", or a function (transformers' config, q (in, H * D), k, v
    (in, K * D)) to the arrays of `names`, each (in, out). ini: the fields of ModelConfig that config.ini
    keeps besides the common ones. kv_heads, mlp_size: of transformers' config; None: num_key_value_heads
    or as many as heads; intermediate_size, n_inner or four times the hidden size. turned: transformers'
    matrices are (out, in), those of Linear, and not (in, out), of Conv1D. A name that ends in #0, #1, … is
    that part of a module's rows. stored: (transformers' config, state dict) to the part of it that the files
    hold, where a conversion changes tensors on purpose. norm_centre: mean of the norms' weights; 0 where
    transformers adds 1 to them.
    """

    config: type[PreTrainedConfig]
    seed: int
    settings: dict[str, Any]
    model_type: str
    variants: dict[str, dict[str, Any]]
    shared: dict[str, Any]
    draw: Callable[[Random], dict[str, Any]]
    names: dict[str, str | tuple[str, ...]]
    heads: str | Callable[..., tuple[np.ndarray, ...]]
    ini: dict[str, st.SearchStrategy]
    kv_heads: Callable[[PreTrainedConfig], int] | None = None
    mlp_size: Callable[[PreTrainedConfig], int] | None = None
    turned: bool = True
    stored: Callable[[PreTrainedConfig, dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda hf, state: (
        state
    )
    norm_centre: float = 1.0

    def num_kv_heads(self, hf: PreTrainedConfig) -> int:
        if self.kv_heads is not None:
            return self.kv_heads(hf)
        return getattr(hf, "num_key_value_heads", hf.num_attention_heads)

    def inner_size(self, hf: PreTrainedConfig) -> int:
        if self.mlp_size is not None:
            return self.mlp_size(hf)
        return getattr(hf, "intermediate_size", None) or getattr(hf, "n_inner", None) or 4 * hf.hidden_size

    def hf_config(self, **overrides) -> PreTrainedConfig:
        return self.config(**{"vocab_size": TINY_VOCAB, **self.settings, **overrides})

    def __call__(self, seed: int | None = None, **overrides) -> PreTrainedModel:
        config = self.hf_config(**overrides)
        # before transformers 5.21 its own choice ignores a soft cap of the scores
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        return _settle(model, self.seed if seed is None else seed, self.norm_centre)


def _rotary(random: Random) -> dict[str, Any]:
    theta = random.choice([100.0, 10000.0, 500000.0])
    linear = {"rope_type": "linear", "rope_theta": theta, "factor": 3.0}
    return random.choice([{"rope_type": "default", "rope_theta": theta}, linear, LLAMA3_ROPE])


def _draw_gpt2(random: Random) -> dict[str, Any]:
    heads, size = random.choice([1, 3, 5, 7]), random.choice([6, 8, 10, 16])
    return {
        "n_head": heads,
        "n_embd": heads * size,
        "n_layer": random.randint(1, 4),
        "n_inner": random.choice([None, 52, 77]),
        "activation_function": random.choice(["gelu", "gelu_new", "relu"]),
        "scale_attn_weights": random.random() < 0.7,
        "scale_attn_by_inverse_layer_idx": random.random() < 0.4,
        "reorder_and_upcast_attn": random.random() < 0.3,
        "tie_word_embeddings": random.random() < 0.5,
    }


def _draw_bloom(random: Random) -> dict[str, Any]:
    heads, size = random.choice([1, 3, 5, 6, 11]), random.choice([6, 8, 10, 16])
    return {
        "n_head": heads,
        "hidden_size": heads * size,
        "n_layer": random.randint(1, 4),
        "apply_residual_connection_post_layernorm": random.random() < 0.5,
        "tie_word_embeddings": random.random() < 0.5,
    }


def _draw_gptneox(random: Random) -> dict[str, Any]:
    heads, size = random.choice([1, 3, 5, 7]), random.choice([6, 8, 10, 16])
    rotated = 2 * random.randint(1, size // 2)
    return {
        "num_attention_heads": heads,
        "hidden_size": heads * size,
        "intermediate_size": random.choice([20, 51, 88]),
        "num_hidden_layers": random.randint(1, 4),
        "hidden_act": random.choice(["gelu", "gelu_new", "relu"]),
        "attention_bias": random.random() < 0.5,
        "use_parallel_residual": random.random() < 0.5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": random.choice([100.0, 10000.0]),
            "partial_rotary_factor": (rotated + 0.1) / size,
        },
        "tie_word_embeddings": random.random() < 0.5,
    }


def _draw_llama(random: Random) -> dict[str, Any]:
    kv_heads, group = random.choice([1, 2, 3]), random.choice([1, 2, 3, 5])
    return {
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": random.choice([4, 6, 10, 16]),
        "hidden_size": kv_heads * group * random.choice([4, 7, 12]),
        "intermediate_size": random.choice([20, 51, 88]),
        "num_hidden_layers": random.randint(1, 4),
        "attention_bias": random.random() < 0.5,
        "mlp_bias": random.random() < 0.5,
        "rope_parameters": _rotary(random),
        "tie_word_embeddings": random.random() < 0.5,
    }


ROPE = st.builds(
    RopeConfig,
    size=st.integers(2, 128).map(lambda n: 2 * n),
    theta=st.floats(1.5, 1e8),
    scaling=st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3"]),
    factor=st.floats(1.0, 64.0),
    low_freq_factor=st.floats(0.5, 3.5),
    high_freq_factor=st.floats(4.0, 16.0),
    original_max_positions=st.integers(1, 10**6),
    beta_fast=st.floats(1.0, 64.0),
    beta_slow=st.floats(0.1, 4.0),
    truncate=st.booleans(),
    attention_factor=st.floats(0.5, 2.0),
    interleaved=st.booleans(),
) | st.builds(
    RopeConfig,
    size=st.just(6),
    scaling=st.just("longrope"),
    short_factors=st.tuples(*[st.floats(1.0, 64.0)] * 3),
    long_factors=st.tuples(*[st.floats(1.0, 64.0)] * 3),
)
GELUS = st.sampled_from(["gelu_tanh", "gelu", "relu"])

#: by transformers' model type
FAMILIES = {
    "gpt2": FamilyCase(
        GPT2Config,
        seed=2,
        settings={
            "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0,
        },
        model_type="GPT",
        variants={
            "5x16-relu": {"n_embd": 80, "n_head": 5, "n_inner": 60, "activation_function": "relu"},
            "erf-untied": {"activation_function": "gelu", "tie_word_embeddings": False},
            "scaled-by-layer": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
        },
        shared={"n_head": 12, "n_embd": 48, "n_layer": 3, "n_inner": 60},
        draw=_draw_gpt2,
        names={
            "model.wte": "transformer.wte",
            "model.wpe": "transformer.wpe",
            "model.layers.{i}.input_layernorm": "transformer.h.{i}.ln_1",
            "model.layers.{i}.attention.query_key_value": "transformer.h.{i}.attn.c_attn",
            "model.layers.{i}.attention.dense": "transformer.h.{i}.attn.c_proj",
            "model.layers.{i}.post_attention_layernorm": "transformer.h.{i}.ln_2",
            "model.layers.{i}.mlp.dense_h_to_4h": "transformer.h.{i}.mlp.c_fc",
            "model.layers.{i}.mlp.dense_4h_to_h": "transformer.h.{i}.mlp.c_proj",
            "model.final_layernorm": "transformer.ln_f",
            "model.lm_head": "lm_head",
        },
        heads="joined",
        turned=False,
        ini={
            "activation": GELUS, "attention_scale": st.none() | st.floats(0.01, 2.0),
            "scale_by_layer": st.booleans(),
        },
    ),
    "bloom": FamilyCase(
        BloomConfig,
        seed=8,
        settings={"hidden_size": 40, "n_head": 5, "n_layer": 2, "bos_token_id": 1, "eos_token_id": 2},
        model_type="GPT",
        variants={
            "3x16-residual": {
                "hidden_size": 48, "n_head": 3, "apply_residual_connection_post_layernorm": True,
            },
            "6x8-untied": {"hidden_size": 48, "n_head": 6, "tie_word_embeddings": False},
        },
        shared={"n_head": 12, "hidden_size": 48, "n_layer": 3},
        draw=_draw_bloom,
        names={
            "model.wte": "transformer.word_embeddings",
            "model.pre_decoder_layernorm": "transformer.word_embeddings_layernorm",
            "model.layers.{i}.input_layernorm": "transformer.h.{i}.input_layernorm",
            "model.layers.{i}.attention.query_key_value": "transformer.h.{i}.self_attention.query_key_value",
            "model.layers.{i}.attention.dense": "transformer.h.{i}.self_attention.dense",
            "model.layers.{i}.post_attention_layernorm": "transformer.h.{i}.post_attention_layernorm",
            "model.layers.{i}.mlp.dense_h_to_4h": "transformer.h.{i}.mlp.dense_h_to_4h",
            "model.layers.{i}.mlp.dense_4h_to_h": "transformer.h.{i}.mlp.dense_4h_to_h",
            "model.final_layernorm": "transformer.ln_f",
            "model.lm_head": "lm_head",
        },
        heads="by head",
        ini={"residual": st.sampled_from(["sequential", "from_norm"])},
    ),
    "llama": FamilyCase(
        LlamaConfig,
        seed=9,
        settings={
            "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 6,
            "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
        },
        model_type="LLaMA",
        variants={
            "biases-tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "wide-heads": {"head_dim": 16, "num_key_value_heads": 3},
            "one-kv": {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1},
            "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}},
            "llama3": {"rope_parameters": LLAMA3_ROPE},
            "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
                "max_position_embeddings": 32},
            "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                "original_max_position_embeddings": 32}},
            "longrope": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0,
                "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 32, "factor": 4.0}},
        },
        shared={"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 3},
        draw=_draw_llama,
        names={
            "model.wte": "model.embed_tokens",
            "model.layers.{i}.input_layernorm": "model.layers.{i}.input_layernorm",
            "model.layers.{i}.attention.query_key_value": (
                "model.layers.{i}.self_attn.q_proj",
                "model.layers.{i}.self_attn.k_proj",
                "model.layers.{i}.self_attn.v_proj",
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
            "activation": st.just("silu"),
            "rope": ROPE,
            "attention_bias": st.booleans(),
            "mlp_bias": st.booleans(),
        },
    ),
    "gpt_neox": FamilyCase(
        GPTNeoXConfig,
        seed=4,
        settings={
            "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 3,
            "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
        },
        model_type="GPT-NeoX",
        variants={
            "sequential": {"use_parallel_residual": False, "hidden_act": "gelu_new"},
            "biasless-tied": {"attention_bias": False, "tie_word_embeddings": True},
            "rotary": {
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0,
                },
                "num_attention_heads": 6,
            },
        },
        shared={"num_attention_heads": 12, "hidden_size": 96, "num_hidden_layers": 3},
        draw=_draw_gptneox,
        names={
            "model.wte": "gpt_neox.embed_in",
            "model.layers.{i}.input_layernorm": "gpt_neox.layers.{i}.input_layernorm",
            "model.layers.{i}.attention.query_key_value": "gpt_neox.layers.{i}.attention.query_key_value",
            "model.layers.{i}.attention.dense": "gpt_neox.layers.{i}.attention.dense",
            "model.layers.{i}.post_attention_layernorm": "gpt_neox.layers.{i}.post_attention_layernorm",
            "model.layers.{i}.mlp.dense_h_to_4h": "gpt_neox.layers.{i}.mlp.dense_h_to_4h",
            "model.layers.{i}.mlp.dense_4h_to_h": "gpt_neox.layers.{i}.mlp.dense_4h_to_h",
            "model.final_layernorm": "gpt_neox.final_layer_norm",
            "model.lm_head": "lm_head",
        },
        heads="by head",
        ini={
            "activation": GELUS,
            "rope": ROPE,
            "residual": st.sampled_from(["sequential", "parallel"]),
            "attention_bias": st.booleans(),
            "bias_sum": st.booleans(),
        },
    ),
}  # fmt: skip
CORE = tuple(FAMILIES)
for _module in pkgutil.iter_modules(tests.families.__path__):
    FAMILIES.update(importlib.import_module(f"tests.families.{_module.name}").CASES)
tiny_gpt2, tiny_bloom, tiny_llama = FAMILIES["gpt2"], FAMILIES["bloom"], FAMILIES["llama"]


def variants() -> dict[str, Callable[[], PreTrainedModel]]:
    """A maker of each family's tiny model and of its variants, by name."""
    return {
        "-".join(filter(None, (family, name))): partial(case, **settings)
        for family, case in FAMILIES.items()
        for name, settings in {"": {}, **case.variants}.items()
    }


def tiny_tokenizer(adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE over TEXTS with at most TINY_VOCAB entries; ids 0 to 2 are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB,
        special_tokens=["<|endoftext|>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save(model: PreTrainedModel, directory: Path, tokenizer: bool = True, **save_options) -> Path:
    """save_pretrained of model and tokenizer, e.g. with max_shard_size. Returns the directory."""
    model.save_pretrained(directory, **save_options)
    if tokenizer:
        tiny_tokenizer(adds_bos=model.config.model_type == "llama").save_pretrained(directory)
    return directory


def greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy tokens, never stopping, and their logits (new_tokens, V), recomputed each step."""
    ids, rows = list(prompt), []
    with torch.inference_mode():
        for _ in range(new_tokens):
            rows.append(model(torch.tensor([ids])).logits[0, -1].float())
            ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)
