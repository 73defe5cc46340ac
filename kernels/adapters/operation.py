"""The contract of the operation that adds LoRA adapters after a GEMM; part of kernels.ops.Ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tridecode.kernels.operands import (
    AdapterSlots,
    AdapterTable,
    Batch,
    CacheLayer,
    Heads,
    Linear,
    Norm,
)

#: inputs and outputs of a GEMM with adapters are multiples of this, for vector loads
ADAPTER_VECTOR = 8
#: maximum columns of a result with a norm, and of a result without one
MOST_NORMED_COLUMNS, MOST_ADAPTED_COLUMNS = 8192, 65536
#: maximum ranks whose sums an operation may pass to the next one
MOST_SUMMED_RANKS = 256
#: epilogues load the sums of this many ranks at once
SUM_VECTOR = 4


def sum_ranks(table: AdapterTable) -> int:
    """Return R of the sums for a GEMM with this table, a multiple of SUM_VECTOR; 0: it has too many ranks, or
    their number is not known."""
    if not 0 < table.ranks <= MOST_SUMMED_RANKS:
        return 0
    return -(-table.ranks // SUM_VECTOR) * SUM_VECTOR


@dataclass(frozen=True)
class NextSums:
    """The products of a result with the adapters of the GEMM that reads it next.

    table: of that GEMM. sums: (T, P, R) float32; the sum over P is result @ a.T of each row's adapter, in the
    first columns; the others, and rows without an adapter, are undefined. P: `parts` of the result.
    """

    table: AdapterTable
    sums: Tensor


def share(columns: int, *, normed: bool, gated: bool) -> int:
    """Return how many vectors of ADAPTER_VECTOR columns are one part of a result: a power of two."""
    if normed:
        return 64 if columns <= MOST_NORMED_COLUMNS // 2 else 128
    return 256 if gated else 128


def parts(columns: int, *, normed: bool, gated: bool) -> int:
    """Return the number of parts of a result; with a norm a power of two."""
    vectors = columns // ADAPTER_VECTOR
    found = -(-vectors // share(columns, normed=normed, gated=gated))
    return 1 << (found - 1).bit_length() if normed else found


class AdapterOps(Protocol):
    """The part of kernels.ops.Ops for rows with LoRA adapters."""

    @property
    def fuses_adapters(self) -> bool:
        """Return whether add_adapters takes less time than the same GEMMs in torch."""
        ...

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
        """out[t] = activation(product[t] + x[t] @ a.T @ b) + residual[t], then normed = norm(out).

        a (R, in) and b (R, O) belong to the adapter in slot adapters.slots[t] of the table; they are omitted
        if the slot is -1 or empty. Multiplies and sums in float32; norm reads the rounded out. x: (T, in) X,
        complete before the operation that computes product. product: (T, O) X, the result of `linear` without
        an activation. out, residual: (T, O) X, or (T, O / 2) with a gated activation; out may alias product
        or residual. norm and normed (T, O) X are given together, without an activation, for up to
        MOST_NORMED_COLUMNS columns. sums: those of x, from the call whose result is x. next_sums: filled with
        those of normed or, without a norm, of out; only with a norm or with sums. complete: rows without an
        adapter are in out already (linear_keeping), and their product is undefined; with sums, without a
        norm. in, O and O / 2 are multiples of ADAPTER_VECTOR. Source: Hu et al. 2021. Agrees with peft's
        layers.
        """
        ...

    def adapter_sums(
        self,
        x: Tensor,
        table: AdapterTable,
        adapters: AdapterSlots,
        *,
        norm: Norm | None = None,
        normed: Tensor | None = None,
    ) -> Tensor | None:
        """Return sums of norm(x) for linear_with_adapters, (T, 1, R) float32; normed = norm(x).

        For steps in which many rows have an adapter. Returns None, with nothing done, if no kernel computes
        them. norm and normed (T, in) X are given together.
        """
        ...

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
        """out = activation(x @ weight.T), and product = x @ weight.T for the rows with an adapter.

        Other rows of product are undefined; add_adapters with `complete` follows. Returns False, with nothing
        done, if no kernel does so. activation: a gated one. product: (T, O) X. Other arguments as those of
        `linear` and add_adapters.
        """
        ...

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
        """out = activation(x @ weight.T + bias + x @ a.T @ b) + residual.

        The GEMM's epilogue adds the adapters. Returns False, with nothing done, if no kernel does so:
        `linear` and `add_adapters` compute the same. sums: (T, P, R) float32, those of x, from the call whose
        result is x (NextSums). Other arguments as those of `linear` and add_adapters. On a GPU x @ a.T is
        rounded to X.
        """
        ...

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
        """Compute `project_qkv` of an x that is normalised, with adapters, like linear_with_adapters."""
        ...
