"""Projections to queries, keys and values whose own epilogue rounds the latter two for an 8-bit cache, on a
GPU of compute capability 9.0.

Compared with the same kernel over a cache of the dtype, whose numbers test_gemm_sm90.py, test_w8a8.py,
test_two_parts.py and the tests of packed weights hold against float64: what is stored is, bit for bit, what
the definition of the format in numpy makes of them.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels import test_gemm_sm90, test_packed_linear, test_two_parts, test_w8a8
from tests.kernels.conftest import Place
from tests.kernels.test_linear import HeadsCase, make_heads
from tests.rounded_cache import stored
from tridecode.kernels.formats.kv_rounding import CACHE_DTYPES, expanded
from tridecode.kernels.gemm import table_sm90
from tridecode.kernels.gemm.packed_table import choose_packed
from tridecode.kernels.gemm.plan import Gemm, Plan
from tridecode.kernels.gemm.table import choose
from tridecode.kernels.gemm.table_sm90 import ROUNDING_KERNELS
from tridecode.kernels.operands import CacheLayer, Linear

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("format", ["int8", "fp8"])
INPUTS = 1024
HEADS = [  # heads, kv heads, head size, rotary size, interleaved
    (4, 4, 64, 0, False),
    (9, 3, 64, 64, False),
    (3, 5, 128, 0, False),
    (32, 8, 128, 128, False),
]
#: the kernel, tokens, and the split of split-K; 0: stream-K
WAYS = [("16 bit", tokens, 0) for tokens in (1, 17, 64)]
WAYS += [("16 bit", tokens, split) for tokens in (1, 17, 64) for split in (1, 2, 3)]
WAYS += [(kind, tokens, 0) for kind in ("int8", "fp8") for tokens in (1, 17, 64)]
WAYS += [(kind, tokens, split) for kind in ("int8", "fp8") for tokens in (16, 17, 64) for split in (1, 2, 3)]
WAYS += [("fp8_blocks", tokens, 0) for tokens in (17, 64)]
WAYS += [("two parts", tokens, split) for tokens, split in [(1, 0), (64, 0), (9, 2), (64, 3)]]
WAYS += [("packed", tokens, 0) for tokens in (5, 40, 64)]


@pytest.fixture(scope="module")
def ops():
    from tridecode.kernels.cuda import Cuda

    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return Cuda(device)


@pytest.fixture
def place(ops, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    generator = torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))
    monkeypatch.setattr(ops.gpu, "choose_gemm", lambda gemm: choose(gemm, ops.gpu.gemm_device))
    monkeypatch.setattr(
        ops.gpu, "choose_packed", lambda gemm, inputs: choose_packed(gemm, inputs, ops.gpu.gemm_device)
    )
    return Place(ops, torch.device("cuda", 0), generator)


def linear_of(place: Place, kind: str, split: int, outputs: int) -> Linear:
    """A projection whose product takes the kernel of that kind, in bfloat16."""
    dtype = torch.bfloat16
    if kind == "16 bit":
        test_gemm_sm90.force(place, split)
        return test_gemm_sm90.make_linear(place, INPUTS, outputs, dtype)
    if kind == "two parts":
        test_two_parts.force(place, split)
        return test_two_parts.make_linear(place, INPUTS, outputs, dtype)
    if kind == "packed":
        return test_packed_linear.Case(place, ("fp8", 0, False), INPUTS, outputs, dtype).linear
    test_w8a8.force(place, split)
    return test_w8a8.make_linear(place, INPUTS, outputs, dtype, kind)


def watch(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans of the products that follow."""
    plans: list[Plan] = []
    gemm, packed = place.ops.gpu.choose_gemm, place.ops.gpu.choose_packed

    def chosen(product: Gemm) -> Plan:
        plans.append(gemm(product))
        return plans[-1]

    def chosen_packed(product: Gemm, inputs: int) -> Plan:
        plans.append(packed(product, inputs))
        return plans[-1]

    monkeypatch.setattr(place.ops.gpu, "choose_gemm", chosen)
    monkeypatch.setattr(place.ops.gpu, "choose_packed", chosen_packed)
    return plans


def empty_cache(case: HeadsCase, format: str) -> CacheLayer:
    """Every place is poisoned, as in test_attention_8bit.py."""
    shape, device = case.cache.blocks.shape, case.x.device
    blocks = torch.full(shape, 0x7F if format == "fp8" else -128, dtype=torch.int8, device=device)
    scales = torch.full(shape[:-1], float("nan"), device=device)
    return CacheLayer(blocks.view(CACHE_DTYPES[format]), scales)


@FORMATS
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("kind", "tokens", "split"), WAYS)
def test_keys_and_values_are_rounded_as_the_format_says(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int, split: int, heads, format: str
):
    monkeypatch.setattr(table_sm90, "ROUNDED_TOKENS", 64)  # the most that the kernels can
    case = make_heads(place, tokens, INPUTS, heads, torch.bfloat16)
    case.linear = linear_of(place, kind, split, case.heads.qkv_size)
    case.x *= (10 ** (torch.rand(tokens, 1, generator=place.generator) * 4 - 2)).bfloat16().to(place.device)
    exact = case.project(place)
    plans = watch(place, monkeypatch)
    # not by another launch behind the product
    monkeypatch.setattr(place.ops.gpu.library, "rotate_and_cache", None)
    cache = empty_cache(case, format)
    out = replace(case, cache=cache).project(place)
    assert plans[-1].kernel.startswith(ROUNDING_KERNELS)
    compare(case, cache, exact, out, format)


def compare(case: HeadsCase, cache: CacheLayer, exact: Tensor, out: Tensor, format: str) -> None:
    """exact: what the same product writes for a cache of its dtype. One token has no place in the cache."""
    size, queries, kv_heads = case.heads.head_size, case.heads.num_heads, case.heads.num_kv_heads
    width = queries * size
    assert torch.isfinite(exact).all() and torch.equal(out[:, :width], exact[:, :width])
    kv = exact[:, width:].unflatten(1, (2, kv_heads, size)).float().cpu()
    numbers, scales = stored(kv.numpy(), format)

    rows = torch.arange(out.shape[0]) != case.unwritten
    slots = case.slots.cpu().long()
    assert cache.scales is not None
    values = cache.tensors[0].cpu().permute(0, 3, 1, 2, 4).flatten(0, 1).view(CACHE_DTYPES[format])
    held = cache.scales.cpu().permute(0, 3, 1, 2).flatten(0, 1)
    assert np.array_equal(held[slots[rows]].numpy(), scales[rows.numpy(), ..., 0])
    assert np.array_equal(values[slots[rows]].float().numpy(), numbers[rows.numpy()])
    back = expanded(
        torch.from_numpy(numbers).to(CACHE_DTYPES[format]), torch.from_numpy(scales[..., 0]), out.dtype
    )
    assert torch.equal(out[:, width:].unflatten(1, (2, kv_heads, size)).cpu(), back)
    others = torch.ones(held.shape[0], dtype=torch.bool)
    others[slots[rows]] = False
    assert torch.isnan(held[others]).all()


@FORMATS
@pytest.mark.parametrize(
    ("heads", "tokens"),
    [
        ((3, 3, 80, 0, False), 3),
        ((3, 1, 256, 256, False), 100),
        ((4, 2, 128, 64, False), 3),
        ((32, 8, 128, 128, False), 65),
        ((32, 8, 128, 128, False), 300),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["int8", "16 bit", "packed"])
def test_other_heads_and_more_tokens_are_rounded_behind_the_product(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int, heads, format: str
):
    case = make_heads(place, tokens, INPUTS, heads, torch.bfloat16)
    case.linear = linear_of(place, kind, 0, case.heads.qkv_size)
    monkeypatch.setattr(place.ops.gpu, "choose_gemm", lambda gemm: choose(gemm, place.ops.gpu.gemm_device))
    finished = []
    library = place.ops.gpu.library
    behind = library.rotate_and_cache

    def run(stream: int, **fields: float) -> None:
        finished.append(fields)
        behind(stream, **fields)

    monkeypatch.setattr(library, "rotate_and_cache", run)
    cache = empty_cache(case, format)
    out = replace(case, cache=cache).project(place)
    assert len(finished) == 1
    size, width = case.heads.head_size, case.heads.num_heads * case.heads.head_size
    rows = torch.arange(tokens) != case.unwritten
    slots = case.slots.cpu().long()[rows]
    assert cache.scales is not None
    values = cache.tensors[0].cpu().permute(0, 3, 1, 2, 4).flatten(0, 1).view(CACHE_DTYPES[format])[slots]
    scales = cache.scales.cpu().permute(0, 3, 1, 2).flatten(0, 1)[slots]
    kept = out[:, width:].unflatten(1, (2, -1, size)).cpu()[rows]
    assert torch.equal(expanded(values, scales, out.dtype), kept)


@FORMATS
@pytest.mark.parametrize("heads", [*HEADS, (5, 3, 128, 128, False)], ids=str)
@pytest.mark.parametrize("tokens", [3, 200, 600])
def test_the_launch_behind_a_product_rounds_as_the_format_says(place: Place, tokens: int, heads, format: str):
    """Magnitudes from 1e-30 to 1e30; test_linear.py holds the rotation against float64."""
    case = make_heads(place, tokens, 64, heads, torch.bfloat16)
    magnitudes = 10 ** (torch.rand(tokens, 1, generator=place.generator) * 60 - 30)
    qkv = place.normal(tokens, case.heads.qkv_size, dtype=torch.bfloat16) * magnitudes.bfloat16().to(
        place.device
    )
    exact, out, cache = qkv.clone(), qkv.clone(), empty_cache(case, format)
    place.settle()
    place.ops.finish_qkv(exact, case.heads, case.batch, case.cache)
    place.ops.finish_qkv(out, case.heads, case.batch, cache)
    compare(case, cache, exact, out, format)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@FORMATS
def test_a_head_that_is_not_finite_stays_so_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch, format: str, bad: float
):
    """One weight makes a dim of a key of every token infinite or NaN."""
    heads, tokens = (4, 2, 128, 128, False), 40
    case = make_heads(place, tokens, INPUTS, heads, torch.bfloat16)
    case.linear = linear_of(place, "16 bit", 2, case.heads.qkv_size)
    assert isinstance(case.linear.weight, Tensor)
    case.linear.weight[5 * 128 + 7, 3] = bad  # of the second key
    cache = empty_cache(case, format)
    out = replace(case, cache=cache).project(place)
    rows = torch.arange(tokens) != case.unwritten
    assert cache.scales is not None
    scales = cache.scales.cpu().permute(0, 3, 1, 2).flatten(0, 1)[case.slots.cpu().long()[rows]]
    assert torch.isnan(scales[:, 0, 1]).all() and torch.isfinite(scales[:, 1]).all()
    assert torch.isfinite(scales[:, 0, 0]).all()
    kv = out[:, 4 * 128 :].unflatten(1, (2, 2, 128))
    assert torch.isnan(kv[:, 0, 1]).all() and torch.isfinite(kv[:, 1]).all()
