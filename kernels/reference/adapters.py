"""The operations of kernels.adapters.operation in plain torch; part of kernels.reference.Reference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from tridecode.kernels.adapters.operation import NextSums
from tridecode.kernels.operands import AdapterSlots, AdapterTable, Batch, CacheLayer, Heads, Linear, Norm
from tridecode.kernels.reference.products import activated


class ReferenceAdapters(ABC):
    @abstractmethod
    def linear(self, *arguments: Any, **named: Any) -> None: ...

    @abstractmethod
    def norm(self, *arguments: Any, **named: Any) -> None: ...

    @abstractmethod
    def finish_qkv(self, *arguments: Any, **named: Any) -> None: ...

    @property
    def fuses_adapters(self) -> bool:
        return False

    def add_adapters(
        self,
        x: Tensor,
        table: AdapterTable,
        adapters: AdapterSlots,
        *,
        product: Tensor,
        activation: str | None = None,
        residual: Tensor | None = None,
        norm: Norm | None = None,
        normed: Tensor | None = None,
        sums: Tensor | None = None,
        next_sums: NextSums | None = None,
        complete: bool = False,
        out: Tensor,
    ) -> None:
        total = activated(with_deltas(product, x, table, adapters, sums), activation)
        total = total if residual is None else total + residual.float()
        rows = adapters.slots >= 0 if complete else torch.ones_like(adapters.slots, dtype=torch.bool)
        out[rows] = total[rows].to(out.dtype)
        if norm is not None and normed is not None:
            self.norm(out, norm, out=normed)
        if next_sums is not None:
            store_sums(out if normed is None else normed, adapters, next_sums)

    def adapter_sums(
        self,
        x: Tensor,
        table: AdapterTable,
        adapters: AdapterSlots,
        *,
        norm: Norm | None = None,
        normed: Tensor | None = None,
    ) -> Tensor | None:
        if norm is not None and normed is not None:
            self.norm(x, norm, out=normed)
            x = normed
        ranks = max((len(a) for a, _ in table.pairs.values()), default=0)
        following = NextSums(table, torch.empty(x.shape[0], 1, ranks, device=x.device))
        store_sums(x, adapters, following)
        return following.sums

    def linear_keeping(
        self,
        x: Tensor,
        linear: Linear,
        adapters: AdapterSlots,
        *,
        activation: str,
        product: Tensor,
        out: Tensor,
    ) -> bool:
        self.linear(x, linear, activation=activation, out=out)
        rows = adapters.slots >= 0
        kept = torch.empty(int(rows.sum()), product.shape[1], dtype=x.dtype, device=x.device)
        self.linear(x[rows], linear, out=kept)
        product[rows] = kept
        return True

    def linear_with_adapters(
        self,
        x: Tensor,
        linear: Linear,
        table: AdapterTable,
        adapters: AdapterSlots,
        sums: Tensor,
        *,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> bool:
        product = torch.empty(x.shape[0], linear.weight.shape[0], dtype=x.dtype, device=x.device)
        self.linear(x, linear, out=product)
        self.add_adapters(
            x,
            table,
            adapters,
            product=product,
            activation=activation,
            residual=residual,
            sums=sums,
            out=out,
        )
        return True

    def project_qkv_with_adapters(
        self,
        x: Tensor,
        linear: Linear,
        table: AdapterTable,
        adapters: AdapterSlots,
        sums: Tensor,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        *,
        out: Tensor,
    ) -> bool:
        self.linear_with_adapters(x, linear, table, adapters, sums, out=out)
        self.finish_qkv(out, heads, batch, cache)
        return True


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
