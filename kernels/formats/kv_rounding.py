"""Keys and values in 8 bits: what the cache stores, and what it stands for.

The key of a token in one head has one scale, and so has its value: the largest magnitude over the largest
number of the format. No other head or token changes it, so the stored bytes depend neither on the batch nor
on how the tensor ranks share the heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: format -> dtype of the stored values. fp8 is E4M3 without infinities (Micikevicius et al. 2022).
CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a smaller one loses bits, or is 0 and cannot divide


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (..., D) of a floating dtype -> (values (..., D) of dtype, scales (...,) float32).

    scale = max|x| / 127 (int8) or / 448 (fp8); values = x / scale, rounded to nearest, halves to even. So
    |x - values * scale| is at most scale / 2 in int8 and at most max(|x| / 16, scale / 1024) in fp8. A vector
    of zeros stays zero; one with NaN or an infinity has the scale NaN and is NaN when it is expanded.
    """
    largest = x.abs().amax(dim=-1).float()
    limit = _LARGEST[dtype]
    scales = (largest / limit).clamp_(min=_SMALLEST_SCALE)
    scales.masked_fill_(~largest.isfinite(), torch.nan)
    scaled = (x.float() / scales.unsqueeze(-1)).nan_to_num_(nan=0.0).clamp_(-limit, limit)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scales


def expanded(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """values (..., D) and scales (...,) as `rounded` made them -> (..., D): the products, computed in float32
    and rounded to dtype."""
    return (values.float() * scales.unsqueeze(-1)).to(dtype)
