"""The parts of a decoder layer: attention over a paged cache, and GEMMs summed over the tensor ranks.

Letters as in kernels.ops. A part allocates nothing: every buffer comes from `context.Workspace`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models.context import Context, Ranks, Rows, RowSums
from tridecode.backend.weights.layout import share_size
from tridecode.kernels.operands import CacheLayer, DecoderLayer, Heads, Linear, Norm, Product, Rope


def attention(context: Context, rows: Rows | None, qkv: Linear, heads: Heads, cache: CacheLayer) -> Tensor:
    """Return (T, H * D), causal attention of the rows over the cache; writes the new keys and values to the
    cache.

    rows: None if the buffer "qkv" already holds the output of project_qkv, but not yet rotated or cached.
    """
    ops, batch = context.ops, context.batch
    projected = context.parts("qkv", heads.qkv_size)
    out = context.parts("context", heads.num_heads * heads.head_size)
    unfinished = None
    if rows is not None:
        ops.project_qkv(rows.x, qkv, rows.norm, heads, batch, cache, out=projected.whole)
    elif batch.decode_tokens == batch.num_tokens:
        unfinished = qkv
    else:
        ops.finish_qkv(projected.whole, heads, batch, cache)
    if batch.num_decodes:
        ops.decode_attention(projected.decodes, heads, batch, cache, out=out.decodes, unfinished=unfinished)
    if batch.decode_tokens < batch.num_tokens:
        ops.prefill_attention(projected.prompts, heads, batch, cache, out=out.prompts)
    return out.whole


def add_linears(
    context: Context, residual: Tensor, *products: tuple[Tensor, Linear], norm: Norm | None = None
) -> Rows:
    """Compute residual += x @ weight.T + bias of each (x, linear), summed over the tensor ranks.

    Returns the residual, normalised by `norm`, as the next GEMM's input. If the sum over the ranks also
    computes the norm, its rows are in work.delta until the next call.
    """
    if context.ranks.tensor_size == 1:
        for x, linear in products:
            context.ops.linear(x, linear, residual=residual, out=residual)
        return Rows(residual, norm)
    sums = context.ranks.row_sums(residual)
    if sums is None:
        residual.add_(_sum_over_ranks(context, *products))
        return Rows(residual, norm)
    normed = None if norm is None else context.work.delta[: context.num_tokens]
    _add_parts(context, sums, products, residual, norm, out=residual, normed=normed)
    return Rows(residual, None) if normed is None else Rows(normed, None)


class Following(NamedTuple):
    """The attention of the next layer: its norm, its QKV projection, and that projection's number of
    columns.
    """

    norm: Norm
    qkv: Linear
    columns: int


def finish_layer(
    context: Context,
    x: Tensor,
    attended: Tensor,
    layer: DecoderLayer,
    activation: str,
    following: Following | None,
    parallel: bool = False,
) -> bool:
    """Compute the rest of a layer after its attention in one launch, if the operations have one.

    That is x += dense(attended), x += mlp(norm(x)) and project_qkv of the following layer. parallel: the MLP
    reads the same x as attention. Returns False if nothing was done: so with tensor ranks for a parallel MLP
    and for the last layer, whose sum no GEMM of the launch would read.
    """
    if context.ranks.tensor_size > 1:
        return not parallel and finish_sandwich_layer(
            context, x, attended, layer, activation, (None, None), following
        )
    mlp = context.mlp(layer)
    dense = Product(attended, layer.dense, x, residual=x)
    up = Product(x, layer.up, mlp, norm=layer.mlp_norm, activation=activation)
    # the parallel MLP's first GEMM goes before the output projection changes x: neither waits for the other
    first = [up, dense] if parallel else [dense, up]
    down = Product(mlp, layer.down, x, residual=x)
    return context.ops.linears([*first, down, *_projection(context, x, following)])


def finish_sandwich_layer(
    context: Context,
    x: Tensor,
    attended: Tensor,
    layer: DecoderLayer,
    activation: str,
    outer: tuple[Norm | None, Norm | None],
    following: Following | None,
) -> bool:
    """Compute the rest of a layer with norms around attention and MLP, like finish_layer. outer: the norms of
    their results; None, with tensor ranks only: there is none. Returns False for the last layer.
    """
    sums = None if context.ranks.tensor_size == 1 else context.ranks.row_sums(x)
    if following is None or (sums is None and context.ranks.tensor_size > 1):
        return False
    mlp, delta = context.mlp(layer), context.work.delta[: context.num_tokens]
    dense, down = (_first_with_bias(context, linear) for linear in (layer.dense, layer.down))
    products = [
        Product(attended, dense, delta, over_ranks=sums),
        Product(delta, layer.up, mlp, norm=layer.mlp_norm, activation=activation, stream=(x, outer[0])),
        Product(mlp, down, delta, over_ranks=sums),
    ]
    return context.ops.linears(products + _projection(context, delta, following, stream=(x, outer[1])))


def _projection(
    context: Context, x: Tensor, following: Following | None, stream: tuple[Tensor, Norm | None] | None = None
) -> list[Product]:
    """Return the QKV projection of the next layer, if there is one."""
    if following is None:
        return []
    qkv = context.parts("qkv", following.columns).whole
    return [Product(x, following.qkv, qkv, norm=following.norm, stream=stream)]


def _first_with_bias(context: Context, linear: Linear) -> Linear:
    """Return the linear with its bias on the first tensor rank, without it on the others."""
    return linear if context.ranks.tensor_rank == 0 or linear.bias is None else replace(linear, bias=None)


def add_and_norm(context: Context, x: Tensor, product: tuple[Tensor, Linear], norm: Norm) -> None:
    """Compute x = norm(x + y @ weight.T + bias) of (y, linear), summed over the tensor ranks."""
    sums = None if context.ranks.tensor_size == 1 else context.ranks.row_sums(x)
    if sums is None:
        add_linears(context, x, product)
        context.ops.norm(x, norm, out=x)
        return
    _add_parts(context, sums, [product], x, norm, out=None, normed=x)


def add_normed(
    context: Context, residual: Tensor, product: tuple[Tensor, Linear], norm: Norm, next_norm: Norm | None
) -> Rows:
    """Compute residual += norm(y @ weight.T + bias) of (y, linear), with the GEMM summed over tensor ranks.

    Returns next_norm(residual) as the next GEMM's input; it is in work.delta until the next call. next_norm
    None: returns the residual.
    """
    sums = None if context.ranks.tensor_size == 1 else context.ranks.row_sums(residual)
    normed: Norm | None = norm
    if sums is None:
        delta = _sum_over_ranks(context, product)
    else:
        delta, normed = context.work.delta[: context.num_tokens], None
        _add_parts(context, sums, [product], None, norm, out=None, normed=delta)
    if next_norm is None:
        context.ops.add_normed(residual, delta, normed)
        return Rows(residual, None)
    context.ops.add_normed(residual, delta, normed, next_norm, normed=delta)
    return Rows(delta, None)


def add_over_ranks(context: Context, x: Tensor, norm: Norm | None) -> None:
    """Compute x = norm(the sum of every rank's x), or the sum without a norm."""
    sums = context.ranks.row_sums(x)
    if sums is not None:
        sums.add_rows(x, norm=norm, out=x if norm is None else None, normed=None if norm is None else x)
        return
    context.ranks.all_reduce(x)
    if norm is not None:
        context.ops.norm(x, norm, out=x)


def _sum_over_ranks(context: Context, *products: tuple[Tensor, Linear]) -> Tensor:
    """Return (T, C), the sum of x @ weight.T + bias of each (x, linear), in work.delta."""
    # every rank has the whole bias: only the first adds it
    delta = _partial_sums(context, context.ranks.tensor_rank == 0, *products)
    context.ranks.all_reduce(delta)
    return delta


def _add_parts(
    context: Context,
    sums: RowSums,
    products: Sequence[tuple[Tensor, Linear]],
    residual: Tensor | None,
    norm: Norm | None,
    *,
    out: Tensor | None,
    normed: Tensor | None,
) -> None:
    """Compute RowSums.add_rows of the sum of the products, whose parts are in work.delta."""
    sent = False
    if len(products) == 1:
        ((x, linear),) = products
        delta = context.work.delta[: context.num_tokens]
        sent = context.ops.linear_sending(x, replace(linear, bias=None), sums, out=delta)
    if not sent:
        delta = _partial_sums(context, False, *products)
    biases = _biases(products)
    sums.add_rows(delta, biases, residual, norm, out=out, normed=normed, follows_product=True, sent=sent)


def _partial_sums(context: Context, with_biases: bool, *products: tuple[Tensor, Linear]) -> Tensor:
    """Return (T, C), this rank's part of the sum of x @ weight.T + bias of each (x, linear), in
    work.delta.
    """
    delta = context.work.delta[: context.num_tokens]
    for index, (x, linear) in enumerate(products):
        partial = linear if with_biases or linear.bias is None else replace(linear, bias=None)
        context.ops.linear(x, partial, residual=delta if index else None, out=delta)
    return delta


def _biases(products: Sequence[tuple[Tensor, Linear]]) -> list[Tensor]:
    return [linear.bias for _, linear in products if linear.bias is not None]


def alibi_slopes(num_heads: int, largest: float = 8.0) -> Tensor:
    """Return the (num_heads,) float32 slopes of Press et al. 2022, with their rule for numbers that are not
    powers of two.

    2^(-8/n), 2^(-16/n), ... for the largest power of two n <= num_heads, then every other slope of the
    sequence for 2n. largest: replaces the 8 (MPT's alibi_bias_max).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-largest * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-largest * (2 * i + 1) / (2 * power)) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


def make_heads(
    config: ModelConfig,
    ranks: Ranks,
    rope: Rope | None = None,
    slopes: Tensor | None = None,
    scale: float | None = None,
    key_bias: Tensor | None = None,
    **fields: Any,
) -> Heads:
    """Return this rank's share of the heads of a layer.

    slopes: (num_heads,), key_bias: (num_heads, positions), of all ranks. scale: factor of the scores; None:
    attention_scale's. fields: further fields of Heads.
    """
    assert not config.layer_sizes, "layers differ in heads: use Decoder.layer_heads"
    num_heads = config.num_heads // ranks.tensor_size
    mine = slice(ranks.tensor_rank * num_heads, (ranks.tensor_rank + 1) * num_heads)
    if slopes is not None:
        slopes = slopes[mine].contiguous()
    if key_bias is not None:
        key_bias = key_bias[mine].contiguous()
    return Heads(
        num_heads=num_heads,
        num_kv_heads=share_size(config.num_kv_heads, ranks.tensor_size),
        head_size=config.head_size,
        scale=attention_scale(config) if scale is None else scale,
        rope=rope,
        slopes=slopes,
        key_bias=key_bias,
        **fields,
    )


def attention_scale(config: ModelConfig) -> float:
    """Return the factor of the attention scores."""
    return config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
