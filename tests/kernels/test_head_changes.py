"""Clamp and norms of heads between the QKV product and the rotation, against float64; caches of 16 and 8
bits. Sandwich norms, gated GELUs, soft caps of logits and factors of embeddings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.batches import make_batch, make_cache, make_heads
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.kernels.test_attention_8bit import empty_cache
from tests.kernels.test_linear import make_linear, norm64, product64
from tests.kernels.test_unfinished_rows import assert_written, contents, rotated64
from tridecode.kernels.checks import ShapeError
from tridecode.kernels.operands import Heads, Norm, Rope

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK = 32  # as test_unfinished_rows
#: (query heads, kv heads, head size), rotated dims, interleaved
SHAPES = [
    ((8, 2, 128), 128, False),
    ((4, 4, 64), 16, False),
    ((4, 2, 256), 256, False),
    ((6, 3, 80), 32, False),
    ((5, 1, 160), 40, False),
    ((4, 4, 128), 64, True),
    ((8, 8, 64), 0, False),
    ((3, 1, 20), 6, True),
]
#: norm of heads: none, shared by heads, or each head's own
NORMS = ["rms", "layer", "own", "clamp", "clamp and rms"]


def changed_heads(place: Place, shape, kind: str, dtype: torch.dtype) -> Heads:
    heads = make_heads(place, *shape)
    if "clamp" in kind:
        heads = replace(heads, qkv_limit=0.75)
    if kind == "clamp":
        return heads
    norms = []
    for count in shape[:2]:
        size = (count, shape[2]) if kind == "own" else (shape[2],)
        bias = None if "rms" in kind else place.normal(*size, dtype=dtype)
        norms.append(Norm(place.normal(*size, dtype=dtype) + 1, bias, 1e-5 if bias is None else 1e-3))
    return replace(heads, query_norm=norms[0], key_norm=norms[1])


def changed64(x: Tensor, norm: Norm | None) -> Tensor:
    """x (T, H, D) float64."""
    if norm is None:
        return x
    if norm.bias is not None:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double().cpu()
    return x if norm.bias is None else x + norm.bias.double().cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("shape", "turned", "interleaved"), SHAPES)
def test_heads_are_changed_rotated_and_cached(
    place: Place, shape, turned, interleaved, kind: str, dtype: torch.dtype, format: str
):
    heads = changed_heads(place, shape, kind, dtype)
    contexts, queries = [5, 40, 0, 77], [1, 1, 1, 19]
    if turned:
        angles = torch.rand(max(contexts), turned // 2, generator=place.generator) * 7
        rope = Rope(angles.cos().to(place.device), angles.sin().to(place.device), interleaved)
        heads = replace(heads, rope=rope)
    batch = make_batch(place, contexts, queries, BLOCK)
    if format == "auto":
        cache = make_cache(place, batch, heads, BLOCK, dtype)
    else:
        cache = empty_cache(place, batch, heads, BLOCK, format)
    qkv = place.normal(sum(queries), heads.qkv_size, dtype=dtype)
    bare = qkv.double().cpu().unflatten(1, (-1, heads.head_size))
    place.settle()
    place.ops.finish_qkv(qkv, heads, batch, cache)

    if heads.qkv_limit:
        bare = bare.clamp(-heads.qkv_limit, heads.qkv_limit)
    q, k, v = bare.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    positions = batch.positions.cpu().long()
    q = rotated64(changed64(q, heads.query_norm), positions, heads.rope)
    k = rotated64(changed64(k, heads.key_norm), positions, heads.rope)
    queried = heads.num_heads * heads.head_size
    assert_close("linear", qkv[:, :queried], q.flatten(1))
    slots, wanted = batch.kv_slots.cpu().long(), torch.stack([k, v], 1)
    written = slots >= 0
    held = contents(cache)[slots[written] // BLOCK, :, :, slots[written] % BLOCK]
    if format == "auto":
        assert_close("linear", held.to(dtype), wanted[written])
    else:
        assert_written(contents(cache), slots, wanted, 4 * torch.finfo(dtype).eps, format)
    # qkv has what the cache has
    assert_close("norm", qkv[written.to(place.device), queried:], held.flatten(1))


def test_numbers_that_are_not_finite_stay_in_their_head(place: Place):
    heads = changed_heads(place, (4, 2, 64), "clamp and rms", torch.float32)
    batch = make_batch(place, [3, 9], [1, 1], BLOCK)
    cache = make_cache(place, batch, heads, BLOCK, torch.float32)
    qkv = place.normal(2, heads.qkv_size, dtype=torch.float32)
    qkv[0, 64 + 3], qkv[1, 6 * 64 + 1] = torch.nan, torch.inf
    place.settle()
    place.ops.finish_qkv(qkv, heads, batch, cache)
    broken = (~qkv.isfinite()).unflatten(1, (-1, 64)).any(-1).nonzero().tolist()
    assert broken == [[0, 1]]  # infinity is clamped


@pytest.mark.gpu
def test_a_norm_of_other_heads_is_refused(cuda_place: Place):
    place = cuda_place
    heads = replace(
        make_heads(place, 4, 2, 64), query_norm=Norm(place.normal(32, dtype=torch.float16), None, 1e-5)
    )
    batch = make_batch(place, [3], [1], BLOCK)
    cache = make_cache(place, batch, heads, BLOCK, torch.float16)
    qkv = place.normal(1, heads.qkv_size, dtype=torch.float16)
    with pytest.raises(ShapeError, match=r"query_norm is \(32,\); wanted \(64,\)"):
        place.ops.finish_qkv(qkv, heads, batch, cache)


def make_norm(place: Place, columns: int, dtype: torch.dtype, bias: bool) -> Norm:
    return Norm(
        place.normal(columns, dtype=dtype), place.normal(columns, dtype=dtype) if bias else None, 1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", ["rms rms", "layer rms", "none layer", "rms none", "none none"])
@pytest.mark.parametrize("columns", [8, 111, 768, 3584, 8200])
@pytest.mark.parametrize("tokens", [1, 19, 257])
def test_normed_rows_are_added_and_normed_again(
    place: Place, tokens: int, columns: int, kinds: str, dtype: torch.dtype
):
    norm, next_norm = (
        None if kind == "none" else make_norm(place, columns, dtype, kind == "layer")
        for kind in kinds.split()
    )
    x = place.normal(tokens, columns, dtype=dtype, scale=3.0) + 2.0
    residual = place.normal(tokens, columns, dtype=dtype, scale=5.0)
    added = x.double() if norm is None else norm64(x, norm)
    wanted = residual.double() + added
    place.settle()
    if next_norm is None:
        before = x.clone()
        place.ops.add_normed(residual, x, norm)
        assert torch.equal(x, before)
    else:
        place.ops.add_normed(residual, x, norm, next_norm, normed=x)
        assert_close("norm", x, norm64(residual, next_norm))
    assert_close("norm", residual, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["geglu_tanh", "geglu", "silu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inner", "tokens"), [(64, 1), (52, 3), (200, 19), (1024, 300)])
def test_activations_behind_a_product(
    place: Place, tokens: int, inner: int, bias: bool, activation: str, dtype: torch.dtype
):
    gated = activation != "silu"
    linear = make_linear(place, 256, 2 * inner if gated else inner, dtype, bias)
    x, out = place.normal(tokens, 256, dtype=dtype), place.poison(tokens, inner, dtype=dtype)
    residual = place.normal(tokens, inner, dtype=dtype)
    norm = make_norm(place, 256, dtype, bias)
    place.settle()
    place.ops.linear(x, linear, norm=norm, activation=activation, residual=residual, out=out)
    product = product64(norm64(x, norm), linear)
    if gated:
        gate, up = product.chunk(2, dim=-1)
        kind = "tanh" if activation == "geglu_tanh" else "none"
        wanted = F.gelu(gate, approximate=kind) * up
    else:
        wanted = F.silu(product)
    assert_close("two products", out, wanted + residual.double())


@pytest.mark.parametrize("shape", [(1, 4), (3, 1001), (64, 32000)])
@pytest.mark.parametrize("cap", [30.0, 0.5])
def test_logits_are_capped(place: Place, shape: tuple[int, int], cap: float):
    x = place.normal(*shape, dtype=torch.float32, scale=40.0)
    wanted = cap * torch.tanh(x.double() / cap)
    place.settle()
    place.ops.soft_cap(x, cap)
    assert_close("norm", x, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [19, 256])
def test_embeddings_have_a_factor(place: Place, columns: int, dtype: torch.dtype):
    table, places = place.normal(48, columns, dtype=dtype), place.normal(9, columns, dtype=dtype)
    ids, positions = place.ints([16, 47, 0]), place.ints([8, 0, 1])
    out = place.poison(3, columns, dtype=dtype)
    place.settle()
    place.ops.embed(ids, table, factor=7.25, out=out)
    assert_close("embed", out, table[ids.long()].double() * 7.25)
    place.ops.embed(ids, table, positions=positions, position_table=places, factor=7.25, out=out)
    wanted = (table[ids.long()].double() + places[positions.long()].double()) * 7.25
    assert_close("norm", out, wanted)
