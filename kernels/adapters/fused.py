"""The adapters of a GEMM whose epilogue adds them: their sums, and the fields of the GEMM's task."""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.adapters.launch import pair_stride
from tridecode.kernels.adapters.operation import (
    MOST_NORMED_COLUMNS,
    MOST_SUMMED_RANKS,
    SUM_VECTOR,
    sum_ranks,
)
from tridecode.kernels.checks import DtypeError, ShapeError, indices, match, same_dtype
from tridecode.kernels.gemm.plan import ADAPTED_SLOTS, ADAPTED_TOKENS
from tridecode.kernels.gpu import DTYPES, Gpu, aligned, contiguous, pointer
from tridecode.kernels.operands import AdapterSlots, AdapterTable, Linear, Norm


def fits(x: Tensor, table: AdapterTable, adapters: AdapterSlots) -> bool:
    """Return whether an epilogue supports the adapters of these rows."""
    slots = table.entries.shape[0]
    return adapters.groups is not None and x.shape[0] <= ADAPTED_TOKENS and slots <= ADAPTED_SLOTS


def adapter_fields(
    what: str, x: Tensor, table: AdapterTable, adapters: AdapterSlots, sums: Tensor
) -> dict[str, int]:
    """Return the fields that tridecode_adapted_gemm_task adds to a GEMM of x.

    sums: (T, P, R) float32, as NextSums.sums. Raises ShapeError or DtypeError for sums that do not fit.
    """
    groups, slots = adapters.groups, adapters.slots
    assert groups is not None
    if sums.dtype != torch.float32:
        raise DtypeError(f"{what}: sums are {sums.dtype}; wanted float32")
    tokens, ranks = x.shape[0], sums.shape[2]
    if sums.shape[0] != tokens or ranks % SUM_VECTOR or ranks > MOST_SUMMED_RANKS:
        raise ShapeError(
            f"{what}: sums are {tuple(sums.shape)}; wanted ({tokens}, parts, a multiple of {SUM_VECTOR})"
        )
    contiguous(what, ("sums", sums), ("groups", groups))
    indices(what, ("slots", slots), ("groups", groups.flatten()))
    if slots.shape != (tokens,):
        raise ShapeError(f"{what}: slots are {tuple(slots.shape)}; wanted ({tokens},)")
    return {
        "pairs": table.entries.data_ptr(),
        "pair_stride": pair_stride(table),
        "slots": slots.data_ptr(),
        "groups": groups.data_ptr(),
        "num_groups": groups.shape[0],
        "sums": sums.data_ptr(),
        "sum_parts": sums.shape[1],
        "sum_ranks": ranks,
    }


def kept_fields(x: Tensor, linear: Linear, adapters: AdapterSlots, product: Tensor) -> dict[str, int]:
    """Return the fields that tridecode_kept_gemm_task adds to a GEMM of x.

    product: (T, O), as x. Raises ShapeError or DtypeError for operands that do not fit.
    """
    what, slots = "linear_keeping", adapters.slots
    same_dtype(what, ("x", x), ("product", product))
    indices(what, ("slots", slots))
    wanted = x.shape[0], linear.weight.shape[0]
    if tuple(product.shape) != wanted or slots.shape != wanted[:1]:
        raise ShapeError(
            f"{what}: product is {tuple(product.shape)} and slots {tuple(slots.shape)}; wanted {wanted} and "
            f"({wanted[0]},)"
        )
    return {
        "slots": slots.data_ptr(),
        "product": product.data_ptr(),
        "product_stride": product.stride(0),
    }


def adapter_sums(
    gpu: Gpu,
    x: Tensor,
    table: AdapterTable,
    adapters: AdapterSlots,
    norm: Norm | None,
    normed: Tensor | None,
) -> Tensor | None:
    """kernels.adapters.operation.AdapterOps.adapter_sums."""
    (tokens, inputs), order, groups, ranks = x.shape, adapters.order, adapters.groups, sum_ranks(table)
    if not fits(x, table, adapters) or order is None or not ranks:
        return None
    if gpu.capability != 90 or x.dtype not in (torch.float16, torch.bfloat16) or not aligned(x):
        return None
    assert groups is not None
    indices("adapter_sums", ("order", order), ("groups", groups.flatten()))
    if order.shape != (tokens,):
        raise ShapeError(f"adapter_sums: order is {tuple(order.shape)}; wanted ({tokens},)")
    if norm is not None and normed is not None:
        match("adapter_sums", ("TC", "x", x), ("C", "norm.weight", norm.weight), ("TC", "normed", normed))
        same_dtype("adapter_sums", ("x", x), ("norm.weight", norm.weight), ("normed", normed))
        if norm.bias is not None or inputs > MOST_NORMED_COLUMNS:
            gpu.norm(x, norm, normed)
            x, norm, normed = normed, None, None
    sums = torch.empty(tokens, 1, ranks, device=x.device)
    gpu.library.adapter_sums(
        gpu.stream,
        sums=sums.data_ptr(),
        x=x.data_ptr(),
        norm_weight=0 if norm is None else norm.weight.data_ptr(),
        pairs=table.entries.data_ptr(),
        order=order.data_ptr(),
        groups=groups.data_ptr(),
        normed=pointer(normed),
        x_stride=x.stride(0),
        normed_stride=0 if normed is None else normed.stride(0),
        pair_stride=pair_stride(table),
        norm_eps=0.0 if norm is None else norm.eps,
        tokens=tokens,
        inputs=inputs,
        sum_ranks=ranks,
        num_groups=groups.shape[0],
        dtype=DTYPES[x.dtype],
    )
    return sums
