"""The operations of a step in which rows have LoRA adapters, with Ops.add_adapters after each GEMM.

Models call operations and do not know about adapters. A GEMM with deltas runs without its activation, rotary
embedding and cache write; add_adapters follows it. If the result is a residual sum that a norm reads next,
add_adapters is deferred and also computes this norm, so that it replaces the norm's launch. Tables are read
on the device, so that a captured graph serves any adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tridecode.backend.engine.adapters.place import Table
from tridecode.kernels.adapters.operation import MOST_NORMED_COLUMNS
from tridecode.kernels.operands import (
    AdapterSlots,
    AdapterTable,
    Batch,
    CacheLayer,
    Heads,
    Linear,
    Norm,
    Product,
)
from tridecode.kernels.ops import Ops

#: tokens whose intermediate results are in memory at once
_CHUNK = 1024


@dataclass(frozen=True)
class Segment:
    """The tokens of a prompt with an adapter, multiplied in one GEMM."""

    tokens: slice
    table: Table


@dataclass(frozen=True)
class _Sum:
    """A GEMM x -> out whose adapters have not been added to out yet."""

    x: Tensor
    table: AdapterTable
    out: Tensor


class AdaptedRows:
    """kernels.ops.Ops for one step with adapters.

    tables: id of a weight -> its table. adapters: the slots of the step's rows. segments: prompts; their rows
    have no slot. defers: whether add_adapters may be deferred to the next norm, because only operations of
    this object read residual sums. last: the weight of the forward's last GEMM, whose sum is read elsewhere.
    """

    def __init__(
        self,
        ops: Ops,
        tables: Mapping[int, AdapterTable],
        adapters: AdapterSlots,
        segments: Sequence[Segment] = (),
        defers: bool = False,
        last: object = None,
    ):
        self._ops, self._tables, self._adapters = ops, tables, adapters
        self._segments, self._defers, self._last = segments, defers, last
        self._waiting: _Sum | None = None
        self._unfinished: Linear | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self.flush()
            return found(*arguments, **named)

        return call

    @property
    def most_linears_rows(self) -> int:
        return 0

    def linears(self, products: Sequence[Product]) -> bool:
        return False

    def flush(self) -> None:
        """Add the adapters of a GEMM that was deferred to a norm."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._add(waiting)

    def norm(self, x: Tensor, norm: Norm, *, out: Tensor) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None or not _same(waiting.out, x) or _same(x, out):
            if waiting is not None:
                self._add(waiting)
            self._ops.norm(x, norm, out=out)
            return
        self._ops.add_adapters(
            waiting.x, waiting.table, self._adapters, product=x, norm=norm, normed=out, out=x
        )

    def linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> None:
        table = self._tables.get(id(linear.weight))
        if table is None:
            self.flush()
            self._ops.linear(x, linear, norm=norm, activation=activation, residual=residual, out=out)
            return
        x = self._normed(x, norm)
        if activation is not None:
            self._activated(x, linear, table, activation, residual, out)
            return
        self._ops.linear(x, linear, residual=residual, out=out)
        self._add_segments(x, linear, out, 0)
        made = _Sum(x, table, out)
        defers = self._defers and residual is not None and linear.weight is not self._last
        if defers and out.shape[1] <= MOST_NORMED_COLUMNS:
            self._waiting = made
        else:
            self._add(made)

    def project_qkv(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        *,
        out: Tensor,
    ) -> None:
        table = self._tables.get(id(linear.weight))
        if table is None:
            self.flush()
            self._ops.project_qkv(x, linear, norm, heads, batch, cache, out=out)
            return
        x = self._normed(x, norm)
        self._ops.linear(x, linear, out=out)
        self._add_segments(x, linear, out, 0)
        self._add(_Sum(x, table, out))
        if batch.decode_tokens == batch.num_tokens:
            self._unfinished = linear  # decode attention finishes the rows
        else:
            self._ops.finish_qkv(out, heads, batch, cache)

    def decode_attention(
        self,
        qkv: Tensor,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        *,
        out: Tensor,
        unfinished: Linear | None = None,
    ) -> None:
        self.flush()
        unfinished, self._unfinished = self._unfinished or unfinished, None
        self._ops.decode_attention(qkv, heads, batch, cache, out=out, unfinished=unfinished)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            self.flush()
            return x
        out = torch.empty_like(x)
        self.norm(x, norm, out=out)
        return out

    def _activated(
        self,
        x: Tensor,
        linear: Linear,
        table: AdapterTable,
        activation: str,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        for first in range(0, x.shape[0], _CHUNK):
            tokens = slice(first, first + _CHUNK)
            adapters = self._adapters if x.shape[0] <= _CHUNK else self._adapters.of(tokens)
            rows = x[tokens]
            product = torch.empty(rows.shape[0], linear.weight.shape[0], dtype=x.dtype, device=x.device)
            self._ops.linear(rows, linear, out=product)
            self._add_segments(rows, linear, product, first)
            self._ops.add_adapters(
                rows,
                table,
                adapters,
                product=product,
                activation=activation,
                residual=None if residual is None else residual[tokens],
                out=out[tokens],
            )

    def _add(self, made: _Sum) -> None:
        self._ops.add_adapters(made.x, made.table, self._adapters, product=made.out, out=made.out)

    def _add_segments(self, x: Tensor, linear: Linear, out: Tensor, first: int) -> None:
        """Compute out += x @ a @ b for the segments. x, out: rows of the step from `first` on."""
        for segment in self._segments:
            pair = segment.table.get(id(linear.weight))
            begin = max(segment.tokens.start - first, 0)
            end = min(segment.tokens.stop - first, x.shape[0])
            if pair is not None and begin < end:
                out[begin:end].addmm_(x[begin:end] @ pair[0], pair[1])


def _same(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape
