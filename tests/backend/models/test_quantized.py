"""Quantised directories against transformers' models whose weights the test itself has rounded."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor
from torch.nn import Module
from transformers.pytorch_utils import Conv1D

from tests.backend.engine.offline_models import fp32_bound, hf_greedy
from tests.checkpoints import CORE, FAMILIES, save
from tests.quantized import rounded_model
from tridecode.backend.base.errors import ConfigError, WeightFileError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.offline import OfflineEngine, run_greedy
from tridecode.backend.models import read_model_config
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion

NEW = 6
PROMPTS = [[5], [7, 9, 11], list(range(20, 60))]
FORMATS = {
    "int8": Quantization("int8"),
    "int4": Quantization("int4", group=16, zeros=True),
    "fp8": Quantization("fp8"),
}


def planned(folder: Path, quantization: Quantization) -> PlannedConversion:
    return plan_conversion(open_checkpoint(str(folder)), "fp32", None, quantization)


def test_int8_mode_1_rounds_what_a_directory_holds(tmp_path: Path) -> None:
    case = FAMILIES["gpt2"]
    model = case(**case.shared)
    save(model, tmp_path / "hf", tokenizer=False)
    plan_conversion(open_checkpoint(str(tmp_path / "hf")), "fp32").write(tmp_path / "w")
    rounded = rounded_model(model, planned(tmp_path / "hf", FORMATS["int8"]), case.turned)
    config = EngineConfig(int8_mode=1, max_sequence_tokens=64)
    _, logits = run_greedy(tmp_path / "w", PROMPTS, NEW, config)
    for prompt, ours in zip(PROMPTS, logits):
        _, theirs = hf_greedy(rounded, prompt, NEW)
        assert np.abs(ours - theirs).max() <= 2 * fp32_bound(theirs)


def test_int8_mode_2_rounds_the_inputs_of_products_too(tmp_path: Path) -> None:
    """Nearer to transformers' model with rounded weights and inputs than to the one with rounded weights: a
    sum in another order can move an input to the next level, so that the bits differ."""
    case = FAMILIES["gpt2"]
    model = case(**case.shared)
    save(model, tmp_path / "hf", tokenizer=False)
    plan_conversion(open_checkpoint(str(tmp_path / "hf")), "fp32").write(tmp_path / "w")
    weights_only = rounded_model(model, planned(tmp_path / "hf", FORMATS["int8"]), case.turned)
    both = copy.deepcopy(weights_only)

    def round_rows(_module: Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        step = args[0].abs().amax(-1, keepdim=True) / 127
        return ((args[0] / step).round() * step,)

    for module in both.modules():
        if isinstance(module, Conv1D):
            module.register_forward_pre_hook(round_rows)
    _, logits = run_greedy(tmp_path / "w", PROMPTS, 1, EngineConfig(int8_mode=2, max_sequence_tokens=64))
    for prompt, ours in zip(PROMPTS, logits):
        near, far = (np.abs(ours - hf_greedy(one, prompt, 1)[1]).mean() for one in (both, weights_only))
        assert near < 0.2 * far


def _replace_value(file: str, dtype: type, value: float):
    def damage(directory: Path) -> None:
        values = np.fromfile(directory / file, dtype)
        values[3] = value
        values.tofile(directory / file)

    return damage


_NAME = "model.layers.1.mlp.dense_4h_to_h.weight"
DAMAGES = {
    "a missing scale": (lambda d: (d / f"{_NAME}.scale.bin").unlink(), rf"{_NAME}.scale.bin is missing"),
    "a short file": (
        lambda d: (d / f"{_NAME}.int4.0.bin").write_bytes(b"x"), rf"{_NAME}.int4.0.bin holds 1 bytes"
    ),
    "a NaN scale": (
        _replace_value(f"{_NAME}.scale.bin", np.float32, np.nan), rf"{_NAME}.scale holds values .*not finite"
    ),
    "a zero of 16": (_replace_value(f"{_NAME}.zero.bin", np.uint8, 16), rf"{_NAME}.zero holds 16; wanted 0"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_parts_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    save(FAMILIES["gpt2"](), tmp_path / "hf", tokenizer=False)
    planned(tmp_path / "hf", FORMATS["int4"]).write(tmp_path / "w")
    change, message = DAMAGES[damage]
    change(tmp_path / "w")
    config = EngineConfig(verify_weights="sizes", max_sequence_tokens=64)
    with pytest.raises(WeightFileError, match=message):
        OfflineEngine.load(tmp_path / "w", config)


def test_keys_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    save(FAMILIES["gpt2"](), tmp_path / "hf", tokenizer=False)
    planned(tmp_path / "hf", FORMATS["int8"]).write(tmp_path / "w")
    text = (tmp_path / "w" / "config.ini").read_text()
    assert read_model_config(tmp_path / "w").quantization == FORMATS["int8"]
    for key, value, wanted in (
        ("quantization_zeros", "True", "wanted false, or int4"),
        ("quantization_block_rows", "64", "wanted 1 or 128"),
        ("quantization_act_order", "True", "wanted false, or a quantization_group"),
        ("activation_quantization", "fp8", "wanted none or int8"),
    ):
        lines = [line for line in text.splitlines() if not line.startswith(key)]
        (tmp_path / "w" / "config.ini").write_text("\n".join([*lines, f"{key} = {value}"]))
        with pytest.raises(ConfigError, match=f"{key} = {value}.*{wanted}"):
            read_model_config(tmp_path / "w")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_with_rounded_weights(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    model = case(**case.shared)
    save(model, tmp_path / "hf", tokenizer=False)
    for name, quantization in list(FORMATS.items())[: 3 if family in CORE else 2]:
        plan = planned(tmp_path / "hf", quantization)
        plan.write(tmp_path / name)
        rounded = rounded_model(model, plan, case.turned)
        config = EngineConfig(data_type="fp32", max_sequence_tokens=64)
        tokens, logits = run_greedy(tmp_path / name, PROMPTS, NEW, config)
        for prompt, ours, our_logits in zip(PROMPTS, tokens, logits):
            wanted, their_logits = hf_greedy(rounded, prompt, NEW)
            assert ours == wanted, (name, prompt)
            assert np.abs(our_logits - their_logits).max() <= 2 * fp32_bound(their_logits), (name, prompt)
