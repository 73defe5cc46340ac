"""Quantised checkpoints that keep their format: the directory represents the same matrices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import FAMILIES, greedy, save
from tests.converters.sources import compressed_checkpoints
from tests.converters.sources.quantized_checkpoints import METHODS, Case, fp8, save_quantized
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion
from tridecode.converters.kept_quantized import keep_quantized

CASES = {**METHODS, **compressed_checkpoints.CASES}
PROMPTS = [[5], [7, 9, 11], list(range(20, 45))]
KEPT = {
    "gptq 4 bit": Quantization("int4", 8),
    "gptq 4 bit asymmetric": Quantization("int4", 8, zeros=True),
    "gptq 4 bit v2 asymmetric act-order": Quantization("int4", 8, zeros=True, act_order=True),
    "gptq 8 bit act-order": Quantization("int8", 8, act_order=True),
    "awq": Quantization("int4", 8, zeros=True),
    "fp8 tensor": Quantization("fp8", activations="fp8"),
    "bitsandbytes 8 bit": Quantization("int8"),
    "W4A16 channels": Quantization("int4"),
    "W4A16 groups, act-order": Quantization("int4", 8, act_order=True),
    "W8A8": Quantization("int8", activations="int8"),
    "FP8 naive": Quantization("fp8"),
}


def assert_same_logits(kept: PlannedConversion, model, directory: Path, ranks: int) -> None:
    """The directory's logits equal transformers'. Activations are not quantised, so only weights differ."""
    quantization = replace(kept.config.quantization, activations="")
    weights_only = replace(kept, config=replace(kept.config, quantization=quantization))
    weights_only.write(directory, ranks)
    tokens, rows = run_greedy(directory, PROMPTS, 2)
    for prompt, found, logits in zip(PROMPTS, tokens, rows):
        wanted, reference = greedy(model, prompt, 2)
        assert found == wanted
        torch.testing.assert_close(torch.as_tensor(logits), reference, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("method", KEPT)
def test_a_kept_checkpoint_answers_as_transformers_with_its_matrices(method, tmp_path: Path) -> None:
    model = FAMILIES["llama"](num_hidden_layers=1)
    planned = plan_conversion(open_checkpoint(save_quantized(model, tmp_path / "hf", CASES[method])))
    kept = keep_quantized(planned)
    assert kept.config.quantization == KEPT[method]
    assert 0 < kept.total_bytes < planned.total_bytes
    assert_same_logits(kept, model, tmp_path / "w", 2)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "falcon", "phi3", "gptj"])
def test_other_orders_of_heads_are_kept(family, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    layers = ".h." if any(".h." in name for name in model.state_dict()) else ".layers."
    source = save_quantized(model, tmp_path / "hf", METHODS["gptq 4 bit asymmetric"], layers)
    kept = keep_quantized(plan_conversion(open_checkpoint(source)))
    kept.write(tmp_path / "w")
    assert list((tmp_path / "w").glob("*.query_key_value.weight.int4.*"))
    assert_same_logits(kept, model, tmp_path / "w1", 1)


@pytest.mark.parametrize(("kv_heads", "block_rows"), [(2, 128), (1, 1)])
def test_blocks_that_are_cut_get_a_scale_for_each_output(kv_heads, block_rows, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
    model = FAMILIES["llama"](num_key_value_heads=kv_heads, num_hidden_layers=1, **sizes)
    case = Case(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda weight: fp8(weight, (128, 128), "weight_scale_inv"),
    )
    kept = keep_quantized(plan_conversion(open_checkpoint(save_quantized(model, tmp_path / "hf", case))))
    assert kept.config.quantization == Quantization("fp8", 128, block_rows, activations="fp8")
    assert_same_logits(kept, model, tmp_path / "w", 2)


# ---------------------------------------------------------------- what is written in 16 bit only


def refused(source: Path) -> str:
    with pytest.raises(UnsupportedError) as caught:
        keep_quantized(plan_conversion(open_checkpoint(source)))
    return str(caught.value)


@pytest.mark.parametrize(
    "method", ["nf4", "gptq 8 bit asymmetric", "int8 asymmetric", "fp8 blocks", "FP8 blocks"]
)
def test_a_format_that_directories_do_not_have_is_named(method, tmp_path: Path) -> None:
    source = save_quantized(FAMILIES["llama"](num_hidden_layers=1), tmp_path, CASES[method])
    title = open_checkpoint(source).tensors.method.title
    assert refused(source) == f"{title}: weight directories have no such format"


def test_a_checkpoint_that_is_partly_dense_is_not_kept(tmp_path: Path) -> None:
    source = save_quantized(FAMILIES["llama"](num_hidden_layers=1), tmp_path, METHODS["awq"], ".mlp.")
    assert refused(source) == "model.layers.0.self_attn.q_proj.weight is not quantised, and others are"


def test_a_checkpoint_that_is_not_quantised_is_not_kept(tmp_path: Path) -> None:
    source = save(FAMILIES["llama"](), tmp_path, tokenizer=False)
    assert refused(source) == f"{source} is not quantised"


def test_matrices_in_other_groups_are_not_joined(tmp_path: Path) -> None:
    case = METHODS["gptq 4 bit v2 asymmetric act-order"]
    source = save_quantized(FAMILIES["llama"](num_hidden_layers=1), tmp_path, case)
    state = load_file(source / "model.safetensors")
    groups = state["model.layers.0.self_attn.k_proj.g_idx"]
    groups.copy_(groups.flip(0).clone())
    save_file(state, source / "model.safetensors")
    assert "self_attn.k_proj.weight become one matrix, but have other groups" in refused(source)


def test_zeros_of_a_checkpoint_that_says_symmetric_are_refused(tmp_path: Path) -> None:
    case = Case(METHODS["gptq 4 bit"].config, METHODS["gptq 4 bit asymmetric"].pack)
    source = save_quantized(FAMILIES["llama"](num_hidden_layers=1), tmp_path / "hf", case)
    kept = keep_quantized(plan_conversion(open_checkpoint(source)))
    with pytest.raises(CheckpointError, match="q_proj.weight has zeros; its config.json says symmetric"):
        kept.write(tmp_path / "w")
