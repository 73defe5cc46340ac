"""Products of int8 weights whose x is not rounded to 8 bit, on a GPU of compute capability 9.0: x in two int8
parts up to TWO_PARTS_TOKENS, then the weight expanded.

Compared with float64 of x itself and the weight's values times scales. Two parts hold 16 bits of a row's
largest number: an element of x is off by max|x| / 64,516 at most.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import Place
from tests.kernels.numeric import GATES, assert_close
from tests.kernels.test_linear import make_heads
from tridecode.kernels.formats.quantized import QuantizedWeight, two_parts
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.gemm.plan import Device, Gemm, Plan
from tridecode.kernels.gemm.table import choose
from tridecode.kernels.gemm.table_sm90 import SPLIT_K_TOKENS, stream_k_plan
from tridecode.kernels.operands import Linear, Norm

gpu = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16]
TOKENS = [1, 3, 8, 16, 17, 32, 33, 64, 65, 128, 200, 256, 512, 513, 1000]
#: tokens, and the split of gemm_sm90_split_k_two_parts; 0: gemm_sm90_stream_k_two_parts
WAYS = [(1, 0), (8, 0), (17, 0), (64, 0), (65, 0), (200, 0), (300, 0), (600, 0)]
WAYS += [(tokens, split) for tokens in (1, 9, 16, 17, 33, 64) for split in (1, 2, 3)]
#: (inputs, outputs): one stage, odd ends, many stages of few tiles, many tiles
SHAPES = [(128, 128), (144, 264), (1040, 1000), (4096, 512), (512, 9216)]
PART = 1 / 64516  # of a row's largest number: the largest error of an element in two parts


@pytest.fixture(scope="module")
def ops():
    from tridecode.kernels.cuda import Cuda

    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("int8 rows need compute capability 9.0")
    return Cuda(device)


@pytest.fixture
def place(ops, request: pytest.FixtureRequest) -> Place:
    generator = torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))
    ops.gpu.choose_gemm = lambda gemm: choose(gemm, ops.gpu.gemm_device)
    return Place(ops, torch.device("cuda", 0), generator)


def force(place: Place, split: int) -> None:
    """The kernels of two parts, for any number of tokens."""
    device: Device = place.ops.gpu.gemm_device

    def plan(gemm: Gemm) -> Plan:
        assert gemm.operand == "two_parts"
        if split == 0:
            return stream_k_plan(gemm, device)._replace(kernel="gemm_sm90_stream_k_two_parts")
        tile_tokens = next(size for size in SPLIT_K_TOKENS if size >= gemm.tokens)
        stages = -(-gemm.inputs // 128)
        return Plan(
            "gemm_sm90_split_k_two_parts", "forced", 128, tile_tokens, min(split, stages), fuses_heads=True
        )

    place.ops.gpu.choose_gemm = plan


def make_linear(place: Place, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = True) -> Linear:
    matrix = place.normal(outputs, inputs, dtype=torch.float32, scale=inputs**-0.5)
    weight = round_to_nearest(matrix, "int8")
    linear = place.ops.pack(Linear(weight, place.normal(outputs, dtype=dtype) if bias else None), dtype)
    assert isinstance(linear.weight, QuantizedWeight) and not linear.weight.activations
    return linear


def product64(x: Tensor, linear: Linear) -> Tensor:
    weight = linear.weight
    assert isinstance(weight, QuantizedWeight)
    wanted = x.double() @ (weight.values.double() * weight.scales.double()).t()
    return wanted if linear.bias is None else wanted + linear.bias.double()


def run(place: Place, x: Tensor, linear: Linear, out: Tensor, split: int | None, **how) -> None:
    """Twice, because a launch leaves the flags of shared tiles to the next one."""
    place.settle()
    if split is not None:
        force(place, split)
    residual = how.get("residual")
    before = None if residual is None else residual.clone()
    place.ops.linear(x, linear, out=out, **how)
    first = out.clone()
    if residual is not None:
        residual.copy_(before)
        place.settle()
    place.ops.linear(x, linear, out=out, **how)
    assert torch.equal(first, out)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "split"), WAYS)
def test_bias_and_residual_are_added_in_place(
    place: Place, tokens: int, split: int, shape, dtype: torch.dtype
):
    linear = make_linear(place, *shape, dtype)
    x, out = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
    wanted = product64(x, linear) + out.double()
    run(place, x, linear, out, split, residual=out)
    assert_close("linear", out, wanted)


@gpu
@pytest.mark.parametrize("inputs", [1024, 4096, 14336])
@pytest.mark.parametrize("tokens", TOKENS)
def test_chosen_kernels_of_large_products(place: Place, tokens: int, inputs: int):
    dtype = torch.float16
    linear = make_linear(place, inputs, 4104, dtype, bias=False)
    x, out = place.normal(tokens, inputs, dtype=dtype), place.poison(tokens, 4104, dtype=dtype)
    run(place, x, linear, out, None)
    assert_close("linear", out, product64(x, linear))


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outlier", [1, 100, 1000])
@pytest.mark.parametrize(("tokens", "split"), [(3, 0), (60, 3), (200, 0)])
def test_the_error_follows_a_rows_largest_number(
    place: Place, tokens: int, split: int, outlier: float, dtype: torch.dtype
):
    """Float32 results, where nothing but x is rounded: each within max|x| / 64,516 times the magnitudes of
    the weight row, also with an element of 1,000 times the others' root mean square; and those of the two
    parts themselves to float32's precision."""
    inputs = 4096
    linear = make_linear(place, inputs, 520, dtype, bias=False)
    weight = linear.weight
    assert isinstance(weight, QuantizedWeight)
    x = place.normal(tokens, inputs, dtype=dtype)
    x[:, 77] *= outlier
    out = place.poison(tokens, 520, dtype=torch.float32)
    run(place, x, linear, out, split)
    matrix = weight.values.double() * weight.scales.double()
    largest = x.double().abs().amax(1, keepdim=True)
    wanted = product64(x, linear)
    rounding = 2.0**-20 * (wanted.abs() + wanted.abs().mean(1, keepdim=True))
    error = (out.double() - wanted).abs()
    assert (error <= PART * largest * matrix.abs().sum(1) + rounding).all()
    # errors of either sign: their root mean square is that of uniform rounding
    share = (largest * PART / 3**0.5 * matrix.square().sum(1).sqrt() + rounding).square().mean().sqrt()
    assert error.square().mean().sqrt() <= 1.1 * share
    high, low, scales = (part.to(x.device).double() for part in two_parts(x.cpu()))
    exact = ((high + low / 254) * scales) @ matrix.t()
    assert (
        (out.double() - exact).abs() <= 2.0**-20 * (exact.abs() + exact.abs().mean(1, keepdim=True))
    ).all()


@gpu
@pytest.mark.parametrize("tokens", [3, 64, 200])
def test_sums_of_one_sign_do_not_overflow(place: Place, tokens: int):
    inputs = 28672
    linear = make_linear(place, inputs, 264, torch.bfloat16, bias=False)
    weight = linear.weight
    assert isinstance(weight, QuantizedWeight)
    weight.values.fill_(127)
    x = torch.full((tokens, inputs), 3.0, dtype=torch.bfloat16, device=place.device)
    out = place.poison(tokens, 264, dtype=torch.float32)
    run(place, x, linear, out, None)
    wanted = product64(x, linear)
    assert ((out.double() - wanted).abs() / wanted).max() <= 1e-6


@gpu
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize(("tokens", "split"), [(3, 0), (3, 2), (40, 0), (40, 3), (90, 0), (260, 0)])
def test_activations(place: Place, tokens: int, split: int, activation: str):
    dtype = torch.float16
    linear = make_linear(place, 528, 1000, dtype, bias=activation != "relu")
    x, out = place.normal(tokens, 528, dtype=dtype), place.poison(tokens, 1000, dtype=dtype)
    run(place, x, linear, out, split, activation=activation)
    how = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    assert_close("linear", out, getattr(F, activation.removesuffix("_tanh"))(product64(x, linear), **how))


@gpu
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [8, 344, 11008])
@pytest.mark.parametrize("tokens", [1, 33, 70, 97, 150, 193, 257, 600])
def test_swiglu(place: Place, tokens: int, inner: int, dtype: torch.dtype, activation: str):
    linear = make_linear(place, 272, 2 * inner, dtype)
    norm = Norm(place.normal(272, dtype=dtype), None, 1e-5)
    x, out = place.normal(tokens, 272, dtype=dtype), place.poison(tokens, inner, dtype=dtype)
    normed = place.poison(tokens, 272, dtype=dtype)
    place.settle()
    place.ops.norm(x, norm, out=normed)
    both = product64(normed, linear)
    for split in (0, None):
        place.ops.gpu.choose_gemm = lambda gemm: choose(gemm, place.ops.gpu.gemm_device)
        run(place, x, linear, out, split, activation=activation, norm=norm)
        assert_close("two products", out, GATES[activation](both[:, :inner]) * both[:, inner:])


@gpu
@pytest.mark.parametrize("tokens", [1, 20, 70, 600])
@pytest.mark.parametrize("activation", [None, "swiglu", "geglu_tanh", "geglu", "silu"])
def test_what_no_epilogue_has_follows_the_product(place: Place, activation: str | None, tokens: int):
    """A residual next to a gate, activations of torch's, results at any address."""
    dtype, inner = torch.float16, 184
    linear = make_linear(place, 144, 2 * inner, dtype)
    x = place.normal(tokens, 144, dtype=dtype)
    both = product64(x, linear)
    gate, up = both[:, :inner], both[:, inner:]
    wanted = {
        None: both,
        "swiglu": F.silu(gate) * up,
        "geglu": F.gelu(gate) * up,
        "geglu_tanh": F.gelu(gate, approximate="tanh") * up,
        "silu": F.silu(both),
    }
    columns = wanted[activation].shape[1]
    residual = place.normal(tokens, columns, dtype=dtype)
    out = place.poison(tokens, columns + 3, dtype=dtype)
    run(place, x, linear, out[:, 1 : columns + 1], None, activation=activation, residual=residual)
    assert_close("two products", out[:, 1 : columns + 1], wanted[activation] + residual.double())
    assert torch.isnan(out[:, 0]).all() and torch.isnan(out[:, columns + 1 :]).all()


HEADS = [  # heads, kv heads, head size, rotary size, interleaved
    (4, 4, 64, 0, False),
    (3, 3, 80, 0, False),
    (9, 3, 64, 64, False),
    (32, 8, 128, 128, False),
    (3, 1, 256, 256, False),
    (2, 2, 256, 64, True),
]


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tokens", "split"), [*WAYS, (600, None)])
def test_heads_are_rotated_and_kept(place: Place, tokens: int, split: int | None, heads, dtype: torch.dtype):
    case = make_heads(place, tokens, 272, heads, dtype)
    linear = make_linear(place, 272, case.heads.qkv_size, dtype)
    weight = linear.weight
    assert isinstance(weight, QuantizedWeight)
    exact = Linear(weight.expanded(torch.float64), linear.bias)
    wanted = replace(case, x=case.x.double(), linear=exact).wanted().to(place.device)
    if split is not None:
        force(place, split)
    out = replace(case, linear=linear).project(place)
    assert_close("linear", out, wanted)
    size, num_heads, num_kv_heads = case.heads.head_size, case.heads.num_heads, case.heads.num_kv_heads
    rows = torch.arange(tokens, device=place.device) != case.unwritten
    held = case.cache.blocks.transpose(1, 3).flatten(0, 1)  # (slots, kv head, k and v, size)
    kept = out.unflatten(1, (-1, size))[:, num_heads:].unflatten(1, (2, num_kv_heads)).transpose(1, 2)
    assert torch.equal(held[case.slots[rows].long()], kept[rows])


@gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [9, 100])
def test_a_row_that_is_not_finite_stays_so_alone(place: Place, tokens: int, bad: float):
    dtype = torch.bfloat16
    linear = make_linear(place, 528, 1000, dtype)
    x, out = place.normal(tokens, 528, dtype=dtype), place.poison(tokens, 1000, dtype=dtype)
    x[5, 77] = bad
    place.settle()
    place.ops.linear(x, linear, out=out)
    others = torch.arange(tokens, device=place.device) != 5
    assert torch.isnan(out[5]).all()
    assert_close("linear", out[others], product64(x[others], linear))


@gpu
@pytest.mark.parametrize("split", [0, 3])
def test_captured_and_replayed(place: Place, split: int):
    force(place, split)
    linear = make_linear(place, 4096, 512, torch.float16)
    x, out = place.normal(40, 4096, dtype=torch.float16), place.poison(40, 512, dtype=torch.float16)
    place.ops.linear(x, linear, out=out)  # the scratch grows outside of the capture
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    place.settle()
    with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side):
        place.ops.linear(x, linear, out=out)
        place.ops.linear(x, linear, residual=out, out=out)
    for _ in range(3):
        x.copy_(place.normal(40, 4096, dtype=torch.float16))
        graph.replay()
        torch.cuda.synchronize()
        assert_close("linear", out, 2 * product64(x, linear))


@gpu
@pytest.mark.parametrize("tokens", [3, 60])
def test_kernels_that_overlap_do_not_read_too_early(place: Place, tokens: int):
    """A chain whose kernels overlap gives the bits of one that is synchronised after each product."""
    size, dtype = 4096, torch.float16
    narrow = make_linear(place, size, size, dtype)
    wide = make_linear(place, size, 4 * size, dtype, bias=False)
    norm = Norm(place.normal(size, dtype=dtype), place.normal(size, dtype=dtype), 1e-5)
    x, inner = (place.normal(tokens, columns, dtype=dtype) for columns in (size, 4 * size))

    def chain(after_each) -> Tensor:
        hidden = x.clone()
        for _ in range(20):
            place.ops.linear(hidden, wide, norm=norm, activation="gelu_tanh", out=inner)
            after_each()
            place.ops.linear(inner[:, :size], narrow, out=hidden)
            after_each()
        return hidden

    wanted = chain(torch.cuda.synchronize)
    for _ in range(5):
        assert torch.equal(chain(lambda: None), wanted)
