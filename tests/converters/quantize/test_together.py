"""Tuning of all layers together: what it minimises, what it leaves behind, and when it changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from tests.checkpoints import FAMILIES
from tests.converters.quantize.float64 import InFloat64
from tests.converters.quantize.test_tune import (
    CASES,
    CPU,
    GROUP,
    assert_same,
    calibrated,
    every_other,
    planned_of,
    sequences_of,
)
from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.quantize import calibrate as calibration
from tridecode.converters.quantize.calibrated import Calibrated
from tridecode.converters.quantize.methods import method_of
from tridecode.converters.quantize.products import layer_run
from tridecode.converters.quantize.source_tensors import source_tensors
from tridecode.converters.quantize.store import TensorStore
from tridecode.converters.quantize.tune import Tuning
from tridecode.kernels.formats.quantized import QuantizedWeight

FEW = Tuning(steps=20, tokens=80, together_steps=40, together_rate=5e-3)
ALONE = replace(FEW, together_steps=0)


def with_tensors_of(planned: PlannedConversion, result: Calibrated) -> Module:
    model = planned.checkpoint.reference_model(torch.float32)
    tensors = source_tensors(model, planned)
    for name, value in result.changed.items():
        tensors.write(name, value.expanded().t() if isinstance(value, QuantizedWeight) else value)
    return model


def divergence(planned: PlannedConversion, result: Calibrated, sequences: Sequence[list[int]]) -> float:
    """Mean over all tokens, written out."""
    exact, model = planned.checkpoint.reference_model(torch.float32), with_tensors_of(planned, result)
    found: list[float] = []
    for ids in sequences:
        with torch.no_grad():
            p, q = (each(torch.tensor([ids]), use_cache=False).logits[0].double() for each in (exact, model))
        p, q = p.softmax(-1), q.softmax(-1)
        found += (p * (p / q).log()).sum(-1).tolist()
    return sum(found) / len(found)


@pytest.mark.parametrize("case", every_other(CASES, 1))
def test_the_distribution_comes_nearer_to_the_exact_one(case: str, tmp_path: Path) -> None:
    planned, sequences = planned_of(case, tmp_path / "m"), sequences_of()
    alone = calibrated(planned, method_of("int4-tuned", GROUP, ALONE), sequences)
    result = calibrated(planned, method_of("int4-tuned", GROUP, FEW), sequences)
    before, after = (divergence(planned, each, sequences) for each in (alone, result))
    assert after < 0.95 * before
    assert result.divergences == pytest.approx((before, after), rel=2e-3)
    assert alone.divergences is None and set(result.changed) == set(alone.changed)


def test_texts_and_seed_decide_the_result(tmp_path: Path) -> None:
    planned, sequences = planned_of("llama", tmp_path / "m"), sequences_of()
    method = method_of("int4-tuned", GROUP, replace(FEW, steps=3, together_steps=3))
    first, again = (calibrated(planned, method, sequences) for _ in range(2))
    assert first.conversion().replaced_by == again.conversion().replaced_by
    assert_same(first, again)


def test_the_errors_are_those_of_the_tuned_products(tmp_path: Path) -> None:
    """Errors are measured on the tuned model's inputs. Nothing is folded, so the checkpoint has the exact
    matrix."""
    planned, sequences = planned_of("gpt2", tmp_path / "m"), sequences_of()
    method = replace(method_of("int4-tuned", GROUP, FEW), scales=None)
    result = calibrated(planned, method, sequences)
    exact = source_tensors(planned.checkpoint.reference_model(torch.float32), planned)
    model = with_tensors_of(planned, result)
    tensors, inputs = source_tensors(model, planned), list[Tensor]()
    name = "model.layers.1.mlp.dense_h_to_4h.weight"
    module = model.get_submodule(tensors.sources(name)[0].removesuffix(".weight"))
    handle = module.register_forward_pre_hook(lambda _module, args: inputs.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for ids in sequences:
            model(torch.tensor([ids]), use_cache=False)
    handle.remove()
    x = torch.cat(inputs)
    wanted = x @ exact.read(name)
    error = (x @ tensors.read(name) - wanted).norm() / wanted.norm()
    assert result.errors[name] == pytest.approx(float(error), rel=1e-3)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "phi3"])
def test_gradients_of_tensors_are_those_through_the_parameters(family: str, tmp_path: Path) -> None:
    planned = planned_of(family, tmp_path / "m")
    tensors = source_tensors(planned.checkpoint.reference_model(torch.float32).double(), planned)
    with InFloat64():
        generator = torch.Generator().manual_seed(1)
        for name in tensors.names():
            tensor = tensors.read(name).requires_grad_()
            parts = tensors.parts(name, tensor)
            gradients = {
                source: torch.randn(held.shape, generator=generator).to(held)
                for source, held in tensors.parameters(name).items()
            }
            sum((part * gradients[source]).sum() for source, part in parts.items()).backward()
            torch.testing.assert_close(tensors.gradient(name, gradients), tensor.grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_makes_logits_of_the_last_states(family: str, tmp_path: Path) -> None:
    planned, sequences = planned_of(family, tmp_path / "m"), sequences_of(lengths=(9, 9))
    model = planned.checkpoint.reference_model(torch.float32)
    run, _, layers = layer_run(model, planned, sequences, CPU)
    ids = torch.tensor(sequences)
    for index, layer in enumerate(layers):
        run.advance(layer, index)
    with torch.no_grad():
        torch.testing.assert_close(run.head(torch.cat(run.states), ids), model(ids, use_cache=False).logits)


# ---------------------------------------------------------------- when nothing is changed


def test_what_makes_the_divergence_larger_is_left(tmp_path: Path) -> None:
    planned, sequences = planned_of("llama", tmp_path / "m"), sequences_of()
    method = method_of("int4-tuned", GROUP, replace(FEW, together_steps=2, together_rate=0.9))
    found = calibrated(planned, method, sequences)
    alone = calibrated(planned, method_of("int4-tuned", GROUP, ALONE), sequences)
    assert found.divergences is not None and found.divergences[1] > found.divergences[0]
    assert "no smaller: they stay as before" in found.notes[0]
    assert_same(found, alone)
    assert found.errors == pytest.approx(alone.errors, rel=1e-4)


def test_where_memory_is_short_layers_are_tuned_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, sequences = planned_of("llama", tmp_path / "m"), sequences_of()
    monkeypatch.setattr(calibration, "free_memory", lambda device: 1 << 20)
    found = calibrated(planned, method_of("int4-tuned", GROUP, FEW), sequences)
    (note,) = found.notes
    assert "GiB of cpu memory, and 0.0 are free" in note and found.divergences is None
    assert_same(found, calibrated(planned, method_of("int4-tuned", GROUP, ALONE), sequences))


def test_a_divergence_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    method = method_of("int4-tuned", GROUP, replace(FEW, together_steps=3, together_rate=1e30))
    with pytest.raises(CheckpointError, match="tuning all layers: the divergence is not finite"):
        calibrated(planned_of("llama", tmp_path / "m"), method, sequences_of())


def test_a_tensor_that_was_read_stays_when_another_takes_its_name(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    store["a"] = torch.full((1000,), 1.0)
    held = store["a"]
    store["a"] = torch.full((3000,), 2.0)
    assert isinstance(held, Tensor) and (held == 1).all() and (store["a"] == 2).all()
