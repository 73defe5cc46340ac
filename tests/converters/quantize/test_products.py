"""The errors of products with rounded inputs, against numpy's rounding in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.quantized import rounded_fp8, rounded_fp8_blocks, rounded_int8
from tridecode.converters.quantize.products import ProductErrors
from tridecode.converters.quantize.rounding import Grid

OUT, INPUTS, TOKENS = 256, 384, 50


def by_groups(x: np.ndarray) -> np.ndarray:
    return np.hstack([rounded_fp8(x[:, column : column + 128]) for column in range(0, INPUTS, 128)])


@pytest.mark.parametrize(
    ("grid", "matrix", "inputs"),
    [
        (Grid("int8", 0, symmetric=True), rounded_int8, rounded_int8),
        (Grid("fp8", 0, symmetric=True), rounded_fp8, rounded_fp8),
        (Grid("fp8", 128, symmetric=True, block_rows=128), rounded_fp8_blocks, by_groups),
    ],
    ids=["int8", "fp8", "fp8 blocks"],
)
def test_inputs_are_rounded_as_the_format_does(
    grid: Grid,
    matrix: Callable[[np.ndarray], np.ndarray],
    inputs: Callable[[np.ndarray], np.ndarray],
) -> None:
    """The first 128 inputs are 10,000 times the last: with one scale a row these lie below fp8's normal
    numbers."""
    random = np.random.default_rng(7)
    sizes = np.repeat(np.array([100, 1, 0.01], np.float32), 128)
    x = random.standard_normal((TOKENS, INPUTS), np.float32) * sizes
    weight = random.standard_normal((OUT, INPUTS), np.float32) / sizes
    module = torch.nn.Linear(INPUTS, OUT, bias=False)
    stored = replace(grid.rounded(torch.from_numpy(weight)), activations=grid.format)
    errors = ProductErrors()
    errors.expect(module, "w", torch.from_numpy(weight), stored)
    with errors.watching():
        module(torch.from_numpy(x))
    wanted = x.astype(np.float64) @ weight.T.astype(np.float64)
    off = inputs(x) @ matrix(weight).T - wanted
    assert errors.relative()["w"] == pytest.approx(np.linalg.norm(off) / np.linalg.norm(wanted), rel=1e-3)
