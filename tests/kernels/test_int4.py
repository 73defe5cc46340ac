"""Products of 4-bit weights on int8 tensor cores (gemm_int4_sm90, gemm_int4_stream_k_sm90): the arrangement
without a GPU, the rounding of x bit for bit, the products against float64.

Bound: x is rounded to 1 / 64,516 of its row's largest number, a group's scale and the result to the dtype.
So an error is at most max|x| / 64,516 * sum|w| + u * sum|w x| + u * |result|, u half an epsilon, and what
float32 adds to sums.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import Place
from tests.kernels.numeric import GATES, assert_close
from tests.kernels.packing import in_granule_order, rows_of_two_parts
from tests.kernels.test_gemm_table import instance_of, instances
from tests.kernels.test_linear import make_heads, norm64
from tests.kernels.test_packed_linear import Case
from tests.kernels.test_packed_weight import H200, quantized
from tridecode.kernels.bench.shapes import SHAPES
from tridecode.kernels.formats.packed_weight import PackedWeight, multiplied_in_int8, pack
from tridecode.kernels.formats.quantized import (
    QuantizedWeight,
    two_parts,
)
from tridecode.kernels.gemm.eight_bit import quantize_rows
from tridecode.kernels.gemm.packed_table import (
    INT4_LONG_INPUTS,
    INT4_LONG_TOKENS,
    INT4_MOST_TOKENS,
    INT4_SPLITS,
    INT4_STREAM_TOKENS,
    INT4_STREAM_WEIGHTS,
    INT4_TOKENS,
    choose_packed,
)
from tridecode.kernels.gemm.plan import Gemm, Plan
from tridecode.kernels.operands import Linear, Norm

DTYPES = [torch.float16, torch.bfloat16]
#: columns of a group, whether groups have zeros
GROUPS = [(0, False), (128, False), (128, True), (384, True)]
TOKENS = [1, 3, 8, 9, 16, 32, 33, 64, 65, 100, 200]


# ---------------------------------------------------------------- without a GPU


def multiplied(weight: PackedWeight, x: Tensor) -> np.ndarray:
    """(T, rows): x @ weight.T as gemm_int4_sm90.cu computes it, lane by lane."""
    assert weight.groups is not None
    high, low, scales = two_parts(x)
    parts = in_granule_order(rows_of_two_parts(high, low)).numpy().astype(np.int64)
    parts = np.pad(parts, ((0, 0), (0, -parts.shape[1] % 128)))
    words = weight.values.numpy().view("<u4").reshape(*weight.values.shape[:2], 8, 4, 4).astype(np.int64)
    symmetric = weight.zeros == "eight"
    sums = np.zeros((parts.shape[0] // 16, 8, weight.rows))
    for row in range(weight.rows):
        for chunk in range(words.shape[1]):
            group = weight.groups[row // 8, chunk, row % 8]
            bits = int(group.item()) & 0xFFFFFFFF
            place = 22 if weight.dtype == torch.float16 else 19
            zero = (bits >> place & 15) * 0x01010101
            products = np.zeros(parts.shape[0], dtype=np.int64)
            for t in range(4):
                for step in range(4):
                    word = int(words[row // 8, chunk, row % 8, t, step])
                    for half in range(2):
                        if symmetric:
                            operand = ((word << 4 if half == 0 else word) & 0xF0F0F0F0) ^ 0x80808080
                        else:
                            operand = (((word >> 4 * half & 0x0F0F0F0F) | 0x80808080) - zero) ^ 0x80808080
                        for byte, value in enumerate(np.array([operand], dtype="<u4").view(np.int8)):
                            at = chunk * 128 + step * 32 + half * 16 + 4 * t + byte
                            products += int(value) * parts[:, at]
            by_part = products.reshape(-1, 2, 8)
            both = by_part[:, 0] * 254 + by_part[:, 1]
            assert np.abs(both).max() < 2**31
            scale = group.view(1).view(weight.dtype)[0].item()
            sums[:, :, row] += scale * both
    sums = sums.reshape(-1, weight.rows)[: x.shape[0]]
    return sums * scales.numpy() / (254 * (16 if symmetric else 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_lanes_find_their_inputs(group, dtype):
    weight = quantized("int4", 16, 416, *group)
    packed = pack(weight, dtype)
    assert multiplied_in_int8(packed) and packed.zeros == ("whole" if group[1] else "eight")
    x = torch.randn(11, 416, generator=torch.Generator().manual_seed(2)).to(dtype)
    matrix = weight.expanded().double()
    error = np.abs(multiplied(packed, x) - (x.double() @ matrix.t()).numpy())
    unit = torch.finfo(dtype).eps / 2
    largest = x.double().abs().amax(1, keepdim=True)
    allowed = largest / 64516 * matrix.abs().sum(1) + unit * (x.double().abs() @ matrix.abs().t())
    assert (error <= 1.01 * allowed.numpy()).all()


def test_inputs_are_in_the_order_of_a_granule():
    found = in_granule_order(torch.arange(96)[None])[0]
    for at in range(96):
        h, rest = divmod(at % 32, 16)
        t, rest = divmod(rest, 4)
        j, i = divmod(rest, 2)
        assert found[at] == at // 32 * 32 + 16 * i + 8 * h + 2 * t + j


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"zeros": torch.full((16, 2), 8.0)}, True),
        ({"zeros": torch.full((16, 2), 15.0)}, True),
        ({"zeros": torch.full((16, 2), 16.0)}, False),
        ({"zeros": torch.full((16, 2), 7.5)}, False),
        ({"group_size": 64, "scales": torch.ones(16, 4)}, False),
    ],
)
def test_which_weights_are_multiplied_in_int8(change, kept):
    weight = QuantizedWeight(**{**quantized("int4", 16, 256, 128).__dict__, **change})
    assert multiplied_in_int8(pack(weight, torch.float16)) is kept
    assert not multiplied_in_int8(pack(quantized("int4", 16, 264, 0), torch.float16))
    assert not multiplied_in_int8(pack(quantized("int4", 17, 256, 0), torch.float16))
    assert not multiplied_in_int8(pack(quantized("int8", 16, 256, 0), torch.float16))


def test_every_choice_has_an_instance_and_every_instance_is_chosen():
    chosen, streamed = set(), set()
    for shape in SHAPES.values():
        for product in shape.products(1).values():
            for tokens in range(1, 200):
                gemm = product._replace(tokens=tokens, operand="int4")
                plan = choose_packed(gemm, 128, H200)
                most = INT4_LONG_TOKENS if product.inputs > INT4_LONG_INPUTS else INT4_MOST_TOKENS
                assert (plan.kernel == "gemm_int4_sm90") == (tokens <= most)
                large = product.outputs * product.inputs >= INT4_STREAM_WEIGHTS
                streams = most < tokens <= INT4_STREAM_TOKENS[-1] and large
                assert (plan.kernel == "gemm_int4_stream_k_sm90") == streams
                if streams:
                    assert plan.tile_tokens == (32 if tokens <= 32 else 64) and 0 < plan.clusters <= 66
                    streamed.add(instance_of(gemm, plan))
                if plan.kernel == "gemm_int4_sm90":
                    assert plan.tile_tokens in INT4_TOKENS and plan.split in INT4_SPLITS
                    assert plan.split * 4 <= -(-product.inputs // 128) or plan.split == 1
                    chosen.add(instance_of(gemm, plan))
    assert chosen == instances("gemm_int4_sm90")
    assert streamed <= instances("gemm_int4_stream_k_sm90")
    older = choose_packed(Gemm(4, 4096, 4096, operand="int4"), 128, H200._replace(capability=80))
    assert older.kernel == "gemm_packed_mma"


# ---------------------------------------------------------------- on a GPU


def force(place: Place, monkeypatch: pytest.MonkeyPatch, split: int) -> None:
    """Every product by gemm_int4_sm90, of any number of tokens; split 0: by gemm_int4_stream_k_sm90, clusters
    share the tiles of up to 64 tokens."""

    def streamed(gemm: Gemm) -> Plan:
        tile = 32 if gemm.tokens <= 32 else 64
        tiles = -(-gemm.outputs // 256) * -(-gemm.tokens // tile)
        shared, most = gemm.tokens <= 64, place.ops.gpu.gemm_device.multiprocessors // 2
        clusters = min(most, tiles * -(-gemm.inputs // 256) if shared else tiles)
        fused = gemm.epilogue == "qkv"
        kernel = "gemm_int4_stream_k_sm90"
        return Plan(kernel, "forced", 256, tile, 0, clusters, shared, fuses_norm=True, fuses_heads=fused)

    def plan(gemm: Gemm, granule_inputs: int) -> Plan:
        assert gemm.operand == "int4"
        if split == 0:
            return streamed(gemm)
        tile = next((size for size in INT4_TOKENS if size >= gemm.tokens), 32)
        most = min(split, -(-gemm.inputs // 128))
        parts = max(each for each in (1, 2, 4, 8) if each <= most)
        fused = gemm.epilogue == "qkv"
        return Plan("gemm_int4_sm90", "forced", 128, tile, parts, fuses_norm=True, fuses_heads=fused)

    monkeypatch.setattr(place.ops.gpu, "choose_packed", plan)


def assert_within_bound(found: Tensor, wanted: Tensor, x: Tensor, weight: QuantizedWeight) -> None:
    """Assert the bound above for results without an activation."""
    unit = torch.finfo(found.dtype).eps / 2
    matrix, x = weight.expanded(torch.float32).double().abs(), x.double().abs()
    allowed = x.amax(1, keepdim=True) / 64516 * matrix.sum(1) + (unit + 1e-5) * (x @ matrix.t())
    allowed += unit * wanted.abs() * 1.01 + 1e-30
    assert torch.isfinite(found).all()
    worst = ((found.double() - wanted).abs() / allowed).max().item()
    assert worst <= 1.01, f"{worst:.2f} times the bound"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [32, 128, 1056, 4096, 14336, 16384, 16416])
def test_rows_are_rounded_in_the_order_of_granules(cuda_place: Place, columns, dtype):
    place = cuda_place
    for tokens in (1, 8, 19):
        x = place.normal(tokens, columns, dtype=dtype)
        x[0, 5] = 40.0
        high, low, scales = two_parts(x.cpu())
        wanted = in_granule_order(rows_of_two_parts(high, low)).contiguous()
        place.settle()
        found, found_scales = quantize_rows(place.ops.gpu, x, None, "two_parts_int4")
        found, found_scales = found[: wanted.numel()].clone(), found_scales[: 4 * tokens].clone()
        assert torch.equal(found.cpu().view(torch.int8), wanted.flatten())
        assert torch.equal(found_scales.cpu().view(torch.float32), scales.flatten())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("split", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(128, 128), (160, 264), (1056, 1000), (4096, 520), (14336, 136)], ids=str)
def test_products(cuda_place: Place, monkeypatch, shape, split, group, dtype):
    place = cuda_place
    case = Case(place, ("int4", *group), *shape, dtype)
    force(place, monkeypatch, split)
    for tokens in TOKENS:
        x, residual = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
        wanted = case.product64(x) + residual.double()
        out = place.poison(tokens, shape[1], dtype=dtype)
        place.settle()
        place.ops.linear(x, case.linear, residual=residual, out=out)
        assert_close("linear", out, wanted)
        again = place.poison(tokens, shape[1], dtype=dtype)
        place.ops.linear(x, case.linear, residual=residual, out=again)
        assert torch.equal(out, again)
        logits = place.poison(tokens, shape[1], dtype=torch.float32)
        place.ops.linear(x, case.linear, out=logits)
        assert_close("linear", logits.to(dtype), case.product64(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("split", [0, 4])
def test_outliers_stay_within_the_bound(cuda_place: Place, monkeypatch, split, group, dtype):
    """Single inputs of 1,000 times the row's root mean square."""
    place = cuda_place
    case = Case(place, ("int4", *group), 4096, 520, dtype, bias=False)
    force(place, monkeypatch, split)
    for tokens in (1, 8, 16, 40):
        x = place.normal(tokens, 4096, dtype=dtype)
        x[:, 77] = 1000.0
        x[0, 2000] = -1000.0
        out = place.poison(tokens, 520, dtype=dtype)
        place.settle()
        place.ops.linear(x, case.linear, out=out)
        assert_within_bound(out, case.product64(x), x, case.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [0, 1, 2, 8])
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "gelu", "relu", *GATES])
def test_norm_and_activation_are_fused(cuda_place: Place, monkeypatch, activation, split, dtype):
    place, inputs, outputs = cuda_place, 1024, 1040
    case = Case(place, ("int4", 128, True), inputs, outputs, dtype)
    force(place, monkeypatch, split)
    norm = Norm(place.normal(inputs, dtype=dtype), place.normal(inputs, dtype=dtype), 1e-5)
    functions = {
        None: lambda v: v,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "relu": F.relu,
    }
    for name, gate in GATES.items():
        functions[name] = lambda v, gate=gate: gate(v[:, : outputs // 2]) * v[:, outputs // 2 :]
    for tokens in (1, 7, 16, 30, 64, 90):
        x = place.normal(tokens, inputs, dtype=dtype)
        out = place.poison(tokens, outputs // (2 if activation in GATES else 1), dtype=dtype)
        place.settle()
        place.ops.linear(x, case.linear, norm=norm, activation=activation, out=out)
        budget = "two products" if activation in GATES else "linear"
        assert_close(budget, out, functions[activation](case.product64(norm64(x, norm))))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [0, 1, 2, 8])
@pytest.mark.parametrize(
    "heads",
    [(4, 4, 64, 0, False), (8, 2, 128, 128, False), (4, 2, 64, 64, False), (3, 1, 256, 256, False)],
    ids=str,
)
def test_queries_and_keys_are_rotated_and_kept(cuda_place: Place, monkeypatch, heads, split, dtype):
    place = cuda_place
    for tokens in (1, 5, 16, 40, 90):
        made = make_heads(place, tokens, 1024, heads, dtype)
        case = Case(place, ("int4", 128, False), 1024, made.heads.qkv_size, dtype)
        force(place, monkeypatch, split)
        made.linear = case.linear
        out = made.project(place)
        dense = Linear(case.weight.expanded(torch.float64), case.bias)
        assert_close("linear", out, replace(made, linear=dense).wanted())
        size, num_heads = made.heads.head_size, made.heads.num_heads
        for token in range(tokens):
            block, offset = divmod(int(made.slots[token]), 16)
            held = made.cache.blocks[block, :, :, offset].flatten(0, 1)
            if token == made.unwritten:
                assert torch.isnan(held).all()
            else:
                assert torch.equal(held, out[token].unflatten(0, (-1, size))[num_heads:])
