"""SmoothQuant: part of the range of an input with outliers moves into its weights, so that both fit 8 bit.

Xiao et al. 2022, https://arxiv.org/abs/2211.10438, equation 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tridecode.converters.quantize.rounding import Grid
from tridecode.converters.quantize.search import STEPS, spread_rows
from tridecode.kernels.formats.quantized import as_rounded

ALPHA = 0.5  # the paper's value for most models
_LEAST = 1e-5  # lower bound of the scales


def smoothing_scales(weights: Sequence[Tensor], max_abs: Tensor, alpha: float = ALPHA) -> Tensor:
    """Return (in,) scales. Weights are multiplied by the scale of their input; the tensors that produce the
    input are divided by it.

    weights: matrices (out, in) with the same input. max_abs: (in,) the largest |x|. The scale is
    max_abs ** alpha / max |w| ** (1 - alpha), with the maximum over all matrices; 1 if either is 0.
    """
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    scales = (max_abs.to(largest.dtype) ** alpha / largest ** (1 - alpha)).clamp(min=_LEAST)
    return torch.where((max_abs > 0) & (largest > 0), scales, 1.0)


def searched_smoothing_scales(
    weights: Sequence[Tensor], max_abs: Tensor, sample: Tensor, grid: Grid, activations: str
) -> Tensor:
    """Return smoothing_scales for the alpha with the least error, from a grid of 0 to 1; all 1 if that is
    better.

    sample: (R, in), inputs. activations: the format to which they are quantised. The error is the sum of
    squares over all outputs, with inputs and weights rounded to nearest.
    """
    rows = [spread_rows(weight) for weight in weights]
    exact = [sample @ row.t() for row in rows]

    def loss(scales: Tensor) -> float:
        x = as_rounded(sample / scales, activations)
        rounded = [x @ grid.simulated(row * scales).t() for row in rows]
        return sum(float((found - wanted).square().sum()) for found, wanted in zip(rounded, exact))

    ways = [torch.ones_like(max_abs)]
    ways += [smoothing_scales(weights, max_abs, step / STEPS) for step in range(STEPS + 1)]
    return min(ways, key=loss)
