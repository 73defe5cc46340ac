"""GPTQ: each input's weights are rounded in turn, and later inputs compensate for the error.

Frantar et al. 2022, https://arxiv.org/abs/2210.17323, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.quantize.rounding import Grid
from tridecode.kernels.formats.quantized import QuantizedWeight

_BLOCK = 128  # inputs whose errors are propagated to the rest of the matrix in one GEMM
_MAX_DAMPING = 1.0


def gptq(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    act_order: bool = True,
    static_groups: bool = True,
    damping: float = 0.01,
    shrink: Tensor | float = 1.0,
) -> QuantizedWeight:
    """Round weight (out, in) so that the error of its product with the calibration inputs is small.

    weight: float32 or float64, the dtype of the arithmetic; the Hessian is inverted in float64.
    hessian: (in, in), the mean of x x^T over the inputs x. An input that was always 0 is rounded to nearest.
    act_order: round inputs with large values first, while most others can still compensate.
    static_groups: groups are consecutive inputs, with grids computed before any weight is changed. Otherwise
    a grid is computed from the changed weights when its group begins, and with act_order the groups follow
    that order (`QuantizedWeight.groups`). shrink: see Grid.of, for the grids of static groups. damping: added
    to the Hessian's diagonal, as a share of its mean; multiplied by ten while the matrix is singular.

    Raises CheckpointError if the Hessian is not finite.
    """
    num_inputs, size = weight.shape[1], grid.group_size or weight.shape[1]
    order = torch.arange(num_inputs, device=weight.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _factor(hessian[order][:, order], damping).to(weight.dtype)
    group_of = order // size if static_groups else torch.arange(num_inputs, device=weight.device) // size
    scales, zeros = (part.squeeze(-1).clone() for part in grid.of(grid.grouped(weight), shrink))  # (out, G)
    rest = weight.t()[order].contiguous()  # (in, out), changed as inputs are rounded
    levels = torch.empty_like(rest)
    numbers = group_of.tolist()
    block = max(_BLOCK // size * size, size)  # whole groups
    for start in range(0, num_inputs, block):
        rows = rest[start : start + block]
        errors, stop = torch.empty_like(rows), start + rows.shape[0]
        local = factor[start:stop, start:stop]
        for i, row in enumerate(rows):
            group = numbers[start + i]
            if not static_groups and (start + i) % size == 0:
                made = grid.of(rows[i : i + size].t())
                scales[:, group], zeros[:, group] = (part.squeeze(-1) for part in made)
            scale, zero = scales[:, group], zeros[:, group]
            levels[start + i] = grid.levels(row, scale, zero)
            errors[i] = (row - (levels[start + i] - zero) * scale) / local[i, i]
            rows[i + 1 :] -= local[i, i + 1 :, None] * errors[i]
        rest[stop:] -= factor[start:stop, stop:].t() @ errors
    back = order.argsort()
    groups = group_of[back].int() if act_order and not static_groups and grid.group_size else None
    return grid.stored(levels[back].t().contiguous(), scales, zeros, groups)


def _factor(hessian: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian, (in, in) float64."""
    hessian = hessian.double()
    diagonal = hessian.diagonal()
    if not torch.isfinite(diagonal).all():
        raise CheckpointError("the mean of x x^T over the calibration inputs is not finite")
    mean = diagonal.mean()
    unseen = diagonal == 0
    diagonal[unseen] = torch.where(mean > 0, mean, 1.0)
    identity = torch.eye(hessian.shape[0], dtype=torch.float64, device=hessian.device)
    while True:
        lower, failed = torch.linalg.cholesky_ex(hessian + damping * diagonal.mean() * identity)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
        if damping >= _MAX_DAMPING:
            raise CheckpointError("the mean of x x^T over the calibration inputs is not positive definite")
        damping *= 10
