"""Checkpoints that were quantised by others: what is converted is the matrix that the layout stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import FAMILIES, greedy
from tests.converters import compressed_checkpoints
from tests.converters.quantized_checkpoints import METHODS, save_quantized
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.errors import CheckpointError
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity import check_parity
from tridecode.converters.sources import Checkpoint

PROMPTS = [[5], [7, 9, 11], list(range(20, 45))]
CASES = {**METHODS, **compressed_checkpoints.CASES}


def assert_reads(checkpoint: Checkpoint, model) -> None:
    """Every tensor of the checkpoint is the model's, to a rounding of float32."""
    for own in plan_conversion(checkpoint).names.values():
        wanted = model.state_dict()[own]
        torch.testing.assert_close(checkpoint.tensors.read(own), wanted, rtol=1e-6, atol=1e-7, msg=own)


@pytest.mark.parametrize("method", CASES)
def test_a_quantised_checkpoint_gives_the_matrices_it_stands_for(method, tmp_path: Path) -> None:
    model = FAMILIES["llama"](num_hidden_layers=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint = open_checkpoint(save_quantized(model, tmp_path / "hf", CASES[method]))
    assert_reads(checkpoint, model)
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)]
    assert len(changed) == 7  # q, k, v, o, gate, up, down
    assert checkpoint.notes[0].endswith("; 7 matrices")


@pytest.mark.parametrize(
    "method", ["gptq 4 bit v2 asymmetric act-order", "awq", "nf4 nested", "W8A8", "FP8 blocks"]
)
def test_a_converted_checkpoint_answers_as_transformers_with_its_matrices(method, tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    checkpoint = open_checkpoint(save_quantized(model, tmp_path / "hf", CASES[method]))
    planned = plan_conversion(checkpoint)
    planned.write(tmp_path / "w", 2)
    tokens, _ = run_greedy(tmp_path / "w", PROMPTS, 4)
    assert tokens == [greedy(model, prompt, 4)[0] for prompt in PROMPTS]
    assert check_parity(checkpoint, tmp_path / "w", planned.config, None).passed


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_quantised_matrices(family, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    layers = next(
        part for part in (".h.", ".blocks.", ".layers.") if any(part in name for name in model.state_dict())
    )
    method = METHODS["gptq 4 bit asymmetric"]
    checkpoint = open_checkpoint(save_quantized(model, tmp_path / "hf", method, layers))
    planned = plan_conversion(checkpoint)
    planned.write(tmp_path / "w")
    tokens, _ = run_greedy(tmp_path / "w", PROMPTS[1:2], 3)
    assert tokens == [greedy(model, PROMPTS[1], 3)[0]]


def test_a_module_that_was_left_dense_is_read_as_it_is(tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    checkpoint = open_checkpoint(save_quantized(model, tmp_path / "hf", METHODS["awq"], ".mlp."))
    assert_reads(checkpoint, model)


def test_empty_biases_of_modules_without_one_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ writes them."""
    model = FAMILIES["llama"]()
    source = save_quantized(model, tmp_path / "hf", METHODS["gptq 4 bit"])
    state = load_file(source / "model.safetensors")
    for name in [name for name in state if name.endswith(".qweight")]:
        state[name.replace("qweight", "bias")] = torch.zeros(state[name].shape[1], dtype=torch.float16)
    save_file(state, source / "model.safetensors")
    plan_conversion(open_checkpoint(source))
    state["model.layers.0.self_attn.q_proj.bias"][3] = 1
    save_file(state, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="no rule consumed model.layers.0.self_attn.q_proj.bias"):
        plan_conversion(open_checkpoint(source))


def test_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    source = save_quantized(model, tmp_path / "hf", METHODS["fp8 tensor"])
    state = load_file(source / "model.safetensors")
    state["model.layers.0.mlp.up_proj.input_scale"] = torch.tensor(0.5)
    state["model.layers.1.self_attn.k_scale"] = torch.tensor(0.5)
    save_file(state, source / "model.safetensors")
    assert_reads(open_checkpoint(source), model)


def test_large_matrices_are_expanded_in_parts(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tridecode.kernels.quantized._EXPANDED_TOGETHER", 200)
    for number, method in enumerate(["gptq 4 bit asymmetric", "fp8 blocks", "W8A8"]):
        model = FAMILIES["llama"]()
        assert_reads(open_checkpoint(save_quantized(model, tmp_path / str(number), CASES[method])), model)
