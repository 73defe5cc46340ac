"""Searches the ranges of groups with the least loss, and has the shared parts of such searches.

The loss is the sum of squared errors of the outputs on the calibration inputs: tr(E H E^T) for an error E
(out, in) of the matrix and H, the mean of x x^T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.converters.quantize.rounding import Grid

STEPS = 20  # grid steps of an exponent from 0 to 1, and of a range from 1 to _LEAST_RANGE
_LEAST_RANGE = 0.5
_ROWS = 256  # outputs of each matrix that the search for an exponent uses


def spread_rows(weight: Tensor) -> Tensor:
    """Return at most 256 evenly spaced outputs of a matrix (out, in)."""
    if weight.shape[0] <= _ROWS:
        return weight
    return weight[torch.linspace(0, weight.shape[0] - 1, _ROWS, device=weight.device).long()]


def loss_of(error: Tensor, hessian: Tensor) -> Tensor:
    """Return tr(E H E^T) of E (out, in) and H (in, in)."""
    return ((error @ hessian) * error).sum()


def best_ranges(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """Return (out, G, 1): for each group of a matrix (out, in), the range with the least loss after rounding
    to nearest, relative to the range of its weights.

    Tries ranges from all to half of the weights' range. The loss of a group counts only its own inputs, that
    is the diagonal blocks of the Hessian.
    """
    grouped = grid.grouped(weight)  # (out, G, size)
    blocks = _diagonal_blocks(hessian, grouped.shape[1], grouped.shape[2])
    best = torch.ones_like(grouped[..., :1])
    least = torch.full_like(best, torch.inf)
    for step in range(STEPS + 1):
        shrink = 1.0 - (1.0 - _LEAST_RANGE) * step / STEPS
        scales, zeros = grid.of(grouped, shrink)
        errors = ((grid.levels(grouped, scales, zeros) - zeros) * scales - grouped).transpose(0, 1)
        losses = ((errors @ blocks) * errors).sum(-1).t()[..., None]  # (out, G, 1)
        better = losses < least
        best, least = torch.where(better, shrink, best), torch.where(better, losses, least)
    return best


def _diagonal_blocks(hessian: Tensor, count: int, size: int) -> Tensor:
    """Return the diagonal blocks (count, size, size), with zeros beyond the last input."""
    blocks = hessian.new_zeros(count, size, size)
    for index in range(count):
        block = hessian[index * size : (index + 1) * size, index * size : (index + 1) * size]
        blocks[index, : block.shape[0], : block.shape[1]] = block
    return blocks
