"""Benchmarks of norms and GEMMs, with shapes of BLOOM-7B1 and LLaMA-3-8B, compared with cuBLAS or torch."""

# ruff: noqa: B023  every closure below is called within its loop iteration

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tridecode.kernels.bench.measure import Result, microseconds, over
from tridecode.kernels.bench.rig import HALF, Rig
from tridecode.kernels.bench.shapes import SHAPES
from tridecode.kernels.formats.packed_weight import pack
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.gemm.plan import Gemm, Plan
from tridecode.kernels.gemm.table import choose_8_bit
from tridecode.kernels.operands import Linear, Norm


def norm(rig: Rig) -> Iterator[Result]:
    for tokens, columns in ((1, 4096), (64, 4096), (4096, 4096)):
        xs = [rig.normal(tokens, columns) for _ in range(max(2, 2**27 // (tokens * columns * 2)) % 65 + 2)]
        norm, out = Norm(rig.normal(columns), rig.normal(columns), 1e-5), rig.normal(tokens, columns)
        mine = microseconds(over(xs, lambda x: rig.ops.norm(x, norm, out=out)), len(xs))
        peer = microseconds(over(xs, lambda x: F.layer_norm(x, (columns,), norm.weight, norm.bias)), len(xs))
        yield Result("norm", f"layer norm {tokens}x{columns}", mine, 4 * tokens * columns, peer=peer)


def linear(rig: Rig) -> Iterator[Result]:
    products = [
        product for model in ("bloom-7b1", "llama-3-8b") for product in SHAPES[model].products().values()
    ]
    shapes = dict.fromkeys((product.outputs, product.inputs) for product in products)
    for outputs, inputs in shapes:
        count = max(2, min(40, int(3e9 // (outputs * inputs * 2))))
        weights = [rig.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(count)]
        norm = Norm(rig.normal(inputs), rig.normal(inputs), 1e-5)
        for tokens in (1, 2, 8, 16, 64):
            buffers = rig.normal(tokens, max(outputs, inputs)), rig.normal(tokens, max(outputs, inputs))

            def chain(product, buffers=buffers, weights=weights, inputs=inputs, outputs=outputs) -> None:
                a, b = buffers
                for weight in weights:
                    product(a[:, :inputs], weight, b[:, :outputs])
                    a, b = b, a

            peer = microseconds(lambda: chain(lambda x, w, y: torch.mm(x, w.t(), out=y)), count)
            for label, first in (("", None), (" with norm", norm)):
                mine = microseconds(
                    lambda: chain(lambda x, w, y: rig.ops.linear(x, Linear(w), norm=first, out=y)),
                    count,
                )
                case = f"{outputs}x{inputs} tokens {tokens}{label}"
                yield Result(
                    "linear", case, mine, outputs * inputs * 2, 2.0 * outputs * inputs * tokens, peer
                )
        weights.clear()
    yield from _swiglu(rig)


def _swiglu(rig: Rig) -> Iterator[Result]:
    """Time gate and up of LLaMA-3-8B with SwiGLU, compared with cuBLAS's GEMM alone."""
    outputs, inputs = 28672, 4096
    weights = [rig.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(8)]
    for tokens in (8, 64, 256, 1024, 8192):
        chain = weights if tokens <= 256 else weights[:2]
        x, out = rig.normal(tokens, inputs), rig.normal(tokens, outputs // 2)
        both = rig.normal(tokens, outputs)
        mine = microseconds(
            over(chain, lambda w: rig.ops.linear(x, Linear(w), activation="swiglu", out=out)), len(chain)
        )
        peer = microseconds(over(chain, lambda w: torch.mm(x, w.t(), out=both)), len(chain))
        case, flops = f"swiglu {outputs}x{inputs} tokens {tokens}", 2.0 * outputs * inputs * tokens
        yield Result("linear", case, mine, outputs * inputs * 2, flops, peer)


def packed_linear(rig: Rig) -> Iterator[Result]:
    """Time weights in 8 and 4 bit, compared with 16 bit: GEMMs of LLaMA-3-8B, with an RMSNorm at 1 and 2
    tokens.
    """
    for format, group in (("int8", 0), ("int4", 128)):
        for outputs, inputs, activation in (
            (6144, 4096, None),
            (4096, 4096, None),
            (28672, 4096, "swiglu"),
            (4096, 14336, None),
        ):
            dense = [rig.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(3)]
            made = [round_to_nearest(weight.float(), format, group) for weight in dense]
            packed = [rig.ops.pack(Linear(weight), HALF) for weight in made]
            each = packed[0].weight.nbytes
            count = max(3, int(4e8 // each) // 3 * 3)  # exceeds the L2 cache
            packed = [rig.ops.pack(Linear(weight), HALF) for _ in range(count // 3) for weight in made]
            columns = outputs // 2 if activation else outputs
            for tokens in (1, 2, 8, 16, 32, 64, 128, 256, 1024):
                x, out = rig.normal(tokens, inputs), rig.normal(tokens, columns)

                def one(linear: Linear, x: Tensor = x, out: Tensor = out) -> None:
                    rig.ops.linear(x, linear, activation=activation, out=out)

                mine = microseconds(over(packed, one), len(packed))
                peer = microseconds(over([Linear(weight) for weight in dense], one), len(dense))
                case = f"{format} {outputs}x{inputs} tokens {tokens}"
                flops = 2.0 * outputs * inputs * tokens
                yield Result("packed_linear", case, mine, each, flops, peer)
            packed.clear()
            dense.clear()


def w8a8(rig: Rig) -> Iterator[Result]:
    """Time the GEMMs of a LLaMA-3-8B layer with both operands in 8 bit, including the quantisation of x.

    The peer is the same GEMM in 16 bit. If matrix units bound, the share is of their 16-bit rate.
    """
    products = SHAPES["llama-3-8b"].products()
    for name in ("qkv", "dense", "up", "down"):
        outputs, inputs = products[name].outputs, products[name].inputs
        activation = "swiglu" if name == "up" else None
        count = max(2, int(6e8 // (outputs * inputs)))
        matrices = [rig.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(count)]
        chains = {"16 bit": [Linear(matrix) for matrix in matrices]}
        for format in ("int8", "fp8"):
            rounded = [round_to_nearest(matrix, format, 0, format) for matrix in matrices]
            chains[format] = [rig.ops.pack(Linear(weight), HALF) for weight in rounded]
        for tokens in (1, 8, 16, 64, 128, 256, 1024, 4096):
            x, out = rig.normal(tokens, inputs), rig.normal(tokens, outputs // (2 if activation else 1))
            times = {
                label: microseconds(
                    over(chain, lambda w: rig.ops.linear(x, w, activation=activation, out=out)), count
                )
                for label, chain in chains.items()
            }
            for format in ("int8", "fp8"):
                case, flops = (
                    f"{format} {outputs}x{inputs} tokens {tokens}",
                    2.0 * outputs * inputs * tokens,
                )
                yield Result("w8a8", case, times[format], outputs * inputs, flops, times["16 bit"])


def two_parts(rig: Rig) -> Iterator[Result]:
    """Time the GEMMs of a layer of LLaMA-3-8B and BLOOM-7B1, and LLaMA's head, with int8 weights and x in two
    int8 parts.

    The quantisation of x is included; the peer is the same GEMM in 16 bit. "packed": weights dequantised in
        registers; "expanded": in memory, before each GEMM.
    """
    parts, few = rig.ops.gpu.choose_gemm, (1, 8, 16, 64, 128, 256)

    def expands(gemm: Gemm) -> Plan:
        return Plan("expand_rows", "forced") if gemm.operand else parts(gemm)

    def never_expands(gemm: Gemm) -> Plan:
        plan = parts(gemm)
        return choose_8_bit(gemm, rig.ops.gpu.gemm_device) if plan.kernel == "expand_rows" else plan

    shapes = [
        (product.outputs, product.inputs, name == "up" and model == "llama-3-8b")
        for model in ("llama-3-8b", "bloom-7b1")
        for name, product in SHAPES[model].products().items()
        if name != "head"
    ]
    for outputs, inputs, gated in dict.fromkeys([*shapes, (128256, 4096, False)]):
        activation = "swiglu" if gated else None
        count = max(2, int(4e8 // (outputs * inputs)))
        matrix = rig.normal(outputs, inputs, scale=inputs**-0.5)
        weight = round_to_nearest(matrix, "int8")
        chains = {
            "16 bit": [Linear(matrix.clone()) for _ in range(count)],
            "packed": [Linear(pack(weight, HALF)) for _ in range(count)],
            "two parts": [
                rig.ops.pack(Linear(replace(weight, values=weight.values.clone())), HALF)
                for _ in range(count)
            ],
        }
        for tokens in (*few, 512, 1024, 4096) if outputs < 128256 else few:
            x, out = rig.normal(tokens, inputs), rig.normal(tokens, outputs // (2 if gated else 1))
            plans = {"16 bit": parts, "two parts": never_expands}
            plans |= {"packed": parts} if tokens <= 256 else {"expanded": expands}
            times = {}
            for label, plan in plans.items():
                rig.ops.gpu.choose_gemm = plan  # type: ignore[assignment]
                chain = chains["two parts" if label == "expanded" else label]
                times[label] = microseconds(
                    over(chain, lambda w: rig.ops.linear(x, w, activation=activation, out=out)), count
                )
            rig.ops.gpu.choose_gemm = parts
            flops = 2.0 * outputs * inputs * tokens
            for label in times.keys() - {"16 bit"}:
                case = f"{label} {outputs}x{inputs} tokens {tokens}"
                yield Result("two_parts", case, times[label], outputs * inputs, flops, times["16 bit"])
        chains.clear()
