"""Benchmarks the GEMMs after attention, chained in one launch and as single launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from tridecode.kernels.bench.measure import Result, microseconds, over
from tridecode.kernels.bench.rig import HALF, Rig
from tridecode.kernels.bench.shapes import SHAPES, ModelShape
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.gemm.chain import MOST_TOKENS
from tridecode.kernels.operands import Linear, Norm, Product


def product_chain(rig: Rig) -> Iterator[Result]:
    """Time the GEMMs after attention of a layer of LLaMA-3-8B and BLOOM-7B1, chained and as single launches.

    They include the QKV projection of the next layer.
    """
    kinds = {
        "16 bit": ("", 0, ""),
        "int4": ("int4", 128, ""),
        "int8": ("int8", 0, ""),
        "w8a8-int8": ("int8", 0, "int8"),
    }
    for label in ("llama-3-8b", "bloom-7b1"):
        for kind in kinds:
            layers = [_chain(rig, SHAPES[label], *kinds[kind]) for _ in range(8)]
            each = sum(product.linear.weight.nbytes for product in layers[0](1))
            for tokens in (1, 2):
                chains = [layer(tokens) for layer in layers]

                def at_once(products: list[Product]) -> None:
                    assert rig.ops.linears(products)

                def one_by_one(products: list[Product]) -> None:
                    for product in products:
                        product.compute(rig.ops)

                rig.ops.gemms.chain.most_tokens = MOST_TOKENS
                mine = microseconds(over(chains, at_once), len(chains))
                rig.ops.gemms.chain.most_tokens = None
                peer = microseconds(over(chains, one_by_one), len(chains))
                flops = 2.0 * tokens * sum(math.prod(p.linear.weight.shape) for p in chains[0])
                yield Result("product_chain", f"{label} {kind} tokens {tokens}", mine, each, flops, peer)


def _chain(
    rig: Rig, model: ModelShape, format: str, group: int, activations: str
) -> Callable[[int], list[Product]]:
    """Return the GEMMs of a layer for `tokens` tokens."""
    shapes = model.products()

    def linear(name: str) -> Linear:
        outputs, inputs = shapes[name].outputs, shapes[name].inputs
        matrix = rig.normal(outputs, inputs, scale=inputs**-0.5)
        bias = None if model.gated else rig.normal(outputs, scale=0.1)
        if not format:
            return Linear(matrix, bias)
        return rig.ops.pack(Linear(round_to_nearest(matrix.float(), format, group, activations), bias), HALF)

    def norm() -> Norm:
        return Norm(rig.normal(model.hidden), None if model.gated else rig.normal(model.hidden), 1e-5)

    dense, up, down, qkv = map(linear, ("dense", "up", "down", "qkv"))
    norms, activation = (norm(), norm()), "swiglu" if model.gated else "gelu_tanh"

    def products(tokens: int) -> list[Product]:
        attended, x = rig.normal(tokens, model.hidden), rig.normal(tokens, model.hidden)
        mlp = rig.normal(tokens, model.inner)
        out = rig.normal(tokens, qkv.weight.shape[0])
        return [
            Product(attended, dense, x, residual=x),
            Product(x, up, mlp, norm=norms[0], activation=activation),
            Product(mlp, down, x, residual=x),
            Product(x, qkv, out, norm=norms[1]),
        ]

    return products
