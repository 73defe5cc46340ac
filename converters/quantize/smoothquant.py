"""SmoothQuant: part of the range of an input with outliers moves into its weights, so that both fit 8 bit.

Xiao et al. 2022, https://arxiv.org/abs/2211.10438, equation 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALPHA = 0.5  # the paper's, for most models
_LEAST = 1e-5  # of the scales


def smoothing_scales(weights: Sequence[Tensor], max_abs: Tensor, alpha: float = ALPHA) -> Tensor:
    """(in,) the scale of each input: its weights are multiplied, what makes the input is divided by it.

    weights: matrices (out, in) over one input. max_abs: (in,) the largest |x|. The scale is
    max_abs ** alpha / max |w| ** (1 - alpha), the largest over all matrices; 1 where either is 0.
    """
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    scales = (max_abs.to(largest.dtype) ** alpha / largest ** (1 - alpha)).clamp(min=_LEAST)
    return torch.where((max_abs > 0) & (largest > 0), scales, 1.0)
