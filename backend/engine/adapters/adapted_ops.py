"""The operations of a step in which rows have LoRA adapters: adds the deltas of its rows to each GEMM.

Models call operations and are unaware of adapters. A GEMM with deltas runs unfused: the norm, the GEMM, the
deltas of each adapter's rows (plain torch), then activation, or rotation and cache. All other operations are
passed on. Such steps allocate, so they do not run as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.adapters.store import Table
from tridecode.kernels.operands import Batch, CacheLayer, Heads, Linear, Norm, Product, RankWords
from tridecode.kernels.ops import Ops
from tridecode.kernels.reference.products import activated

#: tokens whose deltas or activations are in memory at once
_CHUNK = 1024


@dataclass(frozen=True)
class _Part:
    """Tokens of a chunk with one adapter. rows: (n,) int64, counted from the chunk's first token; None: all
    of its tokens.
    """

    rows: Tensor | None
    table: Table


class AdaptedOps:
    """kernels.ops.Ops for one step with adapters.

    numbers: (B,) int32, the number of each row's adapter, -1 for none. query_starts: (B + 1,) int32, as in
    StepPlan. tables: adapters by number.
    """

    def __init__(
        self,
        ops: Ops,
        numbers: np.ndarray,
        query_starts: np.ndarray,
        tables: dict[int, Table],
        device: torch.device,
    ):
        self._ops = ops
        adapters = np.repeat(numbers, np.diff(query_starts))  # (T,)
        self._chunks = [
            (slice(first, first + _CHUNK), _parts(adapters[first : first + _CHUNK], tables, device))
            for first in range(0, len(adapters), _CHUNK)
        ]
        self._weights = {weight for table in tables.values() for weight in table}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

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
        if id(linear.weight) not in self._weights:
            self._ops.linear(x, linear, norm=norm, activation=activation, residual=residual, out=out)
            return
        x = self._normed(x, norm)
        if activation is None:
            self._ops.linear(x, linear, residual=residual, out=out)
            self._add_deltas(x, linear, out)
            return
        for tokens, parts in self._chunks:
            product = torch.empty(x[tokens].shape[0], linear.weight.shape[0], dtype=x.dtype, device=x.device)
            self._ops.linear(x[tokens], linear, out=product)
            _add(parts, x[tokens], linear, product)
            product = activated(product, activation)
            out[tokens] = product if residual is None else product.add_(residual[tokens])

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
        if id(linear.weight) not in self._weights:
            self._ops.project_qkv(x, linear, norm, heads, batch, cache, out=out)
            return
        x = self._normed(x, norm)
        self._ops.linear(x, linear, out=out)
        self._add_deltas(x, linear, out)
        self._ops.finish_qkv(out, heads, batch, cache)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x
        out = torch.empty_like(x)
        self._ops.norm(x, norm, out=out)
        return out

    def _add_deltas(self, x: Tensor, linear: Linear, out: Tensor) -> None:
        for tokens, parts in self._chunks:
            _add(parts, x[tokens], linear, out[tokens])


def _parts(adapters: np.ndarray, tables: dict[int, Table], device: torch.device) -> list[_Part]:
    """Group the tokens of a chunk by adapter. adapters: (T,), one per token; -1: none."""
    parts = []
    for number in np.unique(adapters[adapters >= 0]).tolist():
        rows = None
        if (adapters != number).any():
            rows = torch.from_numpy(np.flatnonzero(adapters == number)).to(device, non_blocking=True)
        parts.append(_Part(rows, tables[number]))
    return parts


def _add(parts: Sequence[_Part], x: Tensor, linear: Linear, out: Tensor) -> None:
    """Compute out[rows] += x[rows] @ a @ b for each adapter, in the dtype of x."""
    for part in parts:
        pair = part.table.get(id(linear.weight))
        if pair is None:
            continue
        a, b = pair
        if part.rows is None:
            out.addmm_(x @ a, b)
        else:
            out.index_add_(0, part.rows, x.index_select(0, part.rows) @ a @ b)
