"""The operations of a step in which rows have LoRA adapters, added in or after each GEMM.

Models call operations and do not know about adapters. If a GEMM's result is a residual sum that a norm reads
next, add_adapters is deferred and also computes this norm, so that it replaces the norm's launch. If another
GEMM with adapters reads the result, add_adapters also multiplies it by their `a`. That GEMM then adds its
adapters in its epilogue, where a kernel does so (Ops.linear_with_adapters). Otherwise it runs without its
activation, rotary embedding and cache write, and add_adapters follows it. Tables are read on the device, so
that a captured graph serves any adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tridecode.backend.engine.adapters.place import Table
from tridecode.kernels.adapters.operation import MOST_NORMED_COLUMNS, NextSums, parts, sum_ranks
from tridecode.kernels.gemm.plan import ADAPTED_TOKENS
from tridecode.kernels.operands import (
    AdapterSlots,
    AdapterTable,
    Batch,
    CacheLayer,
    Heads,
    Linear,
    Norm,
    Product,
    RankWords,
)
from tridecode.kernels.ops import Ops
from tridecode.kernels.reference.products import GATED

#: tokens whose intermediate results are in memory at once
_CHUNK = 1024
#: most rows of a step in which an operation multiplies its result by the next adapters: rows of decode steps,
#: for which csrc/rows/spread_adapters.cu is made
_MOST_ROWS = 256


@dataclass(frozen=True)
class Segment:
    """The tokens of a prompt with an adapter, multiplied in one GEMM."""

    tokens: slice
    table: Table


@dataclass(frozen=True)
class _Sum:
    """A GEMM x -> product whose adapters have not been added yet. out: where they are added. sums: of x.
    complete: only rows with an adapter are missing in out."""

    x: Tensor
    table: AdapterTable
    product: Tensor
    out: Tensor
    sums: Tensor | None = None
    activation: str | None = None
    residual: Tensor | None = None
    complete: bool = False


class AdaptedRows:
    """kernels.ops.Ops for one step with adapters.

    tables: id of a weight -> its table. adapters: the slots of the step's rows. segments: prompts; their rows
    have no slot. defers: whether add_adapters may be deferred to the next operation, because only operations
    of this object read residual sums and activations. last: the weight of the forward's last GEMM, whose sum
    is read elsewhere. spreads: whether operations multiply their results by the next adapters, which gains if
    few rows have an adapter.
    """

    def __init__(
        self,
        ops: Ops,
        tables: Mapping[int, AdapterTable],
        adapters: AdapterSlots,
        segments: Sequence[Segment] = (),
        defers: bool = False,
        last: object = None,
        spreads: bool = True,
    ):
        self._ops, self._tables, self._adapters, self._spreads = ops, tables, adapters, spreads
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

    @property
    def splits_steps(self) -> bool:
        return False

    def linear_sending(self, x: Tensor, linear: Linear, sums: RankWords, *, out: Tensor) -> bool:
        return False  # adapters are added first

    def linears(self, products: Sequence[Product]) -> bool:
        return False

    def flush(self) -> None:
        """Add the adapters of a GEMM that was deferred."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._add(waiting)

    def norm(self, x: Tensor, norm: Norm, *, out: Tensor) -> None:
        self._norm(x, norm, None, out)

    def _norm(self, x: Tensor, norm: Norm, table: AdapterTable | None, out: Tensor) -> Tensor | None:
        """Compute the norm and, if that takes no launch of its own, return the sums of `out` for a GEMM with
        this table."""
        waiting = self._waiting
        if waiting is None or waiting.activation or not _same(waiting.out, x) or _same(x, out):
            self.flush()
            self._ops.norm(x, norm, out=out)
            return None
        self._waiting = None
        following = None if table is None else self._room(table, out, normed=True, gated=False)
        self._add(waiting, norm, out, following)
        return None if following is None else following.sums

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
        x, sums = self._input(x, norm, table)
        if (
            sums is not None
            and self._fuses(linear)
            and self._ops.linear_with_adapters(
                x, linear, table, self._adapters, sums, activation=activation, residual=residual, out=out
            )
        ):
            return
        if activation is not None:
            self._activated(x, sums, linear, table, activation, residual, out)
            return
        self._ops.linear(x, linear, residual=residual, out=out)
        self._add_segments(x, linear, out, 0)
        made = _Sum(x, table, out, out, sums)
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
        x, sums = self._input(x, norm, table)
        if (
            sums is not None
            and self._fuses(linear)
            and self._ops.project_qkv_with_adapters(
                x, linear, table, self._adapters, sums, heads, batch, cache, out=out
            )
        ):
            return
        self._ops.linear(x, linear, out=out)
        self._add_segments(x, linear, out, 0)
        self._add(_Sum(x, table, out, out, sums))
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

    def _fuses(self, linear: Linear) -> bool:
        """Return whether a GEMM should add the adapters in its epilogue.

        In int8 that loses if few rows have an adapter: with six of 64 rows, a replayed step of LLaMA-3-8B
        takes 4260 us on an H200, and 3905 if they are added behind the GEMM.
        """
        return not self._segments and (linear.kind == "dense" or not self._spreads)

    def _input(self, x: Tensor, norm: Norm | None, table: AdapterTable) -> tuple[Tensor, Tensor | None]:
        """Return the input of a GEMM with this table, and its sums unless they are computed behind it."""
        if not self._spreads and not self._segments and x.shape[0] <= ADAPTED_TOKENS:
            return self._summed(x, norm, table)
        if norm is not None:
            out = torch.empty_like(x)
            return out, self._norm(x, norm, table, out)
        waiting = self._waiting
        if waiting is None or waiting.sums is None or not _same(waiting.out, x):
            self.flush()
            return x, None
        self._waiting = None
        following = self._room(table, x, normed=False, gated=waiting.activation in GATED)
        self._add(waiting, following=following)
        return x, None if following is None else following.sums

    def _summed(self, x: Tensor, norm: Norm | None, table: AdapterTable) -> tuple[Tensor, Tensor | None]:
        """_input for steps in which many rows have an adapter: one launch normalises and computes sums."""
        self.flush()
        normed = None if norm is None else torch.empty_like(x)
        sums = self._ops.adapter_sums(x, table, self._adapters, norm=norm, normed=normed)
        if norm is not None and normed is not None and sums is None:
            self._ops.norm(x, norm, out=normed)
        return x if normed is None else normed, sums

    def _activated(
        self,
        x: Tensor,
        sums: Tensor | None,
        linear: Linear,
        table: AdapterTable,
        activation: str,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        for first in range(0, x.shape[0], _CHUNK):
            tokens = slice(first, first + _CHUNK)
            rows = x[tokens]
            product = torch.empty(rows.shape[0], linear.weight.shape[0], dtype=x.dtype, device=x.device)
            keeps = (
                sums is not None
                and residual is None
                and activation in GATED
                and not self._segments
                and self._ops.linear_keeping(
                    rows, linear, self._adapters, activation=activation, product=product, out=out[tokens]
                )
            )
            if not keeps:
                self._ops.linear(rows, linear, out=product)
                self._add_segments(rows, linear, product, first)
            added = None if residual is None else residual[tokens]
            made = _Sum(rows, table, product, out[tokens], sums, activation, added, keeps)
            if x.shape[0] > _CHUNK:
                self._add(made, adapters=self._adapters.of(tokens))
            elif self._defers:
                self._waiting = made
            else:
                self._add(made)

    def _add(
        self,
        made: _Sum,
        norm: Norm | None = None,
        normed: Tensor | None = None,
        following: NextSums | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._ops.add_adapters(
            made.x,
            made.table,
            adapters or self._adapters,
            product=made.product,
            activation=made.activation,
            residual=made.residual,
            norm=norm,
            normed=normed,
            sums=made.sums,
            next_sums=following,
            complete=made.complete,
            out=made.out,
        )

    def _room(self, table: AdapterTable, x: Tensor, *, normed: bool, gated: bool) -> NextSums | None:
        """Return room for the sums of x, or None if they are computed with the GEMM that reads x."""
        (rows, columns), ranks = x.shape, sum_ranks(table)
        if not self._spreads or not ranks or rows > _MOST_ROWS:
            return None
        sizes = rows, parts(columns, normed=normed, gated=gated), ranks
        return NextSums(table, torch.empty(sizes, dtype=torch.float32, device=x.device))

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
