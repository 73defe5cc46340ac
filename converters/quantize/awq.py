"""AWQ: inputs with large activations get finer steps, by a scale per input that the preceding tensor undoes.

Lin et al. 2023, https://arxiv.org/abs/2306.00978, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tridecode.converters.quantize.rounding import Grid
from tridecode.converters.quantize.search import STEPS, best_ranges, loss_of, spread_rows
from tridecode.kernels.formats.quantized import QuantizedWeight


def awq_scales(weights: Sequence[Tensor], hessian: Tensor, mean_abs: Tensor, grid: Grid) -> Tensor:
    """Return (in,), the scale of each input: its weights are multiplied by it, the tensors that produce the
    input are divided by it.

    weights: matrices (out, in) over one input. mean_abs: (in,) the mean of |x|. The scale is mean_abs **
    alpha, divided by the geometric mean of its smallest and largest; alpha is the one of a grid from 0,
    where all scales are 1, with the least loss summed over the matrices.
    """
    best, least = torch.ones_like(mean_abs), torch.inf
    samples = [spread_rows(weight) for weight in weights]
    for step in range(STEPS):
        scales = mean_abs.clamp(min=1e-4 * float(mean_abs.max())) ** (step / STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        loss = sum(float(loss_of(grid.simulated(w * scales) / scales - w, hessian)) for w in samples)
        if loss < least:
            best, least = scales, loss
    return best


def clipped(weight: Tensor, hessian: Tensor, grid: Grid) -> QuantizedWeight:
    """Round weight (out, in) to nearest, each group on the grid of search.best_ranges."""
    return grid.rounded(weight, best_ranges(weight, hessian, grid))
