"""Launches the kernel that adds LoRA adapters after a GEMM."""

from __future__ import annotations

from torch import Tensor

from tridecode.kernels.adapters.operation import ADAPTER_VECTOR, MOST_ADAPTED_COLUMNS, MOST_NORMED_COLUMNS
from tridecode.kernels.checks import ShapeError, indices, match, same_dtype
from tridecode.kernels.gpu import ACTIVATIONS, DTYPES, ROW_ACTIVATIONS, Gpu, contiguous, pointer
from tridecode.kernels.operands import AdapterSlots, AdapterTable, Norm
from tridecode.kernels.reference.products import GATED

_CODES: dict[str | None, int] = dict(ACTIVATIONS)
_CODES.update(ROW_ACTIVATIONS)
#: maximum columns of a row per block of csrc/rows/add_adapters.cu: the kernel's limit, and the number used
#: without an activation, because short rows leave room for more blocks
_BLOCK_COLUMNS, _FULL_COLUMNS = 8192, 4096


def add_adapters(
    gpu: Gpu,
    x: Tensor,
    table: AdapterTable,
    adapters: AdapterSlots,
    product: Tensor,
    activation: str | None,
    residual: Tensor | None,
    norm: Norm | None,
    normed: Tensor | None,
    out: Tensor,
) -> None:
    """kernels.adapters.operation.AdapterOps.add_adapters."""
    sizes = match("add_adapters", ("TI", "x", x), ("TO", "product", product), ("TC", "out", out))
    inputs, outputs, columns = sizes["I"], sizes["O"], sizes["C"]
    others = [("product", product), ("out", out)]
    if residual is not None:
        match("add_adapters", ("TC", "out", out), ("TC", "residual", residual))
        others.append(("residual", residual))
    if norm is not None and normed is not None:
        match("add_adapters", ("TC", "normed", normed), ("C", "norm.weight", norm.weight))
        others += [("normed", normed), ("norm.weight", norm.weight)]
        others += [("norm.bias", norm.bias)] if norm.bias is not None else []
    dtype = same_dtype("add_adapters", ("x", x), *others)
    halves = 2 if activation in GATED else 1
    if columns * halves != outputs:
        raise ShapeError(
            f"add_adapters: out has {columns} columns; {outputs} outputs give {outputs // halves}"
        )
    if (norm is None) != (normed is None) or (norm is not None and activation is not None):
        raise ShapeError("add_adapters: norm and normed must be given together, without an activation")
    most = MOST_ADAPTED_COLUMNS if norm is None else MOST_NORMED_COLUMNS
    if columns > most or inputs % ADAPTER_VECTOR or columns % ADAPTER_VECTOR:
        raise ShapeError(
            f"add_adapters: {inputs} inputs and {columns} columns; wanted multiples of {ADAPTER_VECTOR}, and "
            f"at most {most:,} columns"
        )
    slots, order = adapters.slots, adapters.order
    indices("add_adapters", ("slots", slots), *([] if order is None else [("order", order)]))
    for name, array in (("slots", slots), ("order", order)):
        if array is not None and array.shape != (x.shape[0],):
            raise ShapeError(f"add_adapters: {name} is {tuple(array.shape)}; wanted ({x.shape[0]},)")
    if x.shape[0] == 0:
        return
    contiguous("add_adapters", *([("norm.weight", norm.weight)] if norm is not None else []))
    gpu.library.add_adapters(
        gpu.stream,
        out=out.data_ptr(),
        product=product.data_ptr(),
        x=x.data_ptr(),
        residual=pointer(residual),
        pairs=table.entries.data_ptr(),
        slots=slots.data_ptr(),
        rows=pointer(order),
        normed=pointer(normed),
        norm_weight=0 if norm is None else norm.weight.data_ptr(),
        norm_bias=0 if norm is None else pointer(norm.bias),
        out_stride=out.stride(0),
        product_stride=product.stride(0),
        x_stride=x.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        normed_stride=0 if normed is None else normed.stride(0),
        pair_stride=table.entries.stride(0) // table.entries.shape[1],
        norm_eps=0.0 if norm is None else norm.eps,
        tokens=x.shape[0],
        inputs=inputs,
        outputs=outputs,
        activation=_CODES[activation],
        blocks=_blocks(columns, activation, norm),
        dtype=DTYPES[dtype],
    )


def _blocks(columns: int, activation: str | None, norm: Norm | None) -> int:
    """Return the number of blocks per row: a power of two."""
    if norm is not None:
        return 1
    limit = _FULL_COLUMNS if activation is None else _BLOCK_COLUMNS
    blocks = 1
    while blocks < 8 and columns > blocks * limit:
        blocks *= 2
    return blocks
