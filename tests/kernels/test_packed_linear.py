"""Products with weights in 8 and 4 bit against float64 of the matrices that they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import Place
from tests.kernels.numeric import GATES, assert_close
from tests.kernels.packing import in_granules
from tests.kernels.test_linear import HeadsCase, make_heads, norm64
from tests.kernels.test_packed_weight import quantized
from tridecode.kernels.formats.packed_weight import PackedWeight
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.gemm.plan import Plan
from tridecode.kernels.operands import Linear, Norm

DTYPES = [torch.float16, torch.bfloat16]
#: format, columns of a group, whether groups have zeros
FORMATS = [
    ("int8", 0, False),
    ("fp8", 0, False),
    ("int4", 0, False),
    ("int4", 32, True),
    ("int4", 64, False),
    ("int4", 128, True),
]
TOKENS = [1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 111, 129, 200, 300]
#: inputs, outputs
SHAPES = [(64, 96), (104, 72), (768, 1000), (2048, 130), (4096, 520), (14336, 264), (512, 6152)]


class Case:
    """A weight of unit variance in a format, and the product that packs it."""

    def __init__(
        self, place: Place, format: tuple[str, int, bool], inputs: int, outputs: int, dtype, bias=True
    ):
        made = quantized(format[0], outputs, inputs, format[1], format[2])
        spread = made.expanded().std().item() * inputs**0.5
        made = replace(made, scales=made.scales / spread)
        parts = {
            name: value.to(place.device) for name, value in made.__dict__.items() if torch.is_tensor(value)
        }
        self.weight: QuantizedWeight = replace(made, **parts)
        self.bias = place.normal(outputs, dtype=dtype) if bias else None
        # int8 in rows on compute capability 9.0 is test_two_parts.py's
        packed = in_granules(place.ops, Linear(self.weight, self.bias), dtype)
        self.linear = packed

    def product64(self, x: Tensor) -> Tensor:
        wanted = x.double() @ self.weight.expanded(torch.float64).double().t()
        return wanted if self.bias is None else wanted + self.bias.double()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_residual_and_bias_are_added(cuda_place: Place, shape, format, dtype):
    place = cuda_place
    case = Case(place, format, *shape, dtype)
    assert isinstance(case.linear.weight, PackedWeight)
    for tokens in TOKENS:
        x, out = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
        wanted = case.product64(x) + out.double()
        place.settle()
        place.ops.linear(x, case.linear, residual=out, out=out)  # in place
        assert_close("linear", out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("norm_bias", [True, False])
def test_norm_and_activation_are_fused(cuda_place: Place, norm_bias, activation, format, dtype):
    place, inputs, outputs = cuda_place, 520, 136
    case = Case(place, format, inputs, outputs, dtype)
    bias = place.normal(inputs, dtype=dtype) if norm_bias else None
    norm = Norm(place.normal(inputs, dtype=dtype), bias, 1e-5)
    functions = {
        None: lambda v: v,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "relu": F.relu,
    }
    for tokens in (1, 2, 7, 16, 40, 130, 280):
        x, out = place.normal(tokens, inputs, dtype=dtype), place.poison(tokens, outputs, dtype=dtype)
        place.settle()
        place.ops.linear(x, case.linear, norm=norm, activation=activation, out=out)
        assert_close("linear", out, functions[activation](case.product64(norm64(x, norm))))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("inner", [88, 1000, 5000])
def test_swiglu_pairs_gate_and_up_rows(cuda_place: Place, inner, format, dtype, activation: str):
    place = cuda_place
    case = Case(place, format, 256, 2 * inner, dtype, bias=inner == 88)
    for tokens in (1, 2, 5, 16, 33, 64, 90, 100, 160, 210, 256, 300):
        x, out = place.normal(tokens, 256, dtype=dtype), place.poison(tokens, inner, dtype=dtype)
        place.settle()
        place.ops.linear(x, case.linear, activation=activation, out=out)
        both = case.product64(x)
        # weights are rounded to 16 bit, and a product of two sums has the errors of both
        assert_close("two products", out, GATES[activation](both[:, :inner]) * both[:, inner:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 20, 64, 70])
def test_logits_are_float32(cuda_place: Place, tokens, format, dtype):
    place = cuda_place
    case = Case(place, format, 512, 1003, dtype, bias=False)
    x, out = place.normal(tokens, 512, dtype=dtype), place.poison(tokens, 1003, dtype=torch.float32)
    place.settle()
    place.ops.linear(x, case.linear, out=out)
    assert_close("linear", out.to(dtype), case.product64(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(
    "heads",
    [
        (4, 4, 64, 0, False),
        (8, 2, 128, 128, False),
        (4, 2, 80, 32, False),
        (2, 2, 256, 64, True),
        (2, 1, 96, 24, False),
        (24, 4, 128, 128, False),
    ],
    ids=str,
)
def test_queries_and_keys_are_rotated_and_kept(cuda_place: Place, heads, format, dtype):
    place = cuda_place
    for tokens in (1, 5, 16, 40, 90, 270):
        made: HeadsCase = make_heads(place, tokens, 64, heads, dtype)
        case = Case(place, format, 64, made.heads.qkv_size, dtype)
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(
    "plan",
    [
        Plan("gemm_packed_mma", "split", 16, 8, 3),
        Plan("gemm_packed_sm90", "shared tiles", 256, 16, clusters=5, stream_k=True),
        Plan("gemm_packed_sm90", "shared tiles", 256, 64, clusters=7, stream_k=True),
        Plan("gemm_packed_sm90", "shared tiles", 256, 128, clusters=4, stream_k=True),
        Plan("gemm_packed_sm90", "whole tiles", 256, 32, clusters=2),
    ],
    ids=lambda plan: f"{plan.kernel} {plan.why} {plan.tile_tokens}",
)
def test_parts_of_the_inputs_are_added_up(cuda_place: Place, monkeypatch, plan, format, dtype):
    place = cuda_place
    monkeypatch.setattr(place.ops.gpu, "choose_packed", lambda gemm, granule_inputs: plan)
    case = Case(place, format, 8200, 584, dtype)
    tokens = 7 if plan.kernel == "gemm_packed_mma" else 40
    x, residual = place.normal(tokens, 8200, dtype=dtype), place.normal(tokens, 584, dtype=dtype)
    wanted = case.product64(x) + residual.double()
    out = place.poison(tokens, 584, dtype=dtype)
    place.settle()
    for _ in range(2):  # the second launch finds the counters as the first one left them
        out.fill_(float("nan"))
        place.ops.linear(x, case.linear, residual=residual, out=out)
        assert_close("linear", out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_a_weight_is_expanded_as_it_is_meant(cuda_place: Place, format, dtype):
    place = cuda_place
    case = Case(place, (format, 0, False), 392, 523, dtype)
    assert isinstance(case.linear.weight, PackedWeight)
    found = place.ops.gemms.dequantised.dequantiser.rows(case.linear.weight, slice(0, 523), dtype)
    wanted = case.weight.expanded(dtype)
    if format == "int4":  # the scale is rounded first
        assert_close("norm", found, case.weight.expanded(torch.float64).double())
    else:
        assert torch.equal(found, wanted)
