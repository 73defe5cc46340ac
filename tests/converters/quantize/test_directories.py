"""Calibrated weight directories: the engine computes what transformers' model with these weights does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Module

from tests.checkpoints import FAMILIES, TEXTS, greedy, save
from tests.thinning import diagonal
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.models import read_model_config
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion
from tridecode.converters.quantize.calibrate import calibrate
from tridecode.converters.quantize.calibrated import Calibrated
from tridecode.converters.quantize.methods import METHODS, method_of
from tridecode.converters.quantize.source_tensors import source_tensors
from tridecode.converters.quantize.structure import layer_matrices
from tridecode.converters.quantize.tune import Tuning
from tridecode.kernels.formats.quantized import QuantizedWeight

SERVED = ["gpt2", "bloom", "llama", "falcon", "phi3", "stablelm", "gemma2", "baichuan"]
PROMPTS = [[5], [7, 9, 11], list(range(20, 45))]


def planned_of(family: str, directory: Path, **settings) -> PlannedConversion:
    return plan_conversion(open_checkpoint(save(FAMILIES[family](**settings), directory)), "fp32")


def model_of(result: Calibrated) -> Module:
    """transformers' model with the result's tensors, and inputs of products rounded as in W8A8."""
    model = result.planned.checkpoint.reference_model(torch.float32)
    tensors = source_tensors(model, result.planned)
    for name, value in result.changed.items():
        dense = value.expanded(torch.float64).t() if isinstance(value, QuantizedWeight) else value
        tensors.write(name, dense.float())
    if result.method.activations:
        specs = [item.spec for item in result.planned.conversions]
        for spec in (spec for layer in range(2) for spec in layer_matrices(specs, layer)):
            for source in tensors.sources(spec.name):
                tensors.model.get_submodule(source.removesuffix(".weight")).register_forward_pre_hook(
                    lambda _module, args: (rounded(args[0], result.method.quantization), *args[1:])
                )
    return model


def rounded(x: Tensor, quantization: Quantization) -> Tensor:
    """x with its rows, or each 128 numbers of them, rounded as the products of a directory round them."""
    if quantization.block_rows > 1:
        parts = [e4m3_rows(part) for part in x.split(128, -1)]
        return torch.cat(parts, -1)
    return e4m3_rows(x) if quantization.activations == "fp8" else int8_rows(x)


def int8_rows(x: Tensor) -> Tensor:
    steps = x.abs().amax(-1, keepdim=True) / 127
    return (x / steps).round() * steps


def e4m3_rows(x: Tensor) -> Tensor:
    scales = x.abs().amax(-1, keepdim=True) / 448
    return (x / scales).to(torch.float8_e4m3fn).to(x.dtype) * scales


@pytest.mark.parametrize(("family", "name"), diagonal(SERVED, METHODS, 3, whole=("gpt2",)))
def test_the_engine_answers_as_the_calibrated_model(family: str, name: str, tmp_path: Path) -> None:
    """An activation next to a half may be rounded to its other neighbour: a difference of 1/127 of the row's
    largest value, in one input, or of 1/8 of it in E4M3."""
    result = calibrate(
        planned_of(family, tmp_path / "m"), TEXTS, method_of(name, 8, Tuning(20, together_steps=10))
    )
    result.conversion().write(tmp_path / "w")
    assert read_model_config(tmp_path / "w").quantization == result.method.quantization
    _, logits = run_greedy(tmp_path / "w", PROMPTS, 1)
    model, shares = model_of(result), []
    for prompt, ours in zip(PROMPTS, logits):
        _, theirs = greedy(model, prompt, 1)
        largest = float(theirs.abs().max()) if result.method.activations else 1.0
        shares.append(float(np.abs(ours - theirs.numpy()).max()) / largest)
    bounds = {"": (1e-3, 1e-3), "int8": (3e-3, 3e-3), "fp8": (3e-3, 4e-2)}  # of the median, of the largest
    median, most = bounds[result.method.quantization.activations]
    assert np.median(shares) <= median and max(shares) <= most, shares


def test_matrices_that_int4_does_not_cover_are_folded_and_stay_dense(tmp_path: Path) -> None:
    """MLPs of 51 columns: two neighbouring outputs share a byte."""
    result = calibrate(
        planned_of("llama", tmp_path / "m", intermediate_size=51), TEXTS, method_of("int4-awq", 8)
    )
    up, down = (result.changed[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("up", "down"))
    assert isinstance(up, Tensor) and isinstance(down, QuantizedWeight)
    result.conversion().write(tmp_path / "w")
    _, logits = run_greedy(tmp_path / "w", PROMPTS, 1)
    for prompt, ours in zip(PROMPTS, logits):
        np.testing.assert_allclose(ours, greedy(model_of(result), prompt, 1)[1].numpy(), atol=1e-3, rtol=0)


def test_a_directory_of_other_texts_is_not_gone_on_with(tmp_path: Path) -> None:
    """Tensors of two calibrations do not fit each other: folded scales differ."""
    planned = planned_of("llama", tmp_path / "m")
    first, second = (calibrate(planned, texts, method_of("int4-awq", 8)) for texts in (TEXTS[:3], TEXTS[3:]))
    manifest = first.conversion().write(tmp_path / "w")
    assert first.conversion().write(tmp_path / "w") == manifest
    with pytest.raises(FileExistsError):
        second.conversion().write(tmp_path / "w")
    again = replace(first.conversion(), replaced_by="")
    with pytest.raises(FileExistsError):
        again.write(tmp_path / "w")
