"""Products with both operands in 8 bit on a GPU: the rounding of rows bit for bit, the products against
float64 of the weight's and the rounded rows' values (kernels/formats/quantized.py on the CPU).

int8 sums are exact, so the usual budget holds. The tensor cores add E4M3 products with about 14 bits of
mantissa, in parts of 256 inputs: each of a part's 8 instructions may lose 2^-12 of the largest sum in it.
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
from tests.kernels.packing import rows_of_two_parts
from tests.kernels.test_gemm_sm90 import even_split
from tests.kernels.test_linear import make_heads
from tridecode.kernels.checks import DtypeError
from tridecode.kernels.formats.quantized import (
    QuantizedWeight,
    rounded_activations,
    stays_in_8_bit,
    two_parts,
)
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.gemm.eight_bit import Fp8Blocks, quantize_rows
from tridecode.kernels.gemm.plan import Device, Gemm, Plan, at_least
from tridecode.kernels.gemm.table import choose
from tridecode.kernels.gemm.table_sm90 import EVEN_SPLIT_TOKENS, SPLIT_K_TOKENS, stream_k_plan
from tridecode.kernels.operands import Linear, Norm

gpu = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16]
ROUNDED = ["int8", "fp8"]
FORMATS = [*ROUNDED, "fp8_blocks"]
#: tokens, and the split of gemm_sm90_split_k_8bit; 0: gemm_sm90_stream_k_8bit, of fp8 cuBLASLt for the most
WAYS = [(1, 0), (17, 0), (64, 0), (65, 0), (200, 0), (300, 0), (1000, 0), (1600, 0)]
WAYS += [(tokens, split) for tokens in (1, 16, 17, 64) for split in (1, 2, 3)]
#: (inputs, outputs): one stage, odd ends, many stages of few tiles, many tiles
SHAPES = [(128, 128), (144, 264), (1040, 1000), (4096, 512), (512, 9216)]


@pytest.fixture(scope="module")
def ops():
    from tridecode.kernels.cuda import Cuda

    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("W8A8 needs compute capability 9.0")
    return Cuda(device)


@pytest.fixture
def place(ops, request: pytest.FixtureRequest) -> Place:
    generator = torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))
    ops.gpu.choose_gemm = lambda gemm: choose(gemm, ops.gpu.gemm_device)
    return Place(ops, torch.device("cuda", 0), generator)


def force_even(place: Place) -> None:
    def plan(gemm: Gemm) -> Plan:
        sizes = EVEN_SPLIT_TOKENS if gemm.operand == "int8" else EVEN_SPLIT_TOKENS[:1]
        tile_tokens = at_least(gemm.tokens, sizes)
        return even_split(gemm, tile_tokens, "gemm_sm90_even_split_8bit")

    place.ops.gpu.choose_gemm = plan


def force(place: Place, split: int) -> None:
    device: Device = place.ops.gpu.gemm_device

    def plan(gemm: Gemm) -> Plan:
        assert gemm.operand
        if split == 0 and gemm.tokens > 64:
            return choose(gemm, device)
        if split == 0:
            return stream_k_plan(gemm, device)._replace(kernel="gemm_sm90_stream_k_8bit")
        tile_tokens = next(size for size in SPLIT_K_TOKENS if size >= gemm.tokens)
        stages = -(-gemm.inputs // 128)
        return Plan(
            "gemm_sm90_split_k_8bit", "forced", 128, tile_tokens, min(split, stages), fuses_heads=True
        )

    place.ops.gpu.choose_gemm = plan


_weights: dict[tuple[int, int, str], QuantizedWeight] = {}


def make_linear(
    place: Place, inputs: int, outputs: int, dtype: torch.dtype, format: str, bias: bool = True
) -> Linear:
    key = inputs, outputs, format
    if key not in _weights:
        matrix = place.normal(outputs, inputs, dtype=torch.float32, scale=inputs**-0.5)
        if format == "fp8_blocks":
            _weights[key] = rounded_in_blocks(matrix)
        else:
            _weights[key] = round_to_nearest(matrix, format, 0, format)
    bias_row = place.normal(outputs, dtype=dtype) if bias else None
    linear = place.ops.pack(Linear(_weights[key], bias_row), dtype)
    assert isinstance(linear.weight, QuantizedWeight)
    return linear


def rounded_in_blocks(matrix: Tensor) -> QuantizedWeight:
    """In E4M3, every block of 128 x 128 with a scale of its own; their magnitudes differ up to 16 times."""
    rows, columns = matrix.shape
    shape = -(-rows // 128), -(-columns // 128)
    count = shape[0] * shape[1]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    factors = torch.logspace(-2, 2, count, 2.0)[order].reshape(shape).to(matrix.device)
    values = (matrix * columns**0.5 * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = factors * columns**-0.5 / 100
    return QuantizedWeight("fp8", columns, values, scales, None, 128, None, 128, "fp8")


def rounded64(x: Tensor, format: str) -> Tensor:
    """Return the quantised input of the GEMM, computed on the CPU."""
    group = 128 if format == "fp8_blocks" else 0
    values, scales = rounded_activations(x.cpu(), format.removesuffix("_blocks"), group)
    if group:
        scales = scales.repeat_interleave(group, 1)[:, : x.shape[1]]
    return (values.double() * scales.double()).to(x.device)


def product64(x: Tensor, linear: Linear) -> Tensor:
    weight = linear.weight
    assert isinstance(weight, QuantizedWeight)
    scales = weight.scales.double()
    if weight.block_rows > 1:
        scales = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)
    matrix = weight.values.double() * scales[:, : weight.columns]
    wanted = rounded64(x, "fp8_blocks" if weight.block_rows > 1 else weight.activations) @ matrix.t()
    return wanted if linear.bias is None else wanted + linear.bias.double()


def assert_product(
    format: str, inputs: int, found: Tensor, wanted: Tensor, operation: str = "linear"
) -> None:
    if format == "int8":
        assert_close(operation, found, wanted)
        return
    assert torch.isfinite(found).all()
    error = (found.double() - wanted).abs()
    eps = torch.finfo(found.dtype).eps
    size = wanted.abs().mean()
    if format == "fp8_blocks":  # outputs are as large as the scales of their blocks
        size = wanted.abs().mean(0).maximum(size)
    # a gate's product has the errors of both factors
    allowed = 2 * (4 * eps + min(-(-inputs // 32), 8) * 2.0**-12) * (wanted.abs() + size)
    assert (error <= allowed).all(), f"off by {(error / allowed).max():.2f} times what is allowed"
    # as a whole: errors have either sign, so most of them cancel
    share = error.square().mean().sqrt() / wanted.square().mean().sqrt()
    assert share <= eps + 0.002, f"relative error {share:.4f}"


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


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8))


def check_rows(place: Place, x: Tensor, norm: Norm | None, wanted: Tensor, format: str) -> None:
    if format == "two_parts":
        high, low, scales = two_parts(wanted.cpu())
        values = rows_of_two_parts(high, low)
    elif format == "fp8_blocks":
        values, scales = rounded_activations(wanted.cpu(), "fp8", 128)
        scales = scales.t().contiguous()
    else:
        values, scales = rounded_activations(wanted.cpu(), format)
    place.settle()
    found, found_scales = quantize_rows(place.ops.gpu, x, norm, format)
    found, found_scales = found[: values.numel()].clone(), found_scales[: 4 * scales.numel()].clone()
    found_scales = found_scales.view(torch.float32).cpu()
    assert torch.equal(found_scales.isnan(), scales.flatten().isnan())
    assert torch.equal(found_scales.nan_to_num(), scales.flatten().nan_to_num())
    assert same_bits(found, values.contiguous().flatten())


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [*FORMATS, "two_parts"])
@pytest.mark.parametrize("columns", [16, 128, 1040, 4096, 14336, 16384, 16400, 28672])
def test_rows_are_rounded_as_defined(place: Place, columns: int, format: str, dtype: torch.dtype):
    x = place.normal(67, columns, dtype=dtype)
    x *= torch.logspace(-8, 4, 67, device=place.device).to(dtype)[:, None]  # subnormal float16 too
    x[3] = 0
    x[4, 5], x[5, 7], x[6, columns - 1] = float("nan"), float("inf"), -float("inf")
    x[7] = torch.arange(columns, device=place.device) % 255 - 127  # halves, with this largest value:
    x[7, 0] = 254
    check_rows(place, x, None, x, format)
    check_rows(place, x[:1], None, x[:1], format)
    odd = place.normal(5, columns + 3, dtype=dtype)[:, 1 : columns + 1]  # rows at any address
    check_rows(place, odd, None, odd, format)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [*FORMATS, "two_parts"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("columns", [128, 4096, 16400])
def test_a_norm_is_rounded_before_its_rows_are(
    place: Place, columns: int, biased: bool, format: str, dtype: torch.dtype
):
    """The norm by itself is compared with float64 in test_rows.py; here both are one kernel."""
    bias = place.normal(columns, dtype=dtype) if biased else None
    norm = Norm(place.normal(columns, dtype=dtype), bias, 1e-5)
    x, normed = place.normal(33, columns, dtype=dtype), place.poison(33, columns, dtype=dtype)
    x[4, 5] = float("nan")
    place.settle()
    place.ops.norm(x, norm, out=normed)
    check_rows(place, x, norm, normed, format)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "split"), WAYS)
def test_bias_and_residual_are_added_in_place(
    place: Place, tokens: int, split: int, shape, format: str, dtype: torch.dtype
):
    linear = make_linear(place, *shape, dtype, format)
    x, out = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
    wanted = product64(x, linear) + out.double()
    run(place, x, linear, out, split, residual=out)
    assert_product(format, shape[0], out, wanted)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(512, 128), (1040, 1000), (4096, 512), (14336, 2048)])
@pytest.mark.parametrize("tokens", [1, 65, 128, 129, 192, 250])
def test_four_clusters_finish_a_tile(
    place: Place, monkeypatch: pytest.MonkeyPatch, tokens: int, shape, format: str, dtype: torch.dtype
):
    """Covers clusters whose share has no tokens, and more than one tile of tokens."""
    linear = make_linear(place, *shape, dtype, format)
    x, out = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
    wanted = product64(x, linear) + out.double()
    monkeypatch.setattr(Fp8Blocks, "library_rows", lambda *_: 0)  # all rows by the kernel
    force_even(place)
    run(place, x, linear, out, None, residual=out)
    assert_product(format, shape[0], out, wanted)


@gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("inputs", [1024, 4096, 14336])
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 64, 65, 96, 142, 192, 200, 256, 1000])
def test_chosen_kernels_of_large_products(place: Place, tokens: int, inputs: int, format: str):
    dtype = torch.bfloat16
    linear = make_linear(place, inputs, 4104, dtype, format, bias=False)
    x, out = place.normal(tokens, inputs, dtype=dtype), place.poison(tokens, 4104, dtype=dtype)
    run(place, x, linear, out, None)
    assert_product(format, inputs, out, product64(x, linear))


@gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [3, 64, 200])
def test_sums_of_one_sign(place: Place, tokens: int, format: str):
    """Sums far above each product lose most on tensor cores with few accumulator bits: without partial sums,
    5 % over 14,336 products."""
    linear = make_linear(place, 14336, 512, torch.bfloat16, format, bias=False)
    weight = linear.weight
    assert isinstance(weight, QuantizedWeight)
    positive = replace(weight, values=weight.values.float().abs().to(weight.values.dtype))
    linear = replace(linear, weight=positive)
    x = place.normal(tokens, 14336, dtype=torch.bfloat16).abs()
    out = place.poison(tokens, 512, dtype=torch.float32)
    run(place, x, linear, out, None)
    wanted = product64(x, linear)
    error = ((out.double() - wanted).abs() / wanted).max()
    assert error <= (1e-6 if format == "int8" else 4e-3), f"relative error {error:.2e}"


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize(("tokens", "split"), [(3, 0), (3, 2), (40, 0), (40, 3), (90, 0), (260, 0)])
def test_activations(place: Place, tokens: int, split: int, activation: str, format: str, dtype: torch.dtype):
    linear = make_linear(place, 528, 1000, dtype, format, bias=activation != "relu")
    x, out = place.normal(tokens, 528, dtype=dtype), place.poison(tokens, 1000, dtype=dtype)
    run(place, x, linear, out, split, activation=activation)
    how = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    wanted = getattr(F, activation.removesuffix("_tanh"))(product64(x, linear), **how)
    assert_product(format, 528, out, wanted)


@gpu
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inner", [8, 344, 11008])
@pytest.mark.parametrize("tokens", [1, 33, 70, 97, 150, 193, 257, 600])
def test_swiglu(
    place: Place, tokens: int, inner: int, bias: bool, format: str, dtype: torch.dtype, activation: str
):
    linear = make_linear(place, 272, 2 * inner, dtype, format, bias)
    norm = Norm(place.normal(272, dtype=dtype), None, 1e-5)
    x, out = place.normal(tokens, 272, dtype=dtype), place.poison(tokens, inner, dtype=dtype)
    normed = place.poison(tokens, 272, dtype=dtype)
    place.settle()
    place.ops.norm(x, norm, out=normed)
    run(place, x, linear, out, 0, activation=activation, norm=norm)
    both = product64(normed, linear)
    assert_product(format, 272, out, GATES[activation](both[:, :inner]) * both[:, inner:])


@gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 20, 70])
@pytest.mark.parametrize("activation", [None, "swiglu", "geglu_tanh", "geglu", "silu"])
def test_what_no_epilogue_has_follows_the_product(
    place: Place, activation: str | None, tokens: int, format: str
):
    """A residual next to a gate, activations of torch's, results in float32 or at any address."""
    dtype, inner = torch.float16, 184
    linear = make_linear(place, 144, 2 * inner, dtype, format)
    x = place.normal(tokens, 144, dtype=dtype)
    both = product64(x, linear)
    gate, up = both[:, :inner], both[:, inner:]
    wanted = {
        None: both,
        "swiglu": F.silu(gate) * up,
        "geglu": F.gelu(gate) * up,
        "geglu_tanh": F.gelu(gate, approximate="tanh") * up,
        "silu": F.silu(both),
    }[activation]
    columns = wanted.shape[1]
    residual = place.normal(tokens, columns, dtype=dtype)
    out = place.poison(tokens, columns + 3, dtype=dtype)
    run(place, x, linear, out[:, 1 : columns + 1], None, activation=activation, residual=residual)
    assert_product(format, 144, out[:, 1 : columns + 1], wanted + residual.double())
    assert torch.isnan(out[:, 0]).all() and torch.isnan(out[:, columns + 1 :]).all()


@gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("tokens", "split"), [(3, 0), (3, 1), (20, 2), (60, 3), (100, 0), (300, 0)])
def test_float32_results(place: Place, tokens: int, split: int, format: str):
    linear = make_linear(place, 512, 1000, torch.float16, format, bias=False)
    x, out = place.normal(tokens, 512, dtype=torch.float16), place.poison(tokens, 1000, dtype=torch.float32)
    run(place, x, linear, out, split)
    assert_product(format, 512, out, product64(x, linear), "logits")


HEADS = [  # heads, kv heads, head size, rotary size, interleaved
    (4, 4, 64, 0, False),
    (3, 3, 80, 0, False),
    (9, 3, 64, 64, False),
    (32, 8, 128, 128, False),
    (3, 1, 256, 256, False),
    (4, 2, 80, 32, False),
    (2, 2, 256, 64, True),
]


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tokens", "split"), WAYS)
def test_heads_are_rotated_and_kept(
    place: Place, tokens: int, split: int, heads, format: str, dtype: torch.dtype
):
    case = make_heads(place, tokens, 272, heads, dtype)
    quantized = make_linear(place, 272, case.heads.qkv_size, dtype, format)
    weight = quantized.weight
    rounded = rounded64(case.x, format)
    exact = Linear(weight.expanded(torch.float64), quantized.bias)
    wanted = replace(case, x=rounded, linear=exact).wanted().to(place.device)
    force(place, split)
    out = replace(case, linear=quantized).project(place)
    assert_product(format, 272, out, wanted)
    cache, slots, unwritten = case.cache, case.slots, case.unwritten
    size, num_heads, num_kv_heads = case.heads.head_size, case.heads.num_heads, case.heads.num_kv_heads
    rows = torch.arange(tokens, device=place.device) != unwritten
    held = cache.blocks.transpose(1, 3).flatten(0, 1)  # (slots, kv head, k and v, size)
    kept = out.unflatten(1, (-1, size))[:, num_heads:].unflatten(1, (2, num_kv_heads)).transpose(1, 2)
    assert torch.equal(held[slots[rows].long()], kept[rows])
    others = torch.ones(held.shape[0], dtype=torch.bool, device=place.device)
    others[slots[rows].long()] = False
    assert torch.isnan(held[others]).all()


@gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [9, 100])
def test_a_row_that_is_not_finite_stays_so_alone(place: Place, tokens: int, format: str, bad: float):
    dtype = torch.bfloat16
    linear = make_linear(place, 528, 1000, dtype, format)
    x, out = place.normal(tokens, 528, dtype=dtype), place.poison(tokens, 1000, dtype=dtype)
    x[5, 77] = bad
    run_once = place.ops.linear
    place.settle()
    run_once(x, linear, out=out)
    others = torch.arange(tokens, device=place.device) != 5
    assert torch.isnan(out[5]).all()
    assert_product(format, 528, out[others], product64(x[others], linear))


@gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("split", [0, 3])
def test_captured_and_replayed(place: Place, split: int, format: str):
    """A graph of products that share tiles and scratch, replayed with other inputs."""
    force(place, split)
    linear = make_linear(place, 4096, 512, torch.float16, format)
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
        assert_product(format, 4096, out, 2 * product64(x, linear))


@gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [3, 60])
def test_kernels_that_overlap_do_not_read_too_early(place: Place, tokens: int, format: str):
    """A chain whose kernels overlap gives the bits of one that is synchronised after each product."""
    size = 4096
    narrow = make_linear(place, size, size, torch.float16, format)
    wide = make_linear(place, size, 4 * size, torch.float16, format, bias=False)
    norm = Norm(place.normal(size, dtype=torch.float16), place.normal(size, dtype=torch.float16), 1e-5)
    x, inner = (place.normal(tokens, columns, dtype=torch.float16) for columns in (size, 4 * size))

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


@gpu
def test_float32_is_refused_by_name(place: Place):
    linear = make_linear(place, 64, 32, torch.float16, "int8", bias=False)
    x, out = place.normal(2, 64, dtype=torch.float32), place.poison(2, 32, dtype=torch.float32)
    with pytest.raises(DtypeError, match="^linear: x is torch.float32"):
        place.ops.linear(x, linear, out=out)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"capability": 75}, False),
        ({"capability": 80}, True),
        ({"capability": 100}, True),
        ({"capability": 89, "activations": ""}, False),
        ({"capability": 86, "activations": "fp8", "format": "fp8", "outputs": 48}, False),
        ({"capability": 89, "activations": "fp8", "format": "fp8", "outputs": 48}, True),
        ({"capability": 89, "activations": "fp8", "format": "fp8"}, False),  # not a multiple of 16 outputs
        ({"activations": ""}, True),
        ({"activations": "", "format": "fp8"}, False),
        ({"activations": "", "inputs": (1 << 17) + 16}, False),
        ({"activations": "fp8"}, False),
        ({"format": "int4"}, False),
        ({"inputs": 72}, False),
        ({"outputs": 36}, False),
    ],
)
def test_which_weights_stay_in_8_bit(change: dict, kept: bool):
    how = {"dtype": torch.float16, "capability": 90, "activations": "int8", "format": "int8"}
    how |= {"inputs": 64, "outputs": 40} | change
    matrix = torch.randn(how["outputs"], how["inputs"], generator=torch.Generator().manual_seed(0))
    weight = round_to_nearest(matrix, how["format"], 32, how["activations"])
    assert stays_in_8_bit(weight, how["dtype"], how["capability"]) is kept


def test_two_parts_keep_16_bits_of_a_rows_largest_number():
    x = torch.randn(67, 512, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-8, 4, 67)[:, None]
    x[3], x[4, 5] = 0, 1e6  # one outlier
    high, low, scales = two_parts(x.bfloat16())
    found = (high.double() + low.double() / 254) * scales.double()
    wanted = x.bfloat16().double()
    largest = wanted.abs().amax(1, keepdim=True)
    assert ((found - wanted).abs() <= largest / (127 * 508) * 1.01).all()
    rows = rows_of_two_parts(high, low)
    assert rows.shape == (144, 512)
    for token in range(67):
        first = token // 8 * 16 + token % 8
        assert torch.equal(rows[first], high[token]) and torch.equal(rows[first + 8], low[token])
    assert not rows[128 + 3 : 128 + 8].any() and not rows[128 + 11 :].any()


def test_blocks_of_fp8_checkpoints_stay_in_8_bit():
    values = torch.zeros(264, 144, dtype=torch.float8_e4m3fn)
    weight = QuantizedWeight("fp8", 144, values, torch.ones(3, 2), None, 128, None, 128, "fp8")
    assert stays_in_8_bit(weight, torch.float16, 90)
    assert not stays_in_8_bit(weight, torch.float32, 90)
    assert not stays_in_8_bit(weight, torch.float16, 89)
    assert not stays_in_8_bit(replace(weight, activations=""), torch.float16, 90)
    # a scale for 128 inputs of each output
    rows = replace(weight, scales=torch.ones(264, 2), block_rows=1)
    assert not stays_in_8_bit(rows, torch.float16, 90)
    wide = replace(weight, scales=torch.ones(3, 1), group_size=0)
    assert not stays_in_8_bit(wide, torch.float16, 90)
