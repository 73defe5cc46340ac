"""Settings of GPT-J, CodeGen, Falcon, MPT, GPT-BigCode and GPT-Neo that are run, and those refused by
name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.models.falcon import alibi_bias
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.families import families
from tridecode.converters.parity.comparison import check_parity

COMMON = {"model_name": "m", "start_id": 0, "end_id": 0, "weight_dtype": "fp32", "tied_head": True}
OLD = {"new_decoder_architecture": False}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
#: (family, settings, part of the error)
REFUSED = [
    ("gptj", {"rotary_dim": 0}, "GPT-J with rotary_dim = 0; this version runs even numbers up to"),
    ("gptj", {"rotary_dim": 5}, "rotary_dim = 5"),
    ("gptj", {"rotary_dim": 18}, "rotary_dim = 18; this version runs even numbers up to the head size, 16"),
    ("codegen", {"n_head": 6, "n_embd": 48}, "CodeGen with n_head = 6; this version runs multiples of 4"),
    ("falcon", {**OLD, "multi_query": False, "num_kv_heads": 2}, "multi_query = False, num_kv_heads = 2"),
    ("falcon", {**NEW, "num_kv_heads": 4}, "num_kv_heads = 4; this version runs divisors of the 6 heads"),
    ("falcon", {**NEW, "parallel_attn": False}, "parallel_attn = False"),
    ("falcon", {**NEW, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn = 3"),
    ("falcon", {**OLD, "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2"),
    ("falcon", {"activation": "quick_gelu"}, "Falcon with activation = quick_gelu"),
    ("gpt_bigcode", {"multi_query": False, "add_cross_attention": True}, "add_cross_attention = True"),
    ("gpt_neo", {"window_size": 0}, "GPT-Neo with window_size = 0; this version runs 1 or more"),
    ("gpt_neo", {"attention_types": [[["global", "ring"], 1]]}, "attention_types ring"),
    ("mpt", {"attn_config": {"clip_qkv": -1.0}}, "clip_qkv = -1.0; this version runs 0 or more"),
]


@pytest.mark.parametrize("family, settings, told", REFUSED)
def test_a_setting_that_is_not_run_is_refused_by_name(family, settings, told):
    hf = FAMILIES[family].hf_config(**settings)
    with pytest.raises(UnsupportedError) as caught:
        families()[family].model_config(hf, **COMMON)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "key, value, told",
    [
        ("no_bias", False, "MPT with no_bias = False; this version runs True"),
        ("logit_scale", 0.5, "MPT with logit_scale = 0.5; this version runs None"),
        ("expansion_ratio", 2, "MPT with expansion_ratio = 2; this version runs 4"),
        ("attn_config", {"alibi": False}, "MPT with attn_config.alibi = False; this version runs True"),
        ("attn_config", {"qk_ln": True}, "MPT with attn_config.qk_ln = True; this version runs False"),
        ("attn_config", {"rope": True}, "MPT with attn_config.rope = True; this version runs False"),
    ],
)
def test_mosaics_settings_that_transformers_leaves_out_are_refused(key, value, told):
    hf = FAMILIES["mpt"].hf_config(**{key: value})
    assert families()["mpt"].model_config(hf, **COMMON).alibi_bias_max == 8
    hf.architectures = ["MPTForCausalLM"]
    with pytest.raises(UnsupportedError) as caught:
        families()["mpt"].model_config(hf, **COMMON)
    assert str(caught.value) == told


def mpt_with_alibi_bias_max_16(directory: Path, architecture: str) -> Path:
    save(FAMILIES["mpt"](attn_config={"alibi_bias_max": 16}), directory)
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = [architecture]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_mosaics_alibi_bias_max_is_run_and_proved(tmp_path):
    """transformers always uses 8, so the test sets the slopes of the reference model as MosaicML's
    attention.py does."""
    source = mpt_with_alibi_bias_max_16(tmp_path / "hf", "MPTForCausalLM")
    checkpoint = open_checkpoint(source)
    planned = plan_conversion(checkpoint)
    planned.write(tmp_path / "w")
    parity = check_parity(checkpoint, tmp_path / "w", planned.config, source / "tokenizer.json")
    assert parity.passed and parity.greedy_agreement == 1.0
    model = AutoModelForCausalLM.from_pretrained(source)
    slopes = 2.0 ** -torch.tensor([4.0, 8.0, 12.0, 16.0, 2.0])  # 5 heads
    bias = slopes[:, None, None] * torch.arange(1 - 128, 1)
    theirs = checkpoint.reference_model(torch.float32)
    ids = torch.arange(20, 60)[None]
    plain = model(ids).logits
    model.transformer.build_mpt_alibi_tensor = lambda *args, **kwargs: bias
    assert torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-4)
    assert not torch.allclose(plain, theirs(ids).logits, atol=1e-2)


def test_an_mpt_of_transformers_has_the_alibi_of_transformers(tmp_path):
    source = mpt_with_alibi_bias_max_16(tmp_path / "hf", "MptForCausalLM")
    assert plan_conversion(open_checkpoint(source)).config.alibi_bias_max == 8


def test_falcons_alibi_is_rounded_as_in_transformers_far_beyond_256_positions():
    """With 12 heads bfloat16 rounds the slopes; from position 257 on it rounds every product."""
    settings = {"alibi": True, "num_attention_heads": 12, "max_position_embeddings": 1024}
    model = FAMILIES["falcon"](**settings)
    prompts = prompts_of([300, 421, 3], model.config.vocab_size)
    answers = offline_engine(model, max_step_tokens=128).generate(prompts, SamplingParams(max_tokens=6))
    for prompt, answer in zip(prompts, answers):
        tokens, logits = hf_greedy(model, prompt, 6)
        assert answer.tokens == tokens
        assert np.abs(np.stack(answer.logits) - logits).max() < 2e-3
    exact = alibi_bias(12, 421, 1.0)
    rounded = torch.exp2(-8 / 8 * torch.arange(1.0, 9))[:, None] * torch.arange(421.0)
    assert (exact[:8] != rounded).any()  # the rounding shows
