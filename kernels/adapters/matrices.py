"""The layout of a LoRA adapter's matrices for csrc/rows/add_adapters.cu, as in csrc/api/adapters.h."""

from __future__ import annotations

import torch
from torch import Tensor

_SPAN = 64  # outputs per span


def spans_of(b: Tensor) -> Tensor:
    """Return (ceil(O / 64),) int32 on the host: for each 64 outputs of b (R, O), the first rank with a
    nonzero element in the low half, and one past the last such rank in the high half."""
    ranks, outputs = b.shape
    padded = torch.zeros(ranks, -(-outputs // _SPAN) * _SPAN, dtype=torch.bool)
    padded[:, :outputs] = b != 0
    used = padded.view(ranks, -1, _SPAN).any(-1).t()  # (spans, R)
    numbers = torch.arange(ranks, dtype=torch.int32)
    behind = torch.where(used, numbers + 1, 0).amax(-1)
    first = torch.where(used, numbers, ranks).amin(-1).minimum(behind)
    return (first | behind << 16).to(torch.int32)


def entry_of(a: Tensor, b: Tensor, spans: Tensor) -> Tensor:
    """Return (4,) int64, the tridecode_adapter_pair of a (R, in), b (R, O) and spans, all on the device."""
    found = a.data_ptr(), b.data_ptr(), spans.data_ptr(), a.shape[0]
    return torch.tensor(found, dtype=torch.int64)
