"""Products of rows with the matrices of their LoRA adapters."""

from __future__ import annotations

from torch import Tensor

from tridecode.kernels.adapters.operation import NextSums
from tridecode.kernels.operands import AdapterSlots, AdapterTable


def with_deltas(
    product: Tensor, x: Tensor, table: AdapterTable, adapters: AdapterSlots, sums: Tensor | None
) -> Tensor:
    """Return float32 product + x @ a.T @ b. sums: parts of x @ a.T, instead of x."""
    total = product.float().clone()
    for slot, (a, b) in table.pairs.items():
        rows = (adapters.slots == slot).nonzero().squeeze(1)
        if len(rows):
            of_x = x[rows].float() @ a.float().t() if sums is None else sums[rows].sum(1)[:, : len(a)]
            total.index_add_(0, rows, of_x @ b.float())
    return total


def store_sums(x: Tensor, adapters: AdapterSlots, to: NextSums) -> None:
    """Store x @ a.T in the first part of the sums."""
    to.sums.zero_()
    for slot, (a, _) in to.table.pairs.items():
        rows = (adapters.slots == slot).nonzero().squeeze(1)
        to.sums[rows, 0, : len(a)] = x[rows].float() @ a.float().t()
