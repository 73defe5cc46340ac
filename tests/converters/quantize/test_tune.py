"""Tuning of a layer: what is trained, on what, and when it is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from tests.checkpoints import FAMILIES, save, variants
from tests.converters.quantize.float64 import InFloat64
from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion
from tridecode.converters.quantize.calibrate import calibrate_model
from tridecode.converters.quantize.calibrated import Calibrated
from tridecode.converters.quantize.methods import Method, method_of
from tridecode.converters.quantize.products import layer_run
from tridecode.converters.quantize.rounding import Grid
from tridecode.converters.quantize.source_tensors import source_tensors
from tridecode.converters.quantize.tune import (
    Rounded,
    Trained,
    Tuning,
    _Matrix,
    _Parameters,
    norms_of,
    output_error,
)
from tridecode.kernels.formats.quantized import QuantizedWeight, unpacked

CPU = torch.device("cpu")
GROUP = 16
FEW = Tuning(steps=80, tokens=80, level_rate=1e-2, together_steps=0)
#: families and settings that change the parameters of a layer and their places
CASES = [
    "gpt2",
    "bloom",
    "llama",
    "gpt_neox",
    "gptj",
    "falcon-40b",
    "mpt",
    "opt",
    "opt-350m",
    "opt-plain",
    "phi-norms-tied",
    "phi3",
    "baichuan-13b",
    "stablelm-12b",
    "gemma",
    "gemma2",
    "qwen3",
    "gpt_bigcode",
]


def every_other(cases: Sequence[str], first: int) -> list:
    """Return all cases; every other one waits for `make nightly`.

    A layer's output and the model's distribution are tuned by the same code over the same names of tensors:
    each case has one of the two in `make test`.
    """
    return [
        case if number % 2 == first else pytest.param(case, marks=pytest.mark.nightly)
        for number, case in enumerate(cases)
    ]


def planned_of(case: str, directory: Path) -> PlannedConversion:
    return plan_conversion(open_checkpoint(save(variants()[case](), directory, tokenizer=False)), "fp32")


def sequences_of(seed: int = 3, lengths: Sequence[int] = (20, 20, 14, 20, 9, 20)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 331, (length,), generator=generator).tolist() for length in lengths]


def calibrated(planned: PlannedConversion, method: Method, sequences: list[list[int]]) -> Calibrated:
    model = planned.checkpoint.reference_model(torch.float32)
    return calibrate_model(model, planned, sequences, method, device=CPU)


def first_outputs(planned: PlannedConversion, result: Calibrated | None, ids: list[int]) -> Tensor:
    """(T, C) float64: what transformers' first layer makes, with the result's tensors in it."""
    model = planned.checkpoint.reference_model(torch.float32)
    tensors = source_tensors(model, planned)
    for name, value in (result.changed if result else {}).items():
        tensors.write(name, value.expanded().t() if isinstance(value, QuantizedWeight) else value)
    return outputs_of(layer_run(model, planned, [ids], CPU)[2][0], model, ids)[0].double()


def outputs_of(layer: Module, model: Module, ids: list[int]) -> Tensor:
    """(1, T, C)."""
    seen: list[Tensor] = []

    def keep(_module: Module, _args: tuple, output: Tensor | tuple) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    handle = layer.register_forward_hook(keep)
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    handle.remove()
    return seen[0]


def first_error(planned: PlannedConversion, result: Calibrated, sequences: list[list[int]]) -> float:
    """Return the error of the first layer's output, whose inputs are the exact model's."""
    errors: list[float] = []
    for ids in sequences:
        found, wanted = (first_outputs(planned, each, ids) for each in (result, None))
        errors += [float((y - t).norm() ** 2 / t.norm() ** 2) for y, t in zip(found, wanted)]
    return sum(errors) / len(errors)


@pytest.mark.parametrize("case", every_other(CASES, 0))
def test_the_output_comes_nearer_to_the_exact_one(case: str, tmp_path: Path) -> None:
    planned, sequences = planned_of(case, tmp_path / "m"), sequences_of()
    method = method_of("int4-tuned", GROUP, FEW)
    rounded = calibrated(planned, replace(method, tuning=None), sequences)
    tuned = calibrated(planned, method, sequences)
    before, after = (first_error(planned, result, sequences) for result in (rounded, tuned))
    assert after < 0.98 * before
    assert tuned.output_errors[0] == pytest.approx((before, after), rel=1e-3)
    assert not tuned.notes and not rounded.output_errors
    norms = {item.spec.name for item in planned.conversions if "norm" in item.spec.name.split(".")[-2]}
    norms |= {item.spec.name for item in planned.conversions if ".ln_" in item.spec.name}
    trained = {name for name, value in tuned.changed.items() if not isinstance(value, QuantizedWeight)}
    assert {name for name in norms if ".layers." in name} <= trained
    assert set(rounded.changed) <= set(tuned.changed)


def test_tuning_changes_levels_scales_and_norms_and_no_zeros(tmp_path: Path) -> None:
    planned, sequences = planned_of("gpt2", tmp_path / "m"), sequences_of()
    method = method_of("int4-tuned", GROUP, FEW)
    # of the first layer: the second has other inputs
    rounded, tuned = (
        calibrated(planned, each, sequences).changed for each in (replace(method, tuning=None), method)
    )
    name = "model.layers.0.mlp.dense_h_to_4h.weight"
    before, after = rounded[name], tuned[name]
    assert isinstance(before, QuantizedWeight) and isinstance(after, QuantizedWeight)
    assert before.zeros is not None and after.zeros is not None
    assert torch.equal(before.zeros, after.zeros)
    moved = (after.scales / before.scales - 1).abs()
    assert 0 < float(moved.max()) < FEW.rate * FEW.steps
    steps = unpacked(after.values, after.columns).int() - unpacked(before.values, before.columns).int()
    assert 0.001 < float((steps != 0).float().mean()) < 0.5 and int(steps.abs().max()) <= 1
    for kind in ("weight", "bias"):
        norm = f"model.layers.0.input_layernorm.{kind}"
        assert not torch.equal(tuned[norm], rounded[norm])


def assert_same(one: Calibrated, other: Calibrated) -> None:
    """Assert bitwise equality."""
    assert set(one.changed) == set(other.changed)
    for name, value in one.changed.items():
        found = other.changed[name]
        if isinstance(value, QuantizedWeight):
            assert torch.equal(value.values, found.values) and torch.equal(value.scales, found.scales)
        else:
            assert torch.equal(value, found)


def test_texts_and_seed_decide_the_result(tmp_path: Path) -> None:
    planned, sequences = planned_of("llama", tmp_path / "m"), sequences_of()
    method = method_of("int4-tuned", GROUP, Tuning(steps=5, tokens=40, together_steps=0))
    first, again = (calibrated(planned, method, sequences) for _ in range(2))
    assert_same(first, again)
    digest = first.conversion().replaced_by
    assert again.conversion().replaced_by == digest
    assert method.tuning is not None
    seeded = replace(method, tuning=replace(method.tuning, seed=1))
    longer = replace(method, tuning=replace(method.tuning, steps=6))
    for other_method, texts in ((seeded, sequences), (longer, sequences), (method, sequences_of(4))):
        assert calibrated(planned, other_method, texts).conversion().replaced_by != digest


def test_calibration_goes_on_from_the_tuned_layers(tmp_path: Path) -> None:
    """The second layer's errors are those of a model with both layers as the result has them."""
    planned, sequences = planned_of("llama", tmp_path / "m"), sequences_of(lengths=(12, 12))
    model = planned.checkpoint.reference_model(torch.float32)
    method = method_of("int4-tuned", GROUP, FEW)
    result = calibrate_model(model, planned, sequences, method, device=CPU)
    exact, errors = planned.checkpoint.reference_model(torch.float32), []
    for ids in sequences:
        found, wanted = (outputs_of(each.model.layers[1], each, ids) for each in (model, exact))
        errors.append(output_error(found, wanted))
    assert result.output_errors[1][1] == pytest.approx(float(torch.cat(errors, 1).mean()), rel=1e-3)


# ---------------------------------------------------------------- what a step computes


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_behind_a_sequence_changes_nothing_in_it(family: str, tmp_path: Path) -> None:
    planned = planned_of(family, tmp_path / "m")
    model = planned.checkpoint.reference_model(torch.float32)
    run, _, layers = layer_run(model, planned, sequences_of(lengths=(5, 12, 9)), CPU)
    alone = list(run.run(layers[0], 0))
    padded = torch.nn.utils.rnn.pad_sequence([state[0] for state in run.states], batch_first=True)
    with torch.no_grad():
        together = run.call(layers[0], 0, padded)
    for state, output in zip(alone, together):
        apart = (output[None, : state.shape[1]] - state).abs().max()
        assert apart < 1e-5 * state.abs().max()


def test_the_gradient_of_a_rounded_matrix_is_written_out() -> None:
    """Levels outside 0 to 15 have none; the others that of the weight times the scale."""
    generator = torch.Generator().manual_seed(5)
    exact = torch.randn(3, 20, generator=generator, dtype=torch.float64)
    grid = Grid("int4", 8)
    stored = grid.rounded(exact, 0.5)  # half of the range: many lie outside
    matrix = _Matrix(stored, grid, exact.dtype, exact)
    torch.testing.assert_close(matrix.weight().detach(), stored.expanded(torch.float64))
    with torch.no_grad():
        matrix.levels.flatten()[::7] += 40
        matrix.changes += 0.1
    found, factors = matrix.weight(), torch.randn(3, 20, generator=generator, dtype=torch.float64)
    (found * factors).sum().backward()
    assert matrix.levels.grad is not None and matrix.changes.grad is not None and stored.zeros is not None
    levels = matrix.levels.detach()
    for row in range(3):
        for group in range(3):
            columns = range(8 * group, min(8 * group + 8, 20))
            scale, zero = float(stored.scales[row, group]), float(stored.zeros[row, group])
            of_scale = 0.0
            for place, column in enumerate(columns):
                level, factor = round(float(levels[row, group, place])), float(factors[row, column])
                within = 0 <= level <= 15
                of_scale += factor * (min(max(level, 0), 15) - zero) * scale
                wanted = factor * scale * 1.1 if within else 0.0
                assert float(matrix.levels.grad[row, group, place]) == pytest.approx(wanted, abs=1e-12)
            assert float(matrix.changes.grad[row, group, 0]) == pytest.approx(of_scale, abs=1e-12)
    assert (matrix.levels.grad[:, 2, 4:] == 0).all()  # columns 20 to 23 are padding


@pytest.mark.parametrize("case", ["gpt2", "bloom", "llama", "falcon-40b", "phi3", "gemma", "stablelm-12b"])
def test_gradients_are_those_of_the_model_with_the_tensors_written_into_it(case: str, tmp_path: Path) -> None:
    """Compares gradients of scales and norms with finite differences in float64."""
    planned = planned_of(case, tmp_path / "m")
    generator = torch.Generator().manual_seed(6)
    with InFloat64():
        model = planned.checkpoint.reference_model(torch.float32).double()
        run, tensors, layers = layer_run(model, planned, sequences_of(lengths=(7, 7)), CPU)
        grid, layer, matrices = Grid("int4", GROUP), layers[0], {}
        for name in tensors.names():
            spec = tensors.spec(name)
            if spec.layer == 0 and len(spec.shape) == 2 and "norm" not in name:
                exact = tensors.read(name).t().contiguous()
                matrices[name] = Rounded(exact, grid.rounded(exact))
        wanted = torch.cat(list(run.run(layer, 0)))
        trained = Trained(tensors, matrices, norms_of(tensors, 0), grid)
        states = torch.cat(run.states)
        parameters = _Parameters(layer, tensors, list(trained.tensors()))
        outputs = run.call(layer, 0, states, parameters.of(trained.tensors()))
        output_error(outputs, wanted).sum().backward()

        def error() -> float:
            for name, tensor in trained.tensors().items():
                tensors.write(name, tensor.detach())
            with torch.no_grad():
                return float(output_error(run.call(layer, 0, states), wanted).sum())

        assert error() == pytest.approx(float(output_error(outputs.detach(), wanted).sum()), rel=1e-9)
        for changes in trained.relative:
            way = torch.randn(changes.shape, generator=generator, dtype=torch.float64)
            assert changes.grad is not None
            found, far = float((changes.grad * way).sum()), []
            for side in (1e-5, -1e-5):
                with torch.no_grad():
                    changes += side * way
                far.append(error())
                with torch.no_grad():
                    changes -= side * way
            assert found == pytest.approx((far[0] - far[1]) / 2e-5, rel=1e-4, abs=1e-7)


# ---------------------------------------------------------------- what goes wrong


def test_an_error_that_is_not_finite_names_the_layer(tmp_path: Path) -> None:
    method = method_of("int4-tuned", GROUP, Tuning(steps=3, rate=1e30))
    with pytest.raises(CheckpointError, match="tuning layer 0: the error of its output is not finite"):
        calibrated(planned_of("llama", tmp_path / "m"), method, sequences_of())


@pytest.mark.parametrize("case", ["gpt2", "phi3"])
def test_a_layer_that_tuning_makes_worse_stays_as_it_was_rounded(case: str, tmp_path: Path) -> None:
    planned, sequences = planned_of(case, tmp_path / "m"), sequences_of()
    method = method_of("int4-tuned", GROUP, Tuning(steps=2, rate=0.7, level_rate=4.0, together_steps=0))
    rounded = calibrated(planned, replace(method, tuning=None), sequences)
    found = calibrated(planned, method, sequences)
    (note,) = found.notes
    assert "no smaller in layers 0, 1: they keep their rounded values" in note
    assert all(after > before for before, after in found.output_errors)
    assert set(found.changed) == set(rounded.changed)
    for name, value in rounded.changed.items():
        other = found.changed[name]
        if isinstance(value, QuantizedWeight):
            assert torch.equal(value.expanded(), other.expanded()), name
        else:
            assert torch.equal(value, other), name
    assert found.errors == pytest.approx(rounded.errors, rel=1e-4)


def test_progress_moves_while_a_layer_is_tuned(tmp_path: Path) -> None:
    planned, told = planned_of("gpt2", tmp_path / "m"), []
    model = planned.checkpoint.reference_model(torch.float32)
    calibrate_model(
        model,
        planned,
        sequences_of(),
        method_of("int4-tuned", GROUP, Tuning(100, 20, together_steps=50)),
        told.append,
        CPU,
    )
    specs = [item.spec for item in planned.conversions if item.spec.layer is not None]
    assert sum(told) == 4 * sum(int(torch.Size(spec.shape).numel()) for spec in specs)
    assert len(told) == 2 * (4 + 1) + 2 + 1 and min(told) >= 0
