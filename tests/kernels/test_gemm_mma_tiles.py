"""gemm_mma_tiles, the products of cards before compute capability 9.0, forced on whatever card is here."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import Place
from tests.kernels.numeric import GATES, assert_close
from tests.kernels.test_linear import make_heads, make_linear, product64
from tridecode.kernels.gemm.plan import Gemm, Plan
from tridecode.kernels.library import KernelError

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture
def launched(cuda_place: Place, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The splits that were launched; `split` products take as many parts as the list begins with."""
    splits: list[int] = []
    monkeypatch.setattr(cuda_place.ops.gpu, "choose_gemm", lambda gemm: forced(gemm, splits))
    return splits


def forced(gemm: Gemm, splits: list[int]) -> Plan:
    split = min(splits[0], -(-gemm.inputs // 64))
    tile_tokens = next(size for size in (16, 32, 64) if size >= gemm.tokens)
    splits.append(split)
    return Plan("gemm_mma_tiles", "forced", 64, tile_tokens, split, fuses_heads=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 8), (72, 130), (1000, 257), (4096, 96), (8200, 264)])
@pytest.mark.parametrize("split", [1, 2, 7])
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 33, 64])
def test_parts_of_a_split_bias_and_residual_are_added(
    cuda_place: Place,
    launched: list[int],
    tokens: int,
    split: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
):
    place = cuda_place
    launched.append(split)
    linear = make_linear(place, *shape, dtype)
    x, residual = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
    out, again = (place.poison(tokens, shape[1], dtype=dtype) for _ in range(2))
    place.settle()
    for each in (out, again):  # the second launch finds the counters as the first one left them
        place.ops.linear(x, linear, residual=residual, out=each)
    assert_close("linear", out, product64(x, linear) + residual.double())
    assert torch.equal(out, again)
    assert len(launched) == 3


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inner", [88, 1001, 5000])
@pytest.mark.parametrize("tokens", [3, 20, 64])
def test_swiglu_pairs_gate_and_up_rows(
    cuda_place: Place,
    launched: list[int],
    tokens: int,
    inner: int,
    bias: bool,
    dtype: torch.dtype,
    activation: str,
):
    place = cuda_place
    launched.append(2)
    linear = make_linear(place, 520, 2 * inner, dtype, bias)
    x, out = place.normal(tokens, 520, dtype=dtype), place.poison(tokens, inner, dtype=dtype)
    place.settle()
    place.ops.linear(x, linear, activation=activation, out=out)
    both = product64(x, linear)
    assert_close("linear", out, GATES[activation](both[:, :inner]) * both[:, inner:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads",
    [(4, 4, 64, 0, False), (8, 2, 128, 128, False), (4, 2, 80, 32, False), (3, 3, 12, 4, True)],
)
@pytest.mark.parametrize("tokens", [5, 16, 40, 64])
def test_queries_and_keys_are_rotated_and_kept(
    cuda_place: Place,
    launched: list[int],
    tokens: int,
    heads: tuple[int, int, int, int, bool],
    dtype: torch.dtype,
):
    launched.append(3)
    case = make_heads(cuda_place, tokens, 200, heads, dtype)
    out = case.project(cuda_place)
    assert_close("linear", out, case.wanted())
    written = torch.zeros(case.cache.blocks.shape[0], 16, dtype=torch.bool)
    for token in set(range(tokens)) - {case.unwritten}:
        block, offset = divmod(int(case.slots[token]), 16)
        written[block, offset] = True
        held = case.cache.blocks[block, :, :, offset].flatten(0, 1)
        assert torch.equal(held, out[token].unflatten(0, (-1, case.heads.head_size))[case.heads.num_heads :])
    assert torch.isnan(case.cache.blocks.transpose(1, 3)[~written]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_float32(cuda_place: Place, launched: list[int], dtype: torch.dtype):
    place = cuda_place
    launched.append(1)
    linear = make_linear(place, 512, 1003, dtype, bias=False)
    x, out = place.normal(20, 512, dtype=dtype), place.poison(20, 1003, dtype=torch.float32)
    place.settle()
    place.ops.linear(x, linear, out=out)
    assert_close("logits", out, product64(x, linear))


@pytest.mark.parametrize(
    ("tile_tokens", "split"), [(16, 1), (48, 1), (64, 0), (64, 17)], ids=["few", "size", "none", "empty"]
)
def test_a_plan_without_an_instance_is_refused(
    cuda_place: Place, monkeypatch: pytest.MonkeyPatch, tile_tokens: int, split: int
):
    place, plan = cuda_place, Plan("gemm_mma_tiles", "forced", 64, tile_tokens, split)
    monkeypatch.setattr(place.ops.gpu, "choose_gemm", lambda gemm: plan)
    linear = make_linear(place, 1024, 256, torch.float16)
    x, out = place.normal(40, 1024, dtype=torch.float16), place.poison(40, 256, dtype=torch.float16)
    with pytest.raises(KernelError, match="^gemm_mma_tiles: "):
        place.ops.linear(x, linear, out=out)
    torch.cuda.synchronize()
    assert torch.isnan(out).all()
