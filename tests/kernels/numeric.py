"""Error bounds of operations relative to float64, in units of the output dtype's epsilon.

A 16-bit result is rounded once (half a unit); products and sums are computed in float32. Further rounding is
allowed: attention rounds probabilities to 16 bits before it multiplies them with values, a normalised row is
rounded to 16 bits before its GEMM, and large GEMMs round once more before an activation. float32
results differ by the order of their sums.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

#: units of epsilon, by operation: (16-bit, float32)
BUDGETS = {
    "embed": (0.5, 0.5),
    "norm": (2, 8),
    "linear": (8, 512),
    "two products": (16, 512),  # SwiGLU of rounded weights
    "logits": (512, 512),  # float32 out of 16-bit inputs
    "attention": (8, 64),
}

#: gated activations that epilogues of GEMMs have, and the activation of the gate
GATES = {"swiglu": F.silu, "geglu_tanh": partial(F.gelu, approximate="tanh")}


def assert_close(operation: str, actual: Tensor, expected: Tensor) -> None:
    """Every element within the budget: |actual - expected| <= units * epsilon * (|expected| + mean
    |expected|).

    actual: any float dtype, whose epsilon counts; expected: float64. A NaN or an infinity fails.
    """
    units = BUDGETS[operation][actual.dtype == torch.float32]
    found, wanted = actual.detach().double().cpu(), expected.double().cpu()
    assert found.shape == wanted.shape, (tuple(found.shape), tuple(wanted.shape))
    assert torch.isfinite(found).all(), (
        f"{operation}: {int((~torch.isfinite(found)).sum())} elements are not finite"
    )
    allowed = torch.finfo(actual.dtype).eps * (wanted.abs() + wanted.abs().mean())
    worst = ((found - wanted).abs() / allowed.clamp_min(1e-30)).max().item() if wanted.numel() else 0.0
    assert worst <= units, f"{operation}: off by {worst:.1f} units of {actual.dtype} epsilon; allowed {units}"
