"""Calibration of whole checkpoints: what runs over the texts, what is stored, and what is refused."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from tests.checkpoints import CORE, FAMILIES, TEXTS, save
from tests.pruned_checkpoints import Cut, prune, unpruned
from tridecode.backend.base.errors import CheckpointError, ConfigError, UnsupportedError
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion
from tridecode.converters.quantize.calibrate import calibrate, calibrate_model
from tridecode.converters.quantize.layers import LayerRun, find_layers
from tridecode.converters.quantize.methods import METHODS, Method, method_of
from tridecode.converters.quantize.rounding import Grid
from tridecode.converters.quantize.source_tensors import source_tensors
from tridecode.converters.quantize.statistics import InputStatistics
from tridecode.converters.quantize.texts import BUILT_IN_NOTE
from tridecode.converters.quantize.tune import Tuning
from tridecode.kernels.formats.quantized import QuantizedWeight

CPU = torch.device("cpu")
SEQUENCES = [[5, 17, 200, 33, 8], [7, 9, 11], [40, 41, 42, 43, 44, 45, 46, 47]]
#: neighbours of one length run together
TOGETHER = [[5, 17, 200, 33, 8], [6, 18, 201, 34, 9], [7, 9, 11]]


def planned_of(family: str, directory: Path, dtype: str = "fp32", **settings) -> PlannedConversion:
    return plan_conversion(open_checkpoint(save(FAMILIES[family](**settings), directory)), dtype)


def logits_of(model: Module, sequences: list[list[int]]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences])


def layers_of(model: Module, planned: PlannedConversion) -> list[Module]:
    tensors = source_tensors(model, planned)
    names = tensors.sources("model.layers.0.attention.dense.weight")
    return find_layers(tensors.model, planned.config.num_layers, names)


@pytest.mark.parametrize("sequences", [SEQUENCES, TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_run_one_by_one_as_in_the_model(
    family: str, sequences: list[list[int]], tmp_path: Path
) -> None:
    """Each layer's output is that of the model's own run, for sequences of several lengths."""
    planned = planned_of(family, tmp_path / "m")
    dtype = torch.float32 if family == "xglm" else torch.float64  # transformers' mask overflows
    model = planned.checkpoint.reference_model(dtype)
    layers, seen = layers_of(model, planned), []

    def keep(_module: Module, _args: tuple, output: Tensor | tuple) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in layers]
    logits_of(model, sequences)
    for handle in handles:
        handle.remove()
    run = LayerRun(model, layers, sequences, CPU, dtype)
    for index, layer in enumerate(layers):
        run.advance(layer, index)
        for number, state in enumerate(run.states):
            torch.testing.assert_close(state, seen[number * len(layers) + index], rtol=1e-5, atol=1e-5)


def test_the_model_is_itself_again_after_the_run(tmp_path: Path) -> None:
    planned = planned_of("llama", tmp_path / "m")
    model = planned.checkpoint.reference_model(torch.float32)
    before = logits_of(model, SEQUENCES)
    LayerRun(model, layers_of(model, planned), SEQUENCES, CPU, torch.float32)
    assert torch.equal(logits_of(model, SEQUENCES), before)


def test_statistics_are_those_of_the_modules_inputs(tmp_path: Path) -> None:
    """The first layer's, whose inputs no quantised layer has changed; a method sees them."""
    planned = planned_of("gpt2", tmp_path / "m")
    model, seen = planned.checkpoint.reference_model(torch.float32), {}
    modules = {"attention.query_key_value": "attn.c_attn", "mlp.dense_4h_to_h": "mlp.c_proj"}
    inputs: dict[str, list[Tensor]] = {name: [] for name in modules}
    for name, module in modules.items():
        model.transformer.h[0].get_submodule(module).register_forward_pre_hook(
            lambda _module, args, name=name: inputs[name].append(args[0][0].double())
        )
    logits_of(model, SEQUENCES)
    wanted = {name: torch.cat(parts) for name, parts in inputs.items()}

    def note(name, weight, statistics, grid):
        seen[name] = statistics
        return grid.rounded(weight)

    calibrate_model(model, planned, SEQUENCES, Method("noted", Grid("int8", 0, True), note), device=CPU)
    for name, x in wanted.items():
        found = seen[f"model.layers.0.{name}.weight"]
        torch.testing.assert_close(found.hessian.double(), x.T @ x / 16, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.mean_abs.double(), x.abs().mean(0), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.max_abs.double(), x.abs().amax(0), rtol=1e-5, atol=0)
        torch.testing.assert_close(found.sample.double(), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family, name",
    [(family, name) for family in FAMILIES for name in METHODS if family in CORE or name == "smoothquant"],
)
def test_the_directorys_tensors_are_the_quantised_models(family: str, name: str, tmp_path: Path) -> None:
    """A model of transformers with the result's tensors, put in by the test, is the calibrated model."""
    planned = planned_of(family, tmp_path / "m")
    model = planned.checkpoint.reference_model(torch.float32)
    result = calibrate_model(
        model, planned, SEQUENCES, method_of(name, 16, Tuning(20, together_steps=10)), device=CPU
    )
    matrices = {key for key, value in result.changed.items() if isinstance(value, QuantizedWeight)}
    specs = {item.spec.name: item.spec for item in planned.conversions}
    assert matrices == {
        key for key, spec in specs.items() if key.endswith(".weight") and _is_product(key, spec.shape)
    }
    fresh = planned.checkpoint.reference_model(torch.float32)
    tensors = source_tensors(fresh, planned)
    for key, value in result.changed.items():
        if isinstance(value, QuantizedWeight):
            assert value.shape == tuple(reversed(specs[key].shape))
            value = value.expanded().t()
        assert value.shape == specs[key].shape
        tensors.write(key, value)
    calibrated, rebuilt = logits_of(model, SEQUENCES), logits_of(fresh, SEQUENCES)
    torch.testing.assert_close(rebuilt, calibrated, rtol=1e-4, atol=1e-4)


def _is_product(name: str, shape: tuple[int, ...]) -> bool:
    return ".layers." in name and len(shape) == 2 and "norm" not in name


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_products_err_less_than_by_rounding(family: str, tmp_path: Path) -> None:
    """Compares the first layer, where all methods have the same inputs."""
    planned = planned_of(family, tmp_path / "m")
    draw = torch.randint(3, 331, (8, 40), generator=torch.Generator().manual_seed(3)).tolist()

    def errors(method: Method) -> dict[str, float]:
        model = planned.checkpoint.reference_model(torch.float32)
        found = calibrate_model(model, planned, draw, method, device=CPU).errors
        return {name: error for name, error in found.items() if ".layers.0." in name}

    def nearest(name, weight, statistics, grid):
        return grid.rounded(weight)

    rounded = errors(Method("nearest", Grid("int4", 24), nearest))
    by_gptq, by_awq = errors(method_of("int4-gptq", 24)), errors(method_of("int4-awq", 24))
    for name, error in rounded.items():
        assert by_gptq[name] < 0.95 * error, name
        assert by_awq[name] < error, name


def test_errors_of_products_are_those_of_the_inputs(tmp_path: Path) -> None:
    """The first layer's query_key_value, whose inputs are the model's own."""
    planned = planned_of("llama", tmp_path / "m")
    model, inputs = planned.checkpoint.reference_model(torch.float32), []
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
        lambda _module, args: inputs.append(args[0][0].double())
    )
    logits_of(model, SEQUENCES)
    x = torch.cat(inputs)
    name = "model.layers.0.attention.query_key_value.weight"
    exact = source_tensors(model, planned).read(name).double()
    result = calibrate_model(model, planned, SEQUENCES, method_of("int4-gptq", 16), device=CPU)
    stored = result.changed[name]
    assert isinstance(stored, QuantizedWeight)
    error = (x @ (exact - stored.expanded().double().t())).norm() / (x @ exact).norm()
    assert result.errors[name] == pytest.approx(float(error), rel=1e-3)


def test_statistics_of_one_layer_are_held(tmp_path: Path) -> None:
    planned = planned_of("gpt2", tmp_path / "m")
    model, held = planned.checkpoint.reference_model(torch.float32), []

    def count(*_arguments) -> None:
        held.append(sum(type(thing) is InputStatistics for thing in gc.get_objects()))

    model.transformer.h[1].mlp.register_forward_hook(count)
    calibrate_model(model, planned, SEQUENCES[:1], method_of("int4-gptq", 16), device=CPU)
    assert max(held) == 4  # query_key_value, dense, up, down


@pytest.mark.parametrize("name", ["int4-gptq", "w8a8-fp8-blocks-gptq"])
def test_finished_layers_leave_the_memory(name: str, tmp_path: Path) -> None:
    """While the last of six layers runs, no more quantised matrices and 8-bit tensors live than one layer
    has; afterwards none does, until one is read."""
    planned = planned_of("gpt2", tmp_path / "m", n_layer=6)
    model, held = planned.checkpoint.reference_model(torch.float32), []

    def living(*_arguments) -> None:
        gc.collect()
        things = gc.get_objects()
        matrices = sum(type(thing) is QuantizedWeight for thing in things)
        narrow = (torch.uint8, torch.int8, torch.float8_e4m3fn)
        values = sum(type(thing) is Tensor and thing.dtype in narrow for thing in things)
        held.append((matrices, values))

    living()
    others, other_values = held.pop()
    model.transformer.h[5].mlp.register_forward_hook(living)
    result = calibrate_model(model, planned, SEQUENCES[:1], method_of(name, 16), device=CPU)
    living()
    assert len(held) == 3  # for the statistics, for the next layer, and at the end
    assert max(matrices for matrices, _ in held) <= others + 4
    assert max(values for _, values in held) <= other_values + 4
    assert held[-1] == (others, other_values)
    assert len(result.changed) == 6 * 4


def test_the_files_of_a_calibration_are_removed_with_it(tmp_path: Path) -> None:
    planned, folder = planned_of("gpt2", tmp_path / "m"), tmp_path / "files"
    model = planned.checkpoint.reference_model(torch.float32)
    result = calibrate_model(model, planned, SEQUENCES, method_of("int4-gptq", 16), device=CPU, folder=folder)
    conversion = result.conversion()
    conversion.write(tmp_path / "w")
    assert list(folder.glob("calibrated-*/*.pt"))
    del result, conversion
    gc.collect()
    assert not list(folder.iterdir())


def test_a_method_takes_as_many_tokens_as_it_wants(tmp_path: Path) -> None:
    planned, method = planned_of("gpt2", tmp_path / "m"), method_of("int4-awq", 16)
    assert calibrate(planned, TEXTS, method).num_tokens > 12
    assert calibrate(planned, TEXTS, replace(method, most_tokens=12)).num_tokens == 12


def test_smoothquant_rounds_activations_too(tmp_path: Path) -> None:
    result = calibrate(planned_of("gpt2", tmp_path / "m"), TEXTS, method_of("smoothquant"))
    stored = [value for value in result.changed.values() if isinstance(value, QuantizedWeight)]
    assert {(value.format, value.activations, value.group_size) for value in stored} == {("int8", "int8", 0)}


def test_a_model_in_16_bit_is_calibrated_in_float32(tmp_path: Path) -> None:
    """Its weights are those of the files; rounding them is the only difference."""
    planned = planned_of("llama", tmp_path / "m", "bf16")
    narrow = planned.checkpoint.reference_model(torch.bfloat16)
    wide = planned.checkpoint.reference_model(torch.bfloat16).float()
    found = calibrate_model(narrow, planned, SEQUENCES, method_of("int4-gptq", 16), device=CPU)
    wanted = calibrate_model(wide, planned, SEQUENCES, method_of("int4-gptq", 16), device=CPU)
    assert next(narrow.parameters()).dtype == torch.bfloat16
    for name, value in wanted.changed.items():
        assert isinstance(value, QuantizedWeight)
        assert found.errors[name] == pytest.approx(wanted.errors[name], rel=0.1)


def test_without_texts_a_note_says_so(tmp_path: Path) -> None:
    result = calibrate(planned_of("gpt2", tmp_path / "m"), None, method_of("int4-gptq", 16))
    assert result.notes == [BUILT_IN_NOTE]
    assert result.num_tokens > 500


def test_too_few_tokens_are_told(tmp_path: Path) -> None:
    """Matrices of up to 96 inputs."""
    planned = planned_of("gpt2", tmp_path / "m")
    (note,) = calibrate(planned, TEXTS[:1], method_of("int4-gptq", 16)).notes
    assert "few for matrices of 96 inputs: int4-gptq wants 384 or more" in note
    assert calibrate(planned, TEXTS[:1], method_of("int4-awq", 16)).notes == []
    assert calibrate(planned, TEXTS * 2, method_of("int4-gptq", 16)).notes == []


# ---------------------------------------------------------------- refused


def test_a_pruned_checkpoint_is_refused(tmp_path: Path) -> None:
    source = prune(unpruned("llama"), {0: Cut(heads=(2, 3))}).save(tmp_path / "m")
    planned = plan_conversion(open_checkpoint(source), "fp32")
    with pytest.raises(UnsupportedError, match="pruned; calibration needs layers of equal sizes"):
        calibrate(planned, TEXTS, method_of("int4-gptq"))


def test_a_weight_directory_is_refused(tmp_path: Path) -> None:
    planned_of("gpt2", tmp_path / "m").write(tmp_path / "w")
    planned = plan_conversion(open_checkpoint(tmp_path / "w"), "fp32")
    with pytest.raises(UnsupportedError, match="weight directory; calibration needs the checkpoint"):
        calibrate(planned, TEXTS, method_of("int4-gptq"))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = FAMILIES["gpt2"]()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[3, 4] = torch.nan
    planned = plan_conversion(open_checkpoint(save(model, tmp_path / "m")), "fp32")
    with pytest.raises(CheckpointError, match="transformer.h.1.mlp.c_proj .* not finite"):
        calibrate(planned, TEXTS, method_of("int4-gptq", 16))


@pytest.mark.parametrize(
    "name, group_size, complaint",
    [
        ("int3", 128, "'int3'; wanted one of int8-gptq, fp8-gptq, w8a8-int8-gptq"),
        ("int4-awq", 0, "group size is 0; wanted 1 or more"),
    ],
)
def test_an_unknown_method_is_refused(name: str, group_size: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        method_of(name, group_size)
