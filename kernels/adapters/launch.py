"""Launches the kernels that add LoRA adapters after a GEMM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tridecode.kernels.adapters.operation import (
    ADAPTER_VECTOR,
    MOST_ADAPTED_COLUMNS,
    MOST_NORMED_COLUMNS,
    MOST_SUMMED_RANKS,
    NextSums,
    parts,
    share,
)
from tridecode.kernels.checks import DtypeError, ShapeError, indices, match, same_dtype
from tridecode.kernels.gpu import ACTIVATIONS, DTYPES, ROW_ACTIVATIONS, Gpu, contiguous, pointer
from tridecode.kernels.operands import AdapterSlots, AdapterTable, Norm
from tridecode.kernels.reference.products import GATED

_CODES: dict[str | None, int] = dict(ACTIVATIONS)
_CODES.update(ROW_ACTIVATIONS)
#: maximum columns of a row per block of csrc/rows/add_adapters.cu: the kernel's limit, and the number used
#: without an activation, because short rows leave room for more blocks
_BLOCK_COLUMNS, _FULL_COLUMNS = 8192, 4096


@dataclass(frozen=True)
class Sum:
    """The operands of kernels.adapters.operation.AdapterOps.add_adapters."""

    x: Tensor
    table: AdapterTable
    product: Tensor
    activation: str | None
    residual: Tensor | None
    norm: Norm | None
    normed: Tensor | None
    sums: Tensor | None
    next_sums: NextSums | None
    out: Tensor
    complete: bool = False

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    def check(self) -> None:
        """Raise ShapeError or DtypeError for operands that do not fit together."""
        x, product, residual, norm, out = self.x, self.product, self.residual, self.norm, self.out
        sizes = match("add_adapters", ("TI", "x", x), ("TO", "product", product), ("TC", "out", out))
        inputs, outputs, columns = sizes["I"], sizes["O"], sizes["C"]
        others = [("product", product), ("out", out)]
        if residual is not None:
            match("add_adapters", ("TC", "out", out), ("TC", "residual", residual))
            others.append(("residual", residual))
        if norm is not None and self.normed is not None:
            match("add_adapters", ("TC", "normed", self.normed), ("C", "norm.weight", norm.weight))
            others += [("normed", self.normed), ("norm.weight", norm.weight)]
            others += [("norm.bias", norm.bias)] if norm.bias is not None else []
        same_dtype("add_adapters", ("x", x), *others)
        halves = 2 if self.gated else 1
        if columns * halves != outputs:
            raise ShapeError(
                f"add_adapters: out has {columns} columns; {outputs} outputs give {outputs // halves}"
            )
        if (norm is None) != (self.normed is None) or (norm is not None and self.activation is not None):
            raise ShapeError("add_adapters: norm and normed must be given together, without an activation")
        most = MOST_ADAPTED_COLUMNS if norm is None else MOST_NORMED_COLUMNS
        if columns > most or inputs % ADAPTER_VECTOR or columns % ADAPTER_VECTOR:
            raise ShapeError(
                f"add_adapters: {inputs} inputs and {columns} columns; wanted multiples of {ADAPTER_VECTOR}, "
                f"and at most {most:,} columns"
            )
        contiguous("add_adapters", *([("norm.weight", norm.weight)] if norm is not None else []))

    def check_sums(self) -> None:
        """Raise ShapeError or DtypeError for sums that do not fit."""
        if self.complete and (self.sums is None or self.norm is not None):
            raise ShapeError("add_adapters: complete rows need the sums of x, and no norm")
        if self.norm is None and self.sums is None and self.next_sums is not None:
            raise ShapeError("add_adapters: next_sums need a norm or the sums of x")
        given = [] if self.sums is None else [("sums", self.sums, self.sums.shape[1])]
        if self.next_sums is not None:
            wanted = parts(self.out.shape[1], normed=self.norm is not None, gated=self.gated)
            given.append(("next_sums", self.next_sums.sums, wanted))
        for name, sums, wanted in given:
            if sums.dtype != torch.float32:
                raise DtypeError(f"add_adapters: {name} is {sums.dtype}; wanted float32")
            tokens = self.x.shape[0]
            if sums.shape[:2] != (tokens, wanted) or sums.shape[2] > MOST_SUMMED_RANKS:
                raise ShapeError(
                    f"add_adapters: {name} is {tuple(sums.shape)}; wanted ({tokens}, {wanted}, at most "
                    f"{MOST_SUMMED_RANKS})"
                )
            contiguous("add_adapters", (name, sums))

    def fields(self) -> dict[str, object]:
        """Return the operands' fields of tridecode_adapters_task."""
        x, product, residual, norm, out = self.x, self.product, self.residual, self.norm, self.out
        return dict(
            out=out.data_ptr(),
            product=product.data_ptr(),
            x=x.data_ptr(),
            residual=pointer(residual),
            pairs=self.table.entries.data_ptr(),
            normed=pointer(self.normed),
            norm_weight=0 if norm is None else norm.weight.data_ptr(),
            norm_bias=0 if norm is None else pointer(norm.bias),
            out_stride=out.stride(0),
            product_stride=product.stride(0),
            x_stride=x.stride(0),
            residual_stride=0 if residual is None else residual.stride(0),
            normed_stride=0 if self.normed is None else self.normed.stride(0),
            pair_stride=pair_stride(self.table),
            norm_eps=0.0 if norm is None else norm.eps,
            tokens=x.shape[0],
            inputs=x.shape[1],
            outputs=product.shape[1],
            activation=_CODES[self.activation],
            dtype=DTYPES[out.dtype],
        )

    def sum_fields(self) -> dict[str, object]:
        """Return the fields of the sums and of a row's parts."""
        columns, form = self.out.shape[1], dict(normed=self.norm is not None, gated=self.gated)
        found: dict[str, object] = dict(
            blocks=parts(columns, **form), share=share(columns, **form), complete=self.complete
        )
        if self.sums is not None:
            found |= dict(
                sums=self.sums.data_ptr(), sum_parts=self.sums.shape[1], sum_ranks=self.sums.shape[2]
            )
        following = self.next_sums
        if following is not None:
            found |= dict(
                next_pairs=following.table.entries.data_ptr(),
                next_pair_stride=pair_stride(following.table),
                next_sums=following.sums.data_ptr(),
                next_ranks=following.sums.shape[2],
            )
        return found


def add_adapters(gpu: Gpu, adapters: AdapterSlots, made: Sum) -> None:
    """kernels.adapters.operation.AdapterOps.add_adapters."""
    made.check()
    made.check_sums()
    tokens, slots, order = made.x.shape[0], adapters.slots, adapters.order
    indices("add_adapters", ("slots", slots), *([] if order is None else [("order", order)]))
    for name, array in (("slots", slots), ("order", order)):
        if array is not None and array.shape != (tokens,):
            raise ShapeError(f"add_adapters: {name} is {tuple(array.shape)}; wanted ({tokens},)")
    if tokens == 0:
        return
    rows = dict(slots=slots.data_ptr(), rows=pointer(order))
    groups = adapters.groups
    if made.sums is not None or made.next_sums is not None:
        num_adapted = 0 if order is None or groups is None else groups[-1:, 1].data_ptr()
        fields = made.fields() | made.sum_fields()
        gpu.library.spread_adapters(gpu.stream, **rows, **fields, num_adapted=num_adapted)
    else:
        blocks = _blocks(made.out.shape[1], made.activation, made.norm)
        gpu.library.add_adapters(gpu.stream, **rows, **made.fields(), blocks=blocks)


def pair_stride(table: AdapterTable) -> int:
    """Return the entries between two slots of a table."""
    return table.entries.stride(0) // table.entries.shape[1]


def _blocks(columns: int, activation: str | None, norm: Norm | None) -> int:
    """Return the number of blocks per row: a power of two."""
    if norm is not None:
        return 1
    limit = _FULL_COLUMNS if activation is None else _BLOCK_COLUMNS
    blocks = 1
    while blocks < 8 and columns > blocks * limit:
        blocks *= 2
    return blocks
