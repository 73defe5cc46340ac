"""Products of one launch that sum over two tensor ranks (product_chain_sm90a.cu), one process per rank: each
product against float64 of what it has read, the sums against those of the ranks' parts."""

from __future__ import annotations

import time
import zlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Place
from tests.kernels.peer_process import Exchange, make, on_ranks
from tests.kernels.test_product_chain import KINDS, make_linear, wanted64
from tests.kernels.test_w8a8 import assert_product
from tridecode.kernels.gemm.chain import MOST_TOKENS
from tridecode.kernels.operands import Linear, Norm, Product

pytestmark = pytest.mark.gpu

#: hidden, inner, queries, columns of QKV of a rank; the first MLP product has a tile for each multiprocessor
SHAPES = [(640, 2304, 384, 512), (1152, 3456, 640, 1920)]
#: a layer of LLaMA-3-8B on two ranks; several vectors of a row a thread
WIDE_SHAPES = [(4096, 7168, 2048, 3072), (6144, 8192, 3072, 3840)]
#: SwiGLU and RMSNorm; biases and LayerNorm; SwiGLU and norms around attention and MLP
FORMS = ["gated", "biases", "outer norms"]
LAUNCHES = 60


def operations():
    from tridecode.kernels.cuda import Cuda

    device = torch.device("cuda", torch.cuda.current_device())
    made = Cuda(device)
    made.gemms.chain.most_tokens = MOST_TOKENS
    return made


def make_place(ops, seed: int) -> Place:
    return Place(ops, ops.gpu.device, torch.Generator().manual_seed(seed))


class Layer:
    """One rank's share of what is behind attention. All ranks draw the same residual stream and norms."""

    def __init__(self, place: Place, rank: int, kind: str, tokens: int, shape, dtype: torch.dtype, form: str):
        gated = form != "biases"
        hidden, inner, queries, columns = shape
        self.matrices: dict[str, Tensor] = {}
        linears: dict[str, Linear] = {}
        sizes = {
            "dense": (queries, hidden),
            "up": (hidden, inner * (1 + gated)),
            "down": (inner, hidden),
            "qkv": (hidden, columns),
        }
        own = Place(place.ops, place.device, torch.Generator().manual_seed(rank))
        for name, (inputs, outputs) in sizes.items():
            linear, self.matrices[name] = make_linear(own, kind, inputs, outputs, dtype)
            bias = None if gated else own.normal(outputs, dtype=dtype)
            # the first rank adds the bias of a sum
            linears[name] = replace(linear, bias=None if rank and name in ("dense", "down") else bias)

        def norm() -> Norm:
            weight = place.normal(hidden, dtype=dtype, scale=0.2) + 1
            return Norm(weight, None if gated else place.normal(hidden, dtype=dtype, scale=0.2), 1e-5)

        self.outer = (norm(), norm()) if form == "outer norms" else (None, None)
        before, self.held = (norm(), norm()), place.normal(tokens, hidden, dtype=dtype)
        attended = own.normal(tokens, queries, dtype=dtype)
        self.stream, part = self.held.clone(), place.poison(tokens, hidden, dtype=dtype)
        mlp, qkv = (place.poison(tokens, size, dtype=dtype) for size in (inner, columns))
        activation = "swiglu" if gated else "gelu_tanh"
        self.dense = Product(attended, linears["dense"], part)
        self.up = Product(
            part, linears["up"], mlp, before[0], activation, stream=(self.stream, self.outer[0])
        )
        self.down = Product(mlp, linears["down"], part)
        self.qkv = Product(part, linears["qkv"], qkv, before[1], stream=(self.stream, self.outer[1]))
        self.place = place
        place.settle()

    def products(self, sums) -> list[Product]:
        dense, down = (replace(product, over_ranks=sums) for product in (self.dense, self.down))
        return [dense, self.up, down, self.qkv]

    def launch(self, sums) -> list[Tensor]:
        """Copies of all results, from the same residual stream."""
        self.stream.copy_(self.held)
        assert self.place.ops.linears(self.products(sums))
        torch.cuda.synchronize()
        return [tensor.clone() for tensor in (self.stream, self.up.out, self.qkv.out)]

    @staticmethod
    def added(x: Tensor, parts: list[Tensor], outer: Norm | None) -> Tensor:
        """Add the sum of all ranks' parts to x; normalised by `outer` first, as `Ops.add_normed` does."""
        total = parts[0].double() + parts[1].double()
        if outer is not None:
            total = total.to(x.dtype).double()
            scale = (total.square().mean(-1, keepdim=True) + outer.eps).rsqrt()
            total = total * scale * outer.weight.double()
        return (x.double() + total).to(x.dtype)

    def part(self, product: Product) -> Tensor:
        """This rank's part of a sum, by a launch of its own."""
        part = replace(product, out=torch.full_like(product.out, torch.nan))
        assert self.place.ops.linears([part])
        return part.out


def everybodys(exchange: Exchange, mine: Tensor) -> list[Tensor]:
    data = exchange(mine.cpu().view(torch.uint8).numpy().tobytes())
    return [
        torch.frombuffer(bytearray(one), dtype=mine.dtype).view(mine.shape).to(mine.device) for one in data
    ]


@torch.inference_mode()
def every_product(rank: int, world: int, exchange: Exchange, kind: str, tokens: int, shape, form: str) -> str:
    for dtype in (torch.bfloat16, torch.float16):
        ops = operations()
        sums = make(rank, world, exchange, MOST_TOKENS, shape[0], dtype, ops=ops, limit_s=20.0)
        seed = zlib.crc32(f"{kind} {tokens} {shape} {form}".encode())
        place = make_place(ops, seed)
        layer = Layer(place, rank, kind, tokens, shape, dtype, form)
        stream, mlp, qkv = layer.launch(sums)
        again = layer.launch(sums)
        same = all(torch.equal(*both) for both in zip((stream, mlp, qkv), again))
        alike = all(torch.equal(one, stream) for one in everybodys(exchange, stream))
        if not same or not alike or sums.lost is not None:
            return f"{dtype}: same again {same}, same on all ranks {alike}, lost {sums.lost}"
        format = "fp8" if KINDS[kind][2] == "fp8" else "int8"
        first, second = layer.part(layer.dense), layer.part(layer.down)
        rows = [layer.held]
        for product, part, name in ((layer.dense, first, "dense"), (layer.down, second, "down")):
            assert_product(format, product.x.shape[1], part, wanted64(product, layer.matrices[name]))
            parts = everybodys(exchange, part)
            rows.append(layer.added(rows[-1], parts, layer.outer[name == "down"]))
        # the launch sums some products in another order than a launch with one product
        bound = 4 * torch.finfo(dtype).eps * sum(row.double().abs() + 1 for row in rows)
        off = (stream.double() - rows[2].double()).abs()
        assert (off <= bound).all() and (off > 0).double().mean() < 0.02, f"sums are off by {off.max()}"
        gates = "linear" if form == "biases" else "two products"
        matrices = layer.matrices
        assert_product(format, shape[0], mlp, wanted64(layer.up, matrices["up"], rows[1]), gates)
        assert_product(format, shape[0], qkv, wanted64(layer.qkv, matrices["qkv"], stream))
        exchange(b"done")
        sums.close()
    return ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE_SHAPES], ids=str)
def test_every_product_reads_the_sum_of_both_ranks(shape, form: str) -> None:
    wide = shape in WIDE_SHAPES
    cases = [
        partial(every_product, kind=kind, tokens=tokens, shape=shape, form=form)
        for kind in (("16 bit", "w8a8-int8") if wide else KINDS)
        for tokens in ((1,) if wide else (1, 3))
    ]
    assert on_ranks(2, *cases) == ["", ""]


@torch.inference_mode()
def replayed(rank: int, world: int, exchange: Exchange) -> str:
    """Many launches in a graph, with different numbers of rows, next to other sums."""
    dtype, shape = torch.bfloat16, SHAPES[0]
    ops = operations()
    sums = make(rank, world, exchange, MOST_TOKENS, shape[0], dtype, ops=ops, limit_s=20.0)
    place = make_place(ops, 3)
    layers = [Layer(place, rank, "16 bit", tokens, shape, dtype, FORMS[tokens % 3]) for tokens in (1, 2, 3)]
    wanted = [layer.launch(sums) for layer in layers]
    x, total = torch.full((1, shape[0]), rank + 1.0, dtype=dtype, device="cuda"), layers[0].stream.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            for layer in layers:
                layer.stream.copy_(layer.held)
                assert ops.linears(layer.products(sums))
            sums.add_rows(x, out=total)
    for turn in range(3):
        for layer in layers:
            layer.up.out.fill_(torch.nan), layer.qkv.out.fill_(torch.nan), layer.stream.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for layer, results in zip(layers, wanted):
            if not all(map(torch.equal, (layer.stream, layer.up.out, layer.qkv.out), results)):
                return f"replay {turn}; lost {sums.lost}"
        if not (total == 3).all():
            return f"the sum after replay {turn}"
    exchange(b"done")
    sums.close()
    return ""


@torch.inference_mode()
def abandoned(rank: int, world: int, exchange: Exchange) -> str:
    """The other rank does not come: launches end within the limit, name it, and do not wait again."""
    ops, shape = operations(), SHAPES[0]
    sums = make(rank, world, exchange, MOST_TOKENS, shape[0], torch.bfloat16, ops=ops, limit_s=0.5)
    place = make_place(ops, 3)
    layer = Layer(place, rank, "16 bit", 1, shape, torch.bfloat16, FORMS[0])
    found = ""
    if rank == 0:
        started = time.monotonic()
        for _ in range(20):
            assert ops.linears(layer.products(sums))
        torch.cuda.synchronize()
        took = time.monotonic() - started
        if sums.lost != 1 or not 0.4 < took < 3.0:
            found = f"lost {sums.lost} after {took:.2f} s"
    exchange(b"done")
    return found


@torch.inference_mode()
def declined(rank: int, world: int, exchange: Exchange) -> str:
    """Products that the kernel cannot sum over the ranks."""
    ops, shape = operations(), SHAPES[0]
    sums = make(rank, world, exchange, MOST_TOKENS, shape[0], torch.bfloat16, ops=ops)
    place = make_place(ops, 3)
    layer = Layer(place, rank, "16 bit", 1, shape, torch.bfloat16, FORMS[0])
    dense, up, down, qkv = layer.products(sums)
    few = replace(up, linear=Linear(up.linear.dense[:1024].clone()), out=up.out[:, :512].contiguous())
    wrong = {
        "one sum": [dense, up],
        "a sum that nothing reads": [dense, up, down],
        "one sum of two": [layer.dense, up, down, qkv],
        "a residual": [replace(dense, residual=layer.held), up, down, qkv],
        "no stream": [dense, replace(up, stream=None), down, qkv],
        "too few tiles": [dense, few, replace(down, x=few.out), qkv],
    }
    taken = [name for name, products in wrong.items() if ops.linears(products)]
    exchange(b"done")
    sums.close()
    return ", ".join(taken)


@pytest.mark.parametrize("what", [replayed, abandoned, declined], ids=lambda one: one.__name__)
def test_two_ranks(what) -> None:
    assert on_ranks(2, what) == ["", ""]
