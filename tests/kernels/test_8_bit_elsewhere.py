"""W8A8 on GPUs other than Hopper's, by the kernels that they take, on whatever card is here: against float64
of the weight's and the rounded rows' values."""

from __future__ import annotations

import zlib

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.conftest import Place
from tests.kernels.test_linear import make_heads, norm64, rotate64
from tests.kernels.test_w8a8 import assert_product, make_linear, product64
from tridecode.kernels.gemm.plan import Plan
from tridecode.kernels.gemm.table import choose
from tridecode.kernels.library import KernelError
from tridecode.kernels.operands import Linear, Norm

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]
CAPABILITIES = {"int8": 80, "fp8": 89}
#: (inputs, outputs)
SHAPES = [(128, 128), (144, 272), (1040, 1008), (4096, 512), (512, 9216)]


@pytest.fixture
def ops(request: pytest.FixtureRequest):
    """The operations of a card of compute capability 8.0 or, for fp8, 8.9."""
    from tridecode.kernels.cuda import Cuda

    made = Cuda(torch.device("cuda", 0))
    format = request.node.callspec.params["format"]
    if torch.cuda.get_device_capability() < divmod(CAPABILITIES[format], 10):
        pytest.skip(f"{format} needs compute capability {CAPABILITIES[format] / 10}")
    gpu = made.gpu
    gpu.capability = CAPABILITIES[format]
    device = gpu.gemm_device._replace(capability=gpu.capability)
    gpu.choose_gemm = lambda gemm: choose(gemm, device)
    return made


@pytest.fixture
def place(ops, request: pytest.FixtureRequest) -> Place:
    generator = torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))
    return Place(ops, torch.device("cuda", 0), generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", CAPABILITIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64, 65, 200, 4000])
def test_bias_and_residual_are_added_in_place(
    place: Place, tokens: int, shape, format: str, dtype: torch.dtype
):
    linear = make_linear(place, *shape, dtype, format)
    x, out = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
    again = out.clone()
    wanted = product64(x, linear) + out.double()
    place.settle()
    for each in (out, again):  # the second launch finds the counters as the first one left them
        place.ops.linear(x, linear, residual=each, out=each)
    assert_product(format, shape[0], out, wanted)
    assert torch.equal(out, again)


@pytest.mark.parametrize("format", CAPABILITIES)
@pytest.mark.parametrize("split", [1, 2, 7])
def test_parts_of_a_split_are_added(place: Place, split: int, format: str):
    linear = make_linear(place, 4096, 512, torch.float16, format)
    x, out = place.normal(33, 4096, dtype=torch.float16), place.poison(33, 512, dtype=torch.float16)
    place.ops.gpu.choose_gemm = lambda gemm: Plan("gemm_mma_tiles_8bit", "forced", 64, 64, split)
    place.settle()
    place.ops.linear(x, linear, out=out)
    assert_product(format, 4096, out, product64(x, linear))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", CAPABILITIES)
@pytest.mark.parametrize("activation", ["swiglu", "gelu_tanh", "geglu"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [3, 64, 300])
def test_norm_and_activation(
    place: Place, tokens: int, normed: bool, activation: str, format: str, dtype: torch.dtype
):
    inner, gated = 1040, activation != "gelu_tanh"
    linear = make_linear(place, 512, inner * (1 + gated), dtype, format)
    x, out = place.normal(tokens, 512, dtype=dtype), place.poison(tokens, inner, dtype=dtype)
    norm = Norm(place.normal(512, dtype=dtype), place.normal(512, dtype=dtype), 1e-5) if normed else None
    place.settle()
    place.ops.linear(x, linear, norm=norm, activation=activation, out=out)
    read = x if norm is None else norm64(x, norm).to(dtype)
    wanted = product64(read, linear)
    if not gated:
        wanted = F.gelu(wanted, approximate="tanh")
    else:
        gate, up = wanted.chunk(2, dim=1)
        wanted = (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up
    error = (out.double() - wanted).norm() / wanted.norm()
    # a row of x that rounds at a tie may round the other way where its norm differs in the last bit
    assert error < (4 if normed else 2) * torch.finfo(dtype).eps + 0.003


@pytest.mark.parametrize("format", CAPABILITIES)
@pytest.mark.parametrize("tokens", [20, 100])
def test_logits_are_float32(place: Place, tokens: int, format: str):
    linear = make_linear(place, 512, 1008, torch.bfloat16, format)
    x = place.normal(tokens, 512, dtype=torch.bfloat16)
    out = place.poison(tokens, 1008, dtype=torch.float32)
    place.settle()
    place.ops.linear(x, linear, out=out)
    assert_product(format, 512, out, product64(x, linear))


@pytest.mark.parametrize("format", CAPABILITIES)
@pytest.mark.parametrize("tokens", [5, 90])
def test_queries_and_keys_are_rotated_and_kept(place: Place, tokens: int, format: str):
    case = make_heads(place, tokens, 256, (8, 2, 128, 128, False), torch.float16)
    linear = make_linear(place, 256, 12 * 128, torch.float16, format)
    case.linear = linear
    out = case.project(place)
    wanted = product64(case.x, linear).cpu().unflatten(1, (-1, 128))
    assert case.heads.rope is not None
    turned = rotate64(wanted[:, :10], case.heads.rope, case.batch.positions)
    wanted = torch.cat([turned, wanted[:, 10:]], dim=1).flatten(1)
    assert_product(format, 256, out, wanted.to(out.device))
    for token in set(range(tokens)) - {case.unwritten}:
        block, offset = divmod(int(case.slots[token]), 16)
        held = case.cache.blocks[block, :, :, offset].flatten(0, 1)
        assert torch.equal(held, out[token].unflatten(0, (-1, 128))[8:])


@pytest.mark.parametrize("format", ["int8"])
def test_a_plan_without_an_instance_is_refused(place: Place, format: str):
    linear = make_linear(place, 1024, 256, torch.float16, format)
    assert isinstance(linear, Linear)
    place.ops.gpu.choose_gemm = lambda gemm: Plan("gemm_mma_tiles_8bit", "forced", 64, 64, 9)
    x, out = place.normal(40, 1024, dtype=torch.float16), place.poison(40, 256, dtype=torch.float16)
    with pytest.raises(KernelError, match="^gemm_mma_tiles_8bit: "):
        place.ops.linear(x, linear, out=out)
    torch.cuda.synchronize()
    assert torch.isnan(out).all()
