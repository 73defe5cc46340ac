"""AWQ: inputs with large activations get finer steps, by a scale per input that the tensor before takes back.

Lin et al. 2023, https://arxiv.org/abs/2306.00978, section 3. Losses are sums of squares of the products'
errors on
the calibration inputs: tr(E H E^T) of an error E (out, in) of the matrix, and H the mean of x x^T.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tridecode.converters.quantize.rounding import Grid
from tridecode.kernels.quantized import QuantizedWeight

_SEARCH_STEPS = 20  # of alpha from 0 to 1, and of the clipping from 1 to _LEAST_RANGE
_LEAST_RANGE = 0.5
_SEARCH_ROWS = 256  # outputs of each matrix that the search for alpha looks at, evenly spread


def awq_scales(weights: Sequence[Tensor], hessian: Tensor, mean_abs: Tensor, grid: Grid) -> Tensor:
    """(in,) the scale of each input: its weights are multiplied, what makes the input is divided by it.

    weights: matrices (out, in) over one input. mean_abs: (in,) the mean of |x|. The scale is mean_abs **
    alpha, divided by the geometric mean of its smallest and largest; alpha is the one of a grid from 0,
    where all scales are 1, with the least loss summed over the matrices.
    """
    best, least = torch.ones_like(mean_abs), torch.inf
    samples = [_spread_rows(weight) for weight in weights]
    for step in range(_SEARCH_STEPS):
        scales = mean_abs.clamp(min=1e-4 * float(mean_abs.max())) ** (step / _SEARCH_STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        loss = sum(float(_loss(grid.simulated(w * scales) / scales - w, hessian)) for w in samples)
        if loss < least:
            best, least = scales, loss
    return best


def clipped(weight: Tensor, hessian: Tensor, grid: Grid) -> QuantizedWeight:
    """weight (out, in) rounded to nearest, each group on a grid with the range of the least loss.

    Ranges from the whole to half of the weights' range are tried. The loss of a group counts its own inputs
    only, the blocks of the Hessian on the diagonal.
    """
    grouped = grid.grouped(weight)  # (out, G, size)
    blocks = _diagonal_blocks(hessian, grouped.shape[1], grouped.shape[2])
    best = torch.ones_like(grouped[..., :1])
    least = torch.full_like(best, torch.inf)
    for step in range(_SEARCH_STEPS + 1):
        shrink = 1.0 - (1.0 - _LEAST_RANGE) * step / _SEARCH_STEPS
        scales, zeros = grid.of(grouped, shrink)
        errors = ((grid.levels(grouped, scales, zeros) - zeros) * scales - grouped).transpose(0, 1)
        losses = ((errors @ blocks) * errors).sum(-1).t()[..., None]  # (out, G, 1)
        better = losses < least
        best, least = torch.where(better, shrink, best), torch.where(better, losses, least)
    return grid.rounded(weight, best)


def _spread_rows(weight: Tensor) -> Tensor:
    if weight.shape[0] <= _SEARCH_ROWS:
        return weight
    return weight[torch.linspace(0, weight.shape[0] - 1, _SEARCH_ROWS, device=weight.device).long()]


def _loss(error: Tensor, hessian: Tensor) -> Tensor:
    return ((error @ hessian) * error).sum()


def _diagonal_blocks(hessian: Tensor, count: int, size: int) -> Tensor:
    """(count, size, size); zeros beyond the last input."""
    blocks = hessian.new_zeros(count, size, size)
    for index in range(count):
        block = hessian[index * size : (index + 1) * size, index * size : (index + 1) * size]
        blocks[index, : block.shape[0], : block.shape[1]] = block
    return blocks
