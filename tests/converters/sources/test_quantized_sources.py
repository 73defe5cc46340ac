"""Checkpoints that were quantised by others: what is converted is the matrix that the layout stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import FAMILIES, greedy, save
from tests.converters.sources import compressed_checkpoints
from tests.converters.sources.quantized_checkpoints import METHODS, save_quantized
from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.engine.offline import run_greedy
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity.comparison import check_parity
from tridecode.converters.sources import Checkpoint
from tridecode.converters.sources.runtime_scales import is_runtime_scale

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
    with pytest.raises(CheckpointError, match="the checkpoint holds model.layers.0.self_attn.q_proj.bias"):
        plan_conversion(open_checkpoint(source))


def test_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    source = save_quantized(model, tmp_path / "hf", METHODS["fp8 tensor"])
    state = load_file(source / "model.safetensors")
    state["model.layers.0.mlp.up_proj.input_scale"] = torch.tensor(0.5)
    state["model.layers.1.self_attn.k_scale"] = torch.tensor(0.5)
    save_file(state, source / "model.safetensors")
    checkpoint = open_checkpoint(source)
    assert_reads(checkpoint, model)
    left_out = "scales of activations and of the KV cache are left out: 2 tensors"
    assert checkpoint.notes[-1].startswith(left_out)


#: (method of the weights or None, quantization_config or its changes, names in self_attn, shape of a scale)
CACHES = {
    "compressed-tensors, the cache alone": (
        None,
        {
            "quant_method": "compressed-tensors", "format": "dense", "config_groups": {},
            "ignore": ["lm_head"],
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False},
        },
        ("k_scale", "v_scale"), (1,),
    ),
    "AutoFP8's first name": ("fp8 tensor", {"kv_cache_scheme": "static"}, ("kv_scale",), ()),
    "each head": ("fp8 tensor", {}, ("k_scale", "v_scale", "q_scale", "k_zero_point"), (2, 1)),
    "of the projections": ("W8A8", {}, ("k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale"), (1,)),
    "scores": ("gptq 4 bit", {}, ("prob_output_scale", "prob_scale", "kv_cache_scaling_factor"), ()),
    "no description": (None, None, ("k_scale", "v_scale"), ()),
}  # fmt: skip


@pytest.mark.parametrize("case", CACHES)
def test_scales_of_the_cache_are_left_out_of_every_source(case, tmp_path: Path) -> None:
    method, description, names, shape = CACHES[case]
    model = FAMILIES["llama"]()
    if method is None:
        source = save(model, tmp_path / "hf", tokenizer=False)
    else:
        source = save_quantized(model, tmp_path / "hf", CASES[method])
    state = load_file(source / "model.safetensors")
    scales = {f"model.layers.{i}.self_attn.{name}": torch.full(shape, 0.5) for i in (0, 1) for name in names}
    save_file({**state, **scales}, source / "model.safetensors", metadata={"format": "pt"})
    if description is not None:
        path = source / "config.json"
        held = json.loads(path.read_text())
        held["quantization_config"] = {**held.get("quantization_config", {}), **description}
        path.write_text(json.dumps(held))
    checkpoint = open_checkpoint(source)
    planned = plan_conversion(checkpoint)
    planned.write(tmp_path / "w")
    tokens, _ = run_greedy(tmp_path / "w", PROMPTS, 3)
    assert tokens == [greedy(model, prompt, 3)[0] for prompt in PROMPTS]
    assert check_parity(checkpoint, tmp_path / "w", planned.config, None).passed
    assert f"left out: {len(scales)} tensors" in checkpoint.notes[-1]


def test_no_familys_weight_has_the_name_of_such_a_scale() -> None:
    """They would be dropped."""
    assert is_runtime_scale("model.layers.0.self_attn.attn.k_scale")
    for model in (make() for make in FAMILIES.values()):
        assert not [name for name in model.state_dict() if is_runtime_scale(name)]


def test_large_matrices_are_expanded_in_parts(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tridecode.kernels.formats.quantized._EXPANDED_TOGETHER", 200)
    for number, method in enumerate(["gptq 4 bit asymmetric", "fp8 blocks", "W8A8"]):
        model = FAMILIES["llama"]()
        assert_reads(open_checkpoint(save_quantized(model, tmp_path / str(number), CASES[method])), model)
