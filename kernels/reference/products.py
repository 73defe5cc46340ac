"""Operations around a GEMM: norms, activations, rotation, cache positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tridecode.kernels.operands import Batch, Heads, Norm, Rope

#: gated activations, and the activation of the gate
GATED = {"swiglu": "silu", "geglu_tanh": "gelu_tanh", "geglu": "gelu"}


def gate(product: Tensor, activation: str | None) -> Tensor:
    """Return (T, F) from (T, 2F): the activation of the first half, computed in place, times the second
    half.
    """
    gates, values = product.chunk(2, dim=-1)
    activate(gates, GATED[activation or ""])
    return gates.mul_(values)


def activated(product: Tensor, activation: str | None) -> Tensor:
    """Apply the activation to product (T, O) in place; a gated one returns a view (T, O / 2)."""
    if activation in GATED:
        return gate(product, activation)
    activate(product, activation)
    return product


def activate(x: Tensor, activation: str | None) -> None:
    if activation == "relu":
        x.relu_()
    elif activation == "silu":
        F.silu(x, inplace=True)
    elif activation is not None:
        in_place = torch._C._nn.gelu_  # type: ignore[attr-defined]  # torch's stubs lack it
        in_place(x, approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])


def normed(x: Tensor, norm: Norm) -> Tensor:
    if norm.bias is not None and norm.weight.ndim == 2:  # weights of each head
        centred = F.layer_norm(x.float(), x.shape[-1:], eps=norm.eps)
        return (centred * norm.weight + norm.bias).to(x.dtype)
    if norm.bias is not None:
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    x32 = x.float()
    return (x32 * (x32.square().mean(-1, keepdim=True) + norm.eps).rsqrt()).to(x.dtype) * norm.weight


def change_qkv(qkv: Tensor, heads: Heads) -> None:
    """Clamp and normalise q and k in place, between the GEMM and the rotation. qkv: (T, (H + 2K) * D)."""
    if heads.qkv_limit:
        qkv.clamp_(-heads.qkv_limit, heads.qkv_limit)
    first = 0
    for norm, count in ((heads.query_norm, heads.num_heads), (heads.key_norm, heads.num_kv_heads)):
        part = qkv[:, first : first + count * heads.head_size].unflatten(1, (count, heads.head_size))
        if norm is not None:
            part.copy_(normed(part, norm))
        first += count * heads.head_size


def rotate(x: Tensor, rope: Rope, batch: Batch) -> None:
    """Rotate x (T, heads, D) in place at the batch's positions, in float32."""
    key = ("rope", id(rope))
    if key not in batch.memo:
        rows = batch.positions.long()
        batch.memo[key] = (rope.cos[rows].unsqueeze(1), rope.sin[rows].unsqueeze(1), rope)
    cos, sin, _ = batch.memo[key]  # (T, 1, size / 2)
    half = rope.size // 2
    if rope.interleaved:
        first, second = x[..., 0 : rope.size : 2], x[..., 1 : rope.size : 2]
    else:
        first, second = x[..., :half], x[..., half : rope.size]
    a, b = first.float(), second.float()
    turned = a * cos - b * sin
    second.copy_(b * cos + a * sin)
    first.copy_(turned)


def written(batch: Batch, block_tokens: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the rows that are written to the cache (None: all), their blocks and their offsets."""
    if "written" not in batch.memo:
        slots = batch.kv_slots.long()
        rows = None if bool((slots >= 0).all()) else (slots >= 0).nonzero().squeeze(1)
        slots = slots if rows is None else slots[rows]
        batch.memo["written"] = (rows, slots // block_tokens, slots % block_tokens)
    return batch.memo["written"]
