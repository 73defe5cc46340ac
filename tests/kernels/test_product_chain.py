"""Products of few tokens in one launch (product_chain_sm90a.cu): each against float64 of what it has
read, with x rounded as kernels/formats/quantized.py says where the weights are in 8 bit."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import Place
from tests.kernels.numeric import GATES
from tests.kernels.test_linear import norm64
from tests.kernels.test_w8a8 import assert_product
from tridecode.kernels.bench.measure import capture
from tridecode.kernels.formats.quantized import QuantizedWeight, rounded_activations
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.gemm.chain import MOST_TOKENS
from tridecode.kernels.operands import Linear, Norm, Product

pytestmark = pytest.mark.gpu

#: format of the weights ("": 16 bit), group size, activations
KINDS = {
    "16 bit": ("", 0, ""),
    "w8a8-int8": ("int8", 0, "int8"),
    "w8a8-fp8": ("fp8", 0, "fp8"),
    "int8": ("int8", 0, ""),
    "int4": ("int4", 128, ""),
    "int4, one group": ("int4", 0, ""),
}
#: hidden, inner, queries: stages that are not full; few tiles; a layer of SmolLM2; many tiles
SHAPES = [(128, 256, 128), (640, 1664, 384), (1152, 1536, 1152), (4096, 14336, 4096)]
CASES = [(kind, tokens) for kind in KINDS for tokens in range(1, MOST_TOKENS + 1)]


@pytest.fixture(scope="module")
def ops():
    from tridecode.kernels.cuda import Cuda

    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the launch needs compute capability 9.0")
    made = Cuda(device)
    made.gemms.chain.most_tokens = MOST_TOKENS
    return made


@pytest.fixture
def place(ops, request: pytest.FixtureRequest) -> Place:
    generator = torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))
    return Place(ops, torch.device("cuda", 0), generator)


@dataclass
class Layer:
    """The operations after attention as a decoder calls them, with a separate buffer for every result."""

    products: list[Product]
    matrices: list[Tensor]  # float64

    @property
    def results(self) -> list[Tensor]:
        return [product.out for product in self.products]


def make_linear(
    place: Place, kind: str, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[Linear, Tensor]:
    """Without a bias, and the matrix that it stands for in float64."""
    format, group, activations = KINDS[kind]
    matrix = place.normal(outputs, inputs, dtype=torch.float32, scale=inputs**-0.5)
    if not format:
        return Linear(matrix.to(dtype)), matrix.to(dtype).double()
    weight = round_to_nearest(matrix, format, group, activations)
    # int4's scales are rounded to the dtype
    held = replace(weight, scales=weight.scales.to(dtype).float()) if format == "int4" else weight
    return place.ops.pack(Linear(weight), dtype), held.expanded().double()


def make_layer(
    place: Place, kind: str, tokens: int, shape, dtype: torch.dtype, gated: bool, gate: str = "swiglu"
) -> Layer:
    hidden, inner, queries = shape
    matrices: list[Tensor] = []

    def linear(outputs: int, inputs: int) -> Linear:
        made, matrix = make_linear(place, kind, inputs, outputs, dtype)
        matrices.append(matrix)
        return made if gated else replace(made, bias=place.normal(outputs, dtype=dtype))

    def norm() -> Norm:
        weight = place.normal(hidden, dtype=dtype, scale=0.2) + 1
        return Norm(weight, None if gated else place.normal(hidden, dtype=dtype, scale=0.2), 1e-5)

    def out(columns: int) -> Tensor:
        return place.poison(tokens, columns, dtype=dtype)

    attended, x = place.normal(tokens, queries, dtype=dtype), place.normal(tokens, hidden, dtype=dtype)
    first, mlp, second, qkv = out(hidden), out(inner), out(hidden), out(3 * queries)
    activation = gate if gated else "gelu_tanh"
    products = [
        Product(attended, linear(hidden, queries), first, residual=x),
        Product(first, linear(inner * (1 + gated), hidden), mlp, norm=norm(), activation=activation),
        Product(mlp, linear(hidden, inner), second, residual=first),
        Product(second, linear(3 * queries, hidden), qkv, norm=norm()),
    ]
    place.settle()
    return Layer(products, matrices)


def wanted64(product: Product, matrix: Tensor, x: Tensor | None = None) -> Tensor:
    """x: replaces the product's."""
    x = product.x if x is None else x
    if product.norm is not None:
        x = norm64(x, product.norm).to(x.dtype)
    weight = product.linear.weight
    rounded = x.double()
    if isinstance(weight, QuantizedWeight) and weight.activations:
        values, scales = rounded_activations(x.cpu(), weight.activations)
        rounded = (values.double() * scales.double()).to(x.device)
    wanted = rounded @ matrix.t()
    if product.linear.bias is not None:
        wanted += product.linear.bias.double()
    if product.activation in GATES:
        gate, up = wanted.chunk(2, dim=1)
        wanted = GATES[product.activation](gate) * up
    elif product.activation is not None:
        wanted = F.gelu(wanted, approximate="tanh")
    return wanted if product.residual is None else wanted + product.residual.double()


def assert_layer(place: Place, layer: Layer, kind: str) -> None:
    """Launch it."""
    assert place.ops.linears(layer.products)
    format = "fp8" if KINDS[kind][2] == "fp8" else "int8"
    for product, matrix in zip(layer.products, layer.matrices):
        gates = "two products" if product.activation in GATES else "linear"
        assert_product(format, product.x.shape[1], product.out, wanted64(product, matrix), gates)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("gate", ["", *GATES])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_every_product_is_that_of_what_it_has_read(place: Place, kind, tokens, shape, gate: str, dtype):
    layer = make_layer(place, kind, tokens, shape, dtype, bool(gate), gate)
    assert_layer(place, layer, kind)
    first = [result.clone() for result in layer.results]
    place.ops.linears(layer.products)  # the counter is as before
    assert all(torch.equal(*both) for both in zip(first, layer.results))


#: hidden, inner, queries of layers whose first MLP product has a tile for every multiprocessor
WIDE_SHAPES = [(640, 2048, 384), (1152, 6912, 1024), (3584, 14336, 4096), (4608, 36864, 4096)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("shape", WIDE_SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "tokens"), [case for case in CASES if case[1] in (1, 3)])
def test_norms_around_attention_and_mlp(place: Place, kind, tokens, shape, dtype):
    """stream += norm(result) before the products that read the stream, which ends as the sum of both."""
    if tokens > 1 and shape[0] > 4096:
        return
    hidden, inner, queries = shape
    matrices: list[Tensor] = []

    def linear(outputs: int, inputs: int) -> Linear:
        made, matrix = make_linear(place, kind, inputs, outputs, dtype)
        matrices.append(matrix)
        return made

    def norm() -> Norm:
        return Norm(place.normal(hidden, dtype=dtype, scale=0.2) + 1, None, 1e-6)

    def out(columns: int) -> Tensor:
        return place.poison(tokens, columns, dtype=dtype)

    attended, stream = place.normal(tokens, queries, dtype=dtype), place.normal(tokens, hidden, dtype=dtype)
    first, mlp, second, qkv = out(hidden), out(inner), out(hidden), out(3 * queries)
    outer, before, held = [norm(), norm()], [norm(), norm()], stream.clone()
    products = [
        Product(attended, linear(hidden, queries), first),
        Product(first, linear(inner * 2, hidden), mlp, before[0], "geglu_tanh", stream=(stream, outer[0])),
        Product(mlp, linear(hidden, inner), second),
        Product(second, linear(3 * queries, hidden), qkv, before[1], stream=(stream, outer[1])),
    ]
    place.settle()
    assert place.ops.linears(products)
    # of the same rounded results, as float64 adds them and as the kernel for many rows does; norms are not
    # rounded before they are added
    sums = [held]
    for x, each in ((first, outer[0]), (second, outer[1])):
        x64 = x.double()
        scale = (x64.square().mean(-1, keepdim=True) + each.eps).rsqrt()
        sums.append((sums[-1].double() + x64 * scale * each.weight.double()).to(dtype))
    assert (stream != sums[2]).double().mean() < 0.01
    bound = 2 * torch.finfo(dtype).eps * (sums[2].double().abs() + sums[1].double().abs())
    assert ((stream.double() - sums[2].double()).abs() <= bound).all()
    apart = held.clone()
    place.ops.add_normed(apart, first, outer[0])
    place.ops.add_normed(apart, second, outer[1])
    assert (apart != stream).double().mean() < 0.02  # sums of squares in another order
    format = "fp8" if KINDS[kind][2] == "fp8" else "int8"
    rows = [attended, sums[1], mlp, stream]
    for product, matrix, x in zip(products, matrices, rows):
        gates = "two products" if product.activation in GATES else "linear"
        assert_product(format, product.x.shape[1], product.out, wanted64(product, matrix, x), gates)
    results, again = [product.out.clone() for product in products[1:]], stream.clone()
    stream.copy_(held)
    place.ops.linears(products)
    assert torch.equal(stream, again)
    assert all(torch.equal(product.out, result) for product, result in zip(products[1:], results))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("shape", [(640, 2560, 384), (4096, 16384, 4096)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_mlp_of_the_same_rows(place: Place, kind, tokens, shape, dtype):
    """The second product does not read the first one's result; the third adds to the second's."""
    hidden, inner, queries = shape
    matrices: list[Tensor] = []

    def linear(outputs: int, inputs: int) -> Linear:
        made, matrix = make_linear(place, kind, inputs, outputs, dtype)
        matrices.append(matrix)
        return replace(made, bias=place.normal(outputs, dtype=dtype))

    def norm() -> Norm:
        weight = place.normal(hidden, dtype=dtype, scale=0.2) + 1
        return Norm(weight, place.normal(hidden, dtype=dtype, scale=0.2), 1e-5)

    def out(columns: int) -> Tensor:
        return place.poison(tokens, columns, dtype=dtype)

    attended, x = place.normal(tokens, queries, dtype=dtype), place.normal(tokens, hidden, dtype=dtype)
    first, mlp, second, qkv = out(hidden), out(inner), out(hidden), out(queries + 128)
    products = [
        Product(x, linear(inner, hidden), mlp, norm=norm(), activation="gelu_tanh"),
        Product(attended, linear(hidden, queries), first, residual=x),
        Product(mlp, linear(hidden, inner), second, residual=first),
        Product(second, linear(queries + 128, hidden), qkv, norm=norm()),
    ]
    place.settle()
    layer = Layer(products, matrices)
    assert_layer(place, layer, kind)
    in_place = x.clone()
    held = [
        replace(products[0], x=in_place),
        replace(products[1], residual=in_place, out=in_place),
        replace(products[2], residual=in_place, out=in_place),
        replace(products[3], x=in_place, out=torch.empty_like(qkv)),
    ]
    assert place.ops.linears(held)
    assert torch.equal(in_place, second) and torch.equal(held[3].out, qkv)


def test_norms_of_rows_far_from_zero(place: Place):
    """A thread has several vectors of a row, the last warp fewer: what lies behind the row, less its mean,
    would be the largest number."""
    layer = make_layer(place, "w8a8-int8", 4, (1152, 1536, 1152), torch.float16, False)
    residual = layer.products[0].residual
    assert residual is not None
    residual += 20
    assert_layer(place, layer, "w8a8-int8")


def test_in_a_graph_beside_other_launches(place: Place):
    layer = make_layer(place, "int4", 2, SHAPES[2], torch.bfloat16, True)
    products = layer.products

    def one_by_one() -> None:
        for product in products:
            product.compute(place.ops)

    one_by_one()
    wanted = [result.clone() for result in layer.results]

    def both() -> None:
        for _ in range(20):
            assert place.ops.linears(products)
            one_by_one()
            assert place.ops.linears(products)

    graph = capture(both)
    for _ in range(3):
        for result in layer.results:
            result.fill_(float("nan"))
        graph.replay()
        for found, expected in zip(layer.results, wanted):
            error = (found.float() - expected.float()).norm() / expected.float().norm()
            assert error < 0.02


def test_declines_what_it_does_not_compute(place: Place):
    layer = make_layer(place, "int8", 4, SHAPES[1], torch.float16, False)
    products = layer.products
    assert place.ops.linears(products)
    first = products[0]
    wide = first.x.new_zeros(4, first.x.shape[1] * 2)[:, : first.x.shape[1]]
    for other in (
        Product(wide, first.linear, first.out, residual=first.residual),
        Product(first.x, first.linear, first.out, activation="geglu"),
        replace(make_layer(place, "int4", 4, SHAPES[1], torch.float16, False).products[0], out=first.out),
    ):
        assert not place.ops.linears([other, *products[1:]])
    dense = make_layer(place, "16 bit", 4, SHAPES[1], torch.float16, False).products
    assert place.ops.linears(dense)
    weight = dense[0].linear.weight
    assert isinstance(weight, Tensor)
    for linear in (Linear(weight, activations="int8"), Linear(weight.t().contiguous().t())):
        assert not place.ops.linears([replace(dense[0], linear=linear), *dense[1:]])
    last = products[-1]
    assert not place.ops.linears([*products[:-1], replace(last, out=last.out.float())])
    assert not place.ops.linears(
        [products[0], products[2]]
    )  # the second does not read the first one's result
    five = make_layer(place, "int8", 5, SHAPES[1], torch.float16, False)
    assert not place.ops.linears(five.products)
