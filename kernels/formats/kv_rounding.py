"""Keys and values in 8 bits: quantisation and dequantisation.

The key of a token in one head has one scale, and so has its value: the largest magnitude divided by the
largest number of the format. No other head or token changes it, so the stored bytes depend neither on the
batch nor on how the tensor ranks share the heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: format -> dtype of the stored values. fp8 is E4M3 without infinities (Micikevicius et al. 2022).
CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # smallest scale: a smaller one loses bits, or is 0


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise x (..., D), any floating dtype -> (values (..., D) of dtype, scales (...,) float32).

    scale = max|x| / 127 (int8) or / 448 (fp8); values = x / scale, rounded to nearest, halves to even. So
    |x - values * scale| is at most scale / 2 in int8 and at most max(|x| / 16, scale / 1024) in fp8. A vector
    of zeros stays zero; one with NaN or infinity has the scale NaN and dequantises to NaN.
    """
    largest = x.abs().amax(dim=-1).float()
    limit = _LARGEST[dtype]
    scales = (largest / limit).clamp_(min=_SMALLEST_SCALE)
    scales.masked_fill_(~largest.isfinite(), torch.nan)
    scaled = (x.float() / scales.unsqueeze(-1)).nan_to_num_(nan=0.0).clamp_(-limit, limit)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scales


def expanded(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise values (..., D) and scales (...,) of `rounded` -> (..., D), computed in float32 and rounded
    to dtype.
    """
    return (values.float() * scales.unsqueeze(-1)).to(dtype)
