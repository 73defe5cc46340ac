"""linear and project_qkv against float64, with all that is fused into them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.batches import make_batch
from tests.kernels.conftest import Place
from tests.kernels.numeric import GATES, assert_close
from tridecode.kernels.checks import ShapeError
from tridecode.kernels.gemm.plan import Plan
from tridecode.kernels.operands import Batch, CacheLayer, Heads, Linear, Norm, Rope

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOKENS = [1, 2, 8, 9, 17, 33, 64, 65, 111]
SHAPES = [(64, 96), (104, 72), (300, 257), (768, 1000), (2048, 130), (72, 9001), (128, 21003)]


def make_linear(place: Place, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = True) -> Linear:
    weight = place.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    return Linear(weight, place.normal(outputs, dtype=dtype) if bias else None)


def product64(x: Tensor, linear: Linear) -> Tensor:
    wanted = x.double() @ linear.weight.double().t()
    return wanted if linear.bias is None else wanted + linear.bias.double()


def norm64(x: Tensor, norm: Norm) -> Tensor:
    """The normalised rows, rounded as the product reads them."""
    x64 = x.double()
    if norm.bias is not None:
        normed = F.layer_norm(x64, x.shape[-1:], norm.weight.double(), norm.bias.double(), norm.eps)
    else:
        normed = x64 * (x64.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    return normed.to(x.dtype).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_residual_and_bias_are_added(place: Place, tokens: int, shape: tuple[int, int], dtype: torch.dtype):
    linear = make_linear(place, *shape, dtype)
    x, out = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
    wanted = product64(x, linear) + out.double()
    place.settle()
    place.ops.linear(x, linear, residual=out, out=out)  # in place
    assert_close("linear", out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("norm_bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 16, 40, 130])
def test_norm_and_activation_are_fused(
    place: Place, tokens: int, norm_bias: bool, activation: str | None, dtype: torch.dtype
):
    inputs, outputs = 520, 136
    linear = make_linear(place, inputs, outputs, dtype)
    norm = Norm(
        place.normal(inputs, dtype=dtype), place.normal(inputs, dtype=dtype) if norm_bias else None, 1e-5
    )
    x, out = place.normal(tokens, inputs, dtype=dtype), place.poison(tokens, outputs, dtype=dtype)
    place.settle()
    place.ops.linear(x, linear, norm=norm, activation=activation, out=out)
    wanted = product64(norm64(x, norm), linear)
    if activation is not None:
        wanted = {"gelu": F.gelu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"), "relu": F.relu}[
            activation
        ](wanted)
    assert_close("linear", out, wanted)


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inner", [88, 5000, 11008])
@pytest.mark.parametrize("tokens", [1, 2, 5, 33, 100])
def test_swiglu_pairs_gate_and_up_rows(
    place: Place, tokens: int, inner: int, bias: bool, dtype: torch.dtype, activation: str
):
    linear = make_linear(place, 256, 2 * inner, dtype, bias)
    x, residual = place.normal(tokens, 256, dtype=dtype), place.normal(tokens, inner, dtype=dtype)
    out = place.poison(tokens, inner, dtype=dtype)
    place.settle()
    place.ops.linear(x, linear, activation=activation, residual=residual, out=out)
    both = product64(x, linear)
    assert_close("linear", out, GATES[activation](both[:, :inner]) * both[:, inner:] + residual.double())


@pytest.mark.gpu  # the CPU path rounds logits to 16 bits first
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("tokens", [1, 3, 20, 70, 600])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_float32(cuda_place: Place, tokens: int, dtype: torch.dtype, bias: bool):
    place = cuda_place
    linear = make_linear(place, 512, 1003, dtype, bias)  # GPT-J's and Phi's head has a bias
    x, out = place.normal(tokens, 512, dtype=dtype), place.poison(tokens, 1003, dtype=torch.float32)
    place.settle()
    place.ops.linear(x, linear, out=out)
    assert_close("logits", out, product64(x, linear))


def test_rows_may_lie_apart(place: Place):
    dtype = torch.float32 if place.device.type == "cpu" else torch.float16
    linear = make_linear(place, 64, 48, dtype)
    wide, out = place.normal(5, 200, dtype=dtype), place.poison(5, 80, dtype=dtype)
    place.settle()
    place.ops.linear(wide[:, 8:72], linear, out=out[:, :48])
    assert_close("linear", out[:, :48], product64(wide[:, 8:72], linear))
    assert torch.isnan(out[:, 48:]).all()


def rotate64(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Su et al. 2021 by complex multiplication: x (T, heads, D) float64."""
    size, out = rope.size, x.clone()
    angle = torch.complex(rope.cos.double().cpu(), rope.sin.double().cpu())[positions.long().cpu()][
        :, None, :
    ]
    part = x[..., :size]
    pairs = part.unflatten(-1, (-1, 2)) if rope.interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    out[..., :size] = turned.flatten(-2) if rope.interleaved else turned.transpose(-1, -2).flatten(-2)
    return out


@dataclass
class HeadsCase:
    """A projection to queries, keys and values; one token of the batch has no slot of the cache."""

    heads: Heads
    linear: Linear
    batch: Batch
    slots: Tensor  # as they were before one was taken away
    unwritten: int
    cache: CacheLayer
    x: Tensor

    def project(self, place: Place) -> Tensor:
        out = place.poison(self.x.shape[0], self.heads.qkv_size, dtype=self.x.dtype)
        place.settle()
        place.ops.project_qkv(self.x, self.linear, None, self.heads, self.batch, self.cache, out=out)
        return out

    def wanted(self) -> Tensor:
        wanted = product64(self.x, self.linear).cpu().unflatten(1, (-1, self.heads.head_size))
        if self.heads.rope is not None:
            count = self.heads.num_heads + self.heads.num_kv_heads
            turned = rotate64(wanted[:, :count], self.heads.rope, self.batch.positions)
            wanted = torch.cat([turned, wanted[:, count:]], dim=1)
        return wanted.flatten(1)


def make_heads(
    place: Place, tokens: int, inputs: int, heads: tuple[int, int, int, int, bool], dtype: torch.dtype
) -> HeadsCase:
    """heads: query heads, kv heads, head size, rotary size, interleaved. The cache is all NaN."""
    num_heads, num_kv_heads, size, rotary, interleaved = heads
    rope = None
    if rotary:
        angles = torch.rand(max(300, tokens + 3), rotary // 2, generator=place.generator) * 6.28
        rope = Rope(angles.cos().to(place.device), angles.sin().to(place.device), interleaved)
    shape = Heads(num_heads, num_kv_heads, size, size**-0.5, rope)
    linear = make_linear(place, inputs, shape.qkv_size, dtype)
    batch = make_batch(place, [tokens + 3], [tokens], 16)
    unwritten = tokens // 2
    slots = batch.kv_slots.clone()
    batch.kv_slots[unwritten] = -1
    cache = CacheLayer(place.poison(batch.block_tables.numel(), 2, num_kv_heads, 16, size, dtype=dtype))
    x = place.normal(tokens, inputs, dtype=dtype)
    return HeadsCase(shape, linear, batch, slots, unwritten, cache, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads",
    [
        (4, 4, 64, 0, False),
        (8, 2, 128, 128, False),
        (4, 2, 80, 32, False),
        (2, 2, 256, 64, True),
        (3, 3, 12, 4, True),
        (2, 1, 96, 24, False),
        (56, 8, 128, 128, False),
    ],
)
@pytest.mark.parametrize("tokens", [1, 5, 16, 40, 90, 600])
def test_queries_and_keys_are_rotated_and_kept(
    place: Place, tokens: int, heads: tuple[int, int, int, int, bool], dtype: torch.dtype
):
    case = make_heads(place, tokens, 64, heads, dtype)
    cache, slots, unwritten, out = case.cache, case.slots, case.unwritten, case.project(place)
    size, num_heads = case.heads.head_size, case.heads.num_heads
    assert_close("linear", out, case.wanted())
    written = torch.zeros(cache.blocks.shape[0], 16, dtype=torch.bool)
    for token in range(tokens):
        block, offset = divmod(int(slots[token]), 16)
        if token == unwritten:
            continue
        written[block, offset] = True
        held = cache.blocks[block, :, :, offset].flatten(0, 1)
        assert torch.equal(held, out[token].unflatten(0, (-1, size))[num_heads:])
    assert torch.isnan(cache.blocks.transpose(1, 3)[~written]).all()


def test_a_linear_of_another_width_is_refused_by_name(place: Place):
    linear = make_linear(place, 64, 32, torch.float32)
    x = place.normal(2, 64, dtype=torch.float32)
    for activation, columns, wanted in ((None, 48, 32), ("swiglu", 32, 16)):
        out = place.poison(2, columns, dtype=torch.float32)
        with pytest.raises(
            ShapeError, match=f"^linear: out has {columns} columns; 32 weight rows give {wanted}$"
        ):
            place.ops.linear(x, linear, activation=activation, out=out)
        assert torch.isnan(out).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("split", [1, 2, 3, 7])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_gemm_mma_adds_the_parts_of_a_split(
    cuda_place: Place, monkeypatch: pytest.MonkeyPatch, tokens: int, split: int, dtype: torch.dtype
):
    place, plan = cuda_place, Plan("gemm_mma", "forced", split=split)
    monkeypatch.setattr(place.ops.gpu, "choose_gemm", lambda gemm: plan)
    linear = make_linear(place, 8200, 264, dtype)
    x, residual = place.normal(tokens, 8200, dtype=dtype), place.normal(tokens, 264, dtype=dtype)
    out = place.poison(tokens, 264, dtype=dtype)
    place.settle()
    for _ in range(2):  # the second launch finds the counters as the first one left them
        out.fill_(float("nan"))
        place.ops.linear(x, linear, residual=residual, out=out)
        assert_close("linear", out, product64(x, linear) + residual.double())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "plan",
    [
        Plan("gemv", "has 1 and 2 tokens"),
        Plan("gemm_mma", "has a split from 1 on", split=0),
        Plan("gemm_sm90_data_parallel", "has 32 and 64", 96, 8),
        Plan("gemm_sm90_split_k", "has 16, 32 and 64", 128, 48, 1),
        Plan("gemm_sm90_split_k", "has splits up to 3", 128, 16, 4),
        Plan("gemm_sm90_stream_k", "has 96 for SwiGLU only", 256, 96, clusters=1),
    ],
    ids=lambda plan: f"{plan.kernel} {plan.why}",
)
def test_a_launcher_refuses_a_plan_that_it_has_no_instance_of(
    cuda_place: Place, monkeypatch: pytest.MonkeyPatch, plan: Plan
):
    from tridecode.kernels.library import KernelError

    place = cuda_place
    monkeypatch.setattr(place.ops.gpu, "choose_gemm", lambda gemm: plan)
    linear = make_linear(place, 1024, 256, torch.float16)
    x, out = place.normal(3, 1024, dtype=torch.float16), place.poison(3, 256, dtype=torch.float16)
    with pytest.raises(KernelError, match=f"^{plan.kernel}: "):
        place.ops.linear(x, linear, out=out)
    torch.cuda.synchronize()
    assert torch.isnan(out).all()
