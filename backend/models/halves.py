"""A step of many tokens in two halves: tensor ranks exchange the partial sums of one half while they compute
GEMMs of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tridecode.backend.models.context import Context, HalfSums
from tridecode.backend.models.layers import attention
from tridecode.kernels.operands import CacheLayer, DecoderLayer, Heads, Linear, Norm


def half_sums(context: Context, x: Tensor, layers: Sequence[DecoderLayer]) -> HalfSums | None:
    """Return the sums over the ranks with which to compute these layers in halves; None: compute the step
    whole. Layers with quantised matrices are not halved: it was not measured, and some GEMMs would
    dequantise them once for each half.
    """
    if context.ranks.tensor_size == 1 or not context.ops.splits_steps:
        return None
    if not layers or not isinstance(layers[0].up.weight, Tensor):
        return None
    return context.ranks.half_sums(x)


class Halves:
    """The sums of a step in two halves. x: (T, C), the residual; work.delta has the partial sums, then their
    norm, as in layers.add_linears.
    """

    def __init__(self, context: Context, x: Tensor, sums: HalfSums):
        self._ops, self._x, self._sums = context.ops, x, sums
        self.delta = context.work.delta[: x.shape[0]]
        middle = x.shape[0] // 2
        self.rows = slice(0, middle), slice(middle, x.shape[0])

    def send(self, half: int, y: Tensor, linear: Linear) -> None:
        """Compute this rank's part of y @ weight.T for one half, and start its exchange."""
        rows = self.rows[half]
        bare = linear if linear.bias is None else replace(linear, bias=None)
        self._ops.linear(y[rows], bare, out=self.delta[rows])
        self._sums.send(half, self.delta[rows])

    def receive(self, half: int, linear: Linear, norm: Norm | None) -> Tensor:
        """Add the sum of what the ranks have sent, and the bias, to the residual. Return its norm."""
        rows = self.rows[half]
        x, delta = self._x[rows], self.delta[rows]
        biases = [] if linear.bias is None else [linear.bias]
        self._sums.add_rows(half, delta, biases, x, norm, normed=None if norm is None else delta)
        return delta


def sequential_in_halves(
    context: Context,
    x: Tensor,
    layers: Sequence[DecoderLayer],
    heads: Sequence[Heads],
    activation: str,
    caches: Sequence[CacheLayer],
    sums: HalfSums,
) -> None:
    """Compute Decoder.sequential of at least one layer. Attention is computed for all tokens at once.

    The GEMM that runs during a half's exchange: the other half's dense, up, down or qkv.
    """
    halves, before = Halves(context, x, sums), None
    for layer, its_heads, cache in zip(layers, heads, caches):
        qkv, mlp = context.parts("qkv", its_heads.qkv_size).whole, context.mlp(layer)
        for half, rows in enumerate(halves.rows):
            if before is None:
                context.ops.linear(x[rows], layer.qkv, norm=layer.attention_norm, out=qkv[rows])
            else:
                normed = halves.receive(half, before.down, layer.attention_norm)
                context.ops.linear(normed, layer.qkv, out=qkv[rows])
        attended = attention(context, None, layer.qkv, its_heads, cache)
        for half in (0, 1):
            halves.send(half, attended, layer.dense)
        for half, rows in enumerate(halves.rows):
            normed = halves.receive(half, layer.dense, layer.mlp_norm)
            context.ops.linear(normed, layer.up, activation=activation, out=mlp[rows])
            halves.send(half, mlp, layer.down)
        before = layer
    assert before is not None
    for half in (0, 1):
        halves.receive(half, before.down, None)
