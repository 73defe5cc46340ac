"""`int8_head` against transformers' models whose head the test itself has rounded, tied or not."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import fp32_bound, hf_greedy
from tests.checkpoints import FAMILIES, save
from tests.quantized import rounded_int8
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.memory import plan_rank
from tridecode.backend.engine.offline import run_greedy
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.tools.bench.shapes.presets import preset

NEW = 6
PROMPTS = [[5], [7, 9, 11], list(range(20, 60))]
SETTINGS = {"data_type": "fp16", "max_sequences": 64, "max_sequence_tokens": 1024, "max_step_tokens": 2048}


def with_rounded_head(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose head is rounded, and with it the word embedding where they are one tensor."""
    out = copy.deepcopy(model)
    weight = out.get_output_embeddings().weight
    rounded = torch.from_numpy(rounded_int8(weight.detach().float().numpy()))
    with torch.no_grad():
        weight.copy_(rounded)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_with_a_rounded_head(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    model = case(**case.shared)
    save(model, tmp_path / "hf", tokenizer=False)
    plan_conversion(open_checkpoint(str(tmp_path / "hf")), "fp32").write(tmp_path / "w")
    rounded = with_rounded_head(model)
    tokens, logits = run_greedy(
        tmp_path / "w", PROMPTS, NEW, EngineConfig(int8_head=True, max_sequence_tokens=64)
    )
    for prompt, ours, our_logits in zip(PROMPTS, tokens, logits):
        wanted, theirs = hf_greedy(rounded, prompt, NEW)
        assert ours == wanted
        assert np.abs(our_logits - theirs).max() <= 2 * fp32_bound(theirs)
        assert np.abs(our_logits - hf_greedy(model, prompt, NEW)[1]).max() > 0


def round_inputs_of_head(model: torch.nn.Module) -> torch.nn.Module:
    """Make the head of a model round each row that it reads to int8, as W8A8 does."""

    def rounded(head: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = inputs[0].abs().amax(-1, keepdim=True) / 127
        return ((inputs[0] / scale).round() * scale,)

    model.get_output_embeddings().register_forward_pre_hook(rounded)
    return model


@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_inputs_of_the_head_can_be_rounded_like_its_weight(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    model = case(**case.shared)
    save(model, tmp_path / "hf", tokenizer=False)
    plan_conversion(open_checkpoint(str(tmp_path / "hf")), "fp32").write(tmp_path / "w")
    weight_only = with_rounded_head(model)
    both = round_inputs_of_head(with_rounded_head(model))
    config = EngineConfig(int8_head_inputs=True, max_sequence_tokens=64)
    tokens, logits = run_greedy(tmp_path / "w", PROMPTS, NEW, config)
    for prompt, ours, our_logits in zip(PROMPTS, tokens, logits):
        wanted, theirs = hf_greedy(both, prompt, NEW)
        others = hf_greedy(weight_only, prompt, NEW)[1]
        assert ours == wanted
        assert np.abs(our_logits - theirs).max() < 0.2 * np.abs(others - theirs).max()


@pytest.mark.parametrize(("name", "tied"), [("bloom-7b1", True), ("llama-3-8b", False)])
def test_memory_is_a_byte_for_each_number_of_the_head(name: str, tied: bool) -> None:
    model = preset(name).model
    assert model.tied_head == tied
    fp16, int8 = (
        plan_rank(model, EngineConfig(int8_head=head, **SETTINGS), 0, 0, "cuda") for head in (False, True)
    )
    numbers, scales = model.vocab_size * model.hidden_size, 4 * model.vocab_size
    assert fp16.weights - int8.weights == numbers - scales
    assert fp16.scratch == int8.scratch
    rounded_inputs = plan_rank(model, EngineConfig(int8_head_inputs=True, **SETTINGS), 0, 0, "cuda")
    assert rounded_inputs == int8


def test_bloom_in_int8_takes_half_of_fp16() -> None:
    """The rest of the memory, workspace and scratch, is not smaller in int8."""
    model = preset("bloom-7b1").model
    fp16, int8 = (
        plan_rank(model, EngineConfig(int8_mode=mode, int8_head=mode > 0, **SETTINGS), 0, 0, "cuda")
        for mode in (0, 1)
    )
    assert int8.weights <= 0.501 * fp16.weights
    assert int8.fixed <= 0.53 * fp16.fixed
