"""A rule on quantised matrices, then dequantised, equals the rule on dequantised ones, for every family."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tridecode.backend.weights.layout import WeightSpec
from tridecode.converters.output_layout import output_layout
from tridecode.converters.quantized_rules import joined
from tridecode.converters.rules import (
    Conversion,
    join_transposed,
    same,
    split_groups_transposed,
    split_heads_transposed,
    transpose,
)
from tridecode.kernels.formats.quantized import QuantizedWeight, packed

COLUMNS = 32
#: transform, and the number of outputs of each source
RULES = {
    "transposed": (transpose, [48]),
    "Conv1D": (same, [48]),
    "joined": (join_transposed, [48, 16, 16]),
    "by heads": (partial(split_heads_transposed, 4), [48]),
    "by groups": (partial(split_groups_transposed, 4, None), [64]),
}


def random_weight(format: str, rows: int, seed: int, **changes) -> QuantizedWeight:
    draw = torch.Generator().manual_seed(seed)
    if format == "int4":
        values = packed(torch.randint(0, 16, (rows, COLUMNS), generator=draw))
        zeros = torch.randint(0, 16, (rows, 4), generator=draw).float()
        groups = torch.arange(COLUMNS).flip(0).div(8, rounding_mode="floor").int()
        held = {
            "scales": torch.rand(rows, 4, generator=draw),
            "zeros": zeros,
            "group_size": 8,
            "groups": groups,
        }
    elif format == "int8":
        values = torch.randint(-127, 128, (rows, COLUMNS), generator=draw).to(torch.int8)
        held = {"scales": torch.rand(rows, 1, generator=draw)}
    else:
        values = torch.randn(rows, COLUMNS, generator=draw).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 16), 2, generator=draw)
        held = {"scales": scales, "group_size": 16, "block_rows": 16, "activations": "fp8"}
    return QuantizedWeight(format, COLUMNS, values, **{**held, **changes})


def conversion_of(transform, outputs: list[int]) -> Conversion:
    spec = WeightSpec("model.layers.0.attention.dense.weight", (COLUMNS, sum(outputs)), layer=0)
    return Conversion(spec, tuple("abc"[: len(outputs)]), transform)


@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_quantised_matrices_is_the_rule_of_the_expanded_ones(rule, format) -> None:
    transform, outputs = RULES[rule]
    weights = [random_weight(format, rows, seed) for seed, rows in enumerate(outputs)]
    turned = transform is same
    dense = [weight.expanded().t() if turned else weight.expanded() for weight in weights]
    conversion = conversion_of(transform, outputs)
    layout = output_layout(conversion, [tuple(matrix.shape) for matrix in dense])
    found = joined(layout, weights)
    assert torch.equal(found.expanded().t(), conversion.transform(*dense))
    assert found.activations == weights[0].activations
    if format == "fp8":  # heads of 4 rows split blocks of 16; whole modules do not
        assert found.block_rows == (1 if rule.startswith("by") else 16)


@pytest.mark.parametrize(
    "other",
    [
        random_weight("int8", 16, 1),
        random_weight("int4", 16, 1, groups=None),
        random_weight("int4", 16, 1, groups=torch.arange(COLUMNS, dtype=torch.int32) % 4),
    ],
    ids=["format", "no act-order", "act-order"],
)
def test_matrices_of_other_formats_or_groups_are_not_joined(other) -> None:
    conversion = conversion_of(join_transposed, [48, 16])
    layout = output_layout(conversion, [(48, COLUMNS), (16, COLUMNS)])
    assert joined(layout, [random_weight("int4", 48, 0), other]) is None
    assert joined(layout, [random_weight("int4", 48, 0), random_weight("int4", 16, 1)]) is not None


def test_zeros_beside_none_are_those_that_none_stands_for() -> None:
    weights = [random_weight("int4", 48, 0), random_weight("int4", 16, 1, zeros=None)]
    conversion = conversion_of(join_transposed, [48, 16])
    layout = output_layout(conversion, [(48, COLUMNS), (16, COLUMNS)])
    dense = torch.cat([weight.expanded() for weight in weights])
    assert torch.equal(joined(layout, weights).expanded(), dense)
