"""Every format of a quantised matrix, written at one degree and read at another: slices of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.errors import WeightFileError
from tridecode.backend.models import family, read_model_config
from tridecode.backend.models.quantized_parts import read_quantized, stacked
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.quantization import Quantization
from tridecode.backend.weights.reader import WeightReader
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.kernels.formats.quantized import VALUE_DTYPES, QuantizedWeight, packed

FORMATS = {
    "int8 per channel": Quantization("int8"),
    "int8 in groups": Quantization("int8", group=16),
    "int4 without zeros": Quantization("int4", group=8),
    "int4 with zeros": Quantization("int4", group=16, zeros=True),
    "int4 in act-order": Quantization("int4", group=16, zeros=True, act_order=True),
    "fp8 in blocks": Quantization("fp8", group=128, block_rows=128),
}


def draw(spec: WeightSpec, quantization: Quantization) -> QuantizedWeight:
    """Any values that the format can have."""
    generator = torch.Generator().manual_seed(len(spec.name) + spec.shape[0])
    inputs, outputs = spec.shape
    values = torch.randint(-127, 128, (outputs, inputs), generator=generator)
    if quantization.weights == "int4":
        values = packed(values & 15)
    groups, rows = quantization.num_groups(inputs), -(-outputs // quantization.block_rows)
    shuffled = torch.randint(0, groups, (inputs,), generator=generator, dtype=torch.int32)
    return QuantizedWeight(
        quantization.weights,
        inputs,
        values.to(VALUE_DTYPES[quantization.weights]),
        torch.rand(rows, groups, generator=generator) + 0.5,
        torch.randint(0, 16, (outputs, groups), generator=generator).float() if quantization.zeros else None,
        quantization.group,
        shuffled if quantization.act_order else None,
        quantization.block_rows,
    )


def whole(weight: QuantizedWeight) -> np.ndarray:
    """(in, out) float64, value by value."""
    outputs, inputs = weight.shape
    out = np.zeros((inputs, outputs))
    for i in range(inputs):
        group = int(weight.groups[i]) if weight.groups is not None else i // (weight.group_size or inputs)
        if weight.format == "int4":
            column = (weight.values[:, i // 2].numpy() >> (4 * (i % 2))) & 15
            zero = 8.0 if weight.zeros is None else weight.zeros[:, group].double().numpy()
        else:
            column, zero = weight.values[:, i].double().numpy(), 0.0
        scale = weight.scales[:, group].double().numpy().repeat(weight.block_rows)[:outputs]
        out[i] = (column.astype(np.float64) - zero) * scale
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stored", [1, 2])
def test_ranks_hold_the_slices_of_the_whole_matrix(name: str, stored: int, tmp_path: Path) -> None:
    """Blocks of 128 are cut in their middle, an MLP of 304 is padded on 3 ranks."""
    quantization = FORMATS[name]
    sizes = {"hidden_size": 144, "intermediate_size": 304, "num_hidden_layers": 1}
    sizes["num_key_value_heads"] = 12
    model = FAMILIES["llama"](**{**FAMILIES["llama"].shared, **sizes})
    save(model, tmp_path / "hf", tokenizer=False)
    plan = plan_conversion(open_checkpoint(str(tmp_path / "hf")), "fp32", None, quantization)
    specs = {spec.name: spec for spec in family("llama").weight_specs(plan.config)}
    made = {spec.name: draw(spec, quantization) for spec in specs.values() if quantization.covers(spec)}
    assert len(made) == 5

    def instead(target: str, dense: Callable[[], Tensor]) -> Tensor | QuantizedWeight:
        return made[target] if target in made else dense()

    replace(plan, replaced=instead).write(tmp_path / "w", stored)
    reader = WeightReader(tmp_path / "w", read_model_config(tmp_path / "w"))
    reader.verify_checksums()
    for target, weight in made.items():
        spec, wanted = specs[target], whole(weight)
        for world in (1, 2, 3, 4):
            for rank in range(world):
                held = read_quantized(
                    spec,
                    quantization,
                    lambda file: reader.read(reader.specs[file], rank, world),  # noqa: B023
                    rank,
                    world,
                )
                found, at = held.expanded(torch.float64).numpy().T, 0
                assert found.shape == spec.shard_shape(world)
                for (start, stop), size in zip(spec.slices(rank, world), spec.share_sizes(world)):
                    own, share = (
                        np.take(matrix, range(first, first + stop - start), spec.axis)
                        for matrix, first in ((found, at), (wanted, start))
                    )
                    np.testing.assert_allclose(own, share, rtol=1e-6, err_msg=f"{target} {world} {rank}")
                    at += size


def test_stacked_matrices_keep_their_own_groups() -> None:
    quantization = FORMATS["int4 in act-order"]
    parts = [draw(WeightSpec(name, (48, 20)), quantization) for name in ("a", "longer")]
    parts[1] = replace(parts[1], groups=parts[1].groups.flip(0))
    wanted = np.concatenate([whole(part) for part in parts], axis=1)
    np.testing.assert_allclose(stacked(parts).expanded(torch.float64).numpy().T, wanted, rtol=1e-6)


def test_stacked_blocks_that_end_within_a_block_keep_their_scales() -> None:
    parts = [draw(WeightSpec(name, (144, 200)), FORMATS["fp8 in blocks"]) for name in ("a", "longer")]
    wanted = np.concatenate([whole(part) for part in parts], axis=1)
    np.testing.assert_allclose(stacked(parts).expanded(torch.float64).numpy().T, wanted, rtol=1e-6)


@pytest.mark.parametrize("value", [-1, 3])
def test_a_group_that_does_not_exist_is_refused(value: int) -> None:
    quantization, spec = FORMATS["int4 in act-order"], WeightSpec("m.weight", (48, 20), layer=0)
    weight = draw(spec, quantization)
    tensors = {
        "m.weight.int4": torch.zeros(48, 10, dtype=torch.uint8),
        "m.weight.scale": weight.scales.t(),
        "m.weight.zero": weight.zeros.t().to(torch.uint8),
        "m.weight.group": weight.groups.clone(),
    }
    tensors["m.weight.group"][5] = value
    with pytest.raises(WeightFileError, match=r"m.weight.group holds groups .*; wanted 0 to 2"):
        read_quantized(spec, quantization, tensors.__getitem__, 0, 1)


def test_a_nan_of_fp8_is_refused() -> None:
    spec = WeightSpec("m.weight", (4, 6), layer=0)
    values = torch.zeros(4, 6, dtype=torch.uint8)
    values[1, 1] = 0xFF
    tensors = {"m.weight.fp8": values.view(torch.float8_e4m3fn), "m.weight.scale": torch.ones(1, 6)}
    with pytest.raises(WeightFileError, match="m.weight.fp8 holds values that are not finite"):
        read_quantized(spec, Quantization("fp8"), tensors.__getitem__, 0, 1)
