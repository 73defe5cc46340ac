"""All layers in one launch against the reference operations in float32, and against the operations one by
one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.batches import make_batch, make_heads
from tests.kernels.conftest import Place
from tests.kernels.test_graphs import capture
from tridecode.kernels.cuda import MAX_LAYER_ROWS
from tridecode.kernels.ops import Batch, CacheLayer, DecoderLayer, Heads, Linear, Norm, Rope
from tridecode.kernels.reference import Reference

pytestmark = pytest.mark.gpu

BLOCK = 16
#: hidden, heads, head size, inner, alibi
SHAPES = {
    "bloom": (512, 8, 64, 2048, True),
    "gpt": (768, 12, 64, 3072, False),
    "heads of 128": (1024, 8, 128, 4096, True),
    "one block has all": (64, 1, 64, 192, True),
    "the most inputs": (2048, 16, 128, 8192, True),
}
ACTIVATION = "gelu_tanh"
CONTEXTS = [1, 513, 0, 77]


@pytest.fixture
def layers_place(cuda_place: Place) -> Iterator[Place]:
    """Operations that take every step they can at once, not only where that is fastest."""
    usual = cuda_place.ops.layer_tokens
    cuda_place.ops.layer_tokens = MAX_LAYER_ROWS
    yield cuda_place
    cuda_place.ops.layer_tokens = usual


def make_layers(place: Place, shape, dtype: torch.dtype, count: int) -> tuple[Heads, list[DecoderLayer]]:
    hidden, num_heads, size, inner, alibi = shape

    def linear(outputs: int, inputs: int) -> Linear:
        weight = place.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
        return Linear(weight, place.normal(outputs, dtype=dtype, scale=0.2))

    def norm() -> Norm:
        weight = place.normal(hidden, dtype=dtype, scale=0.2) + 1
        return Norm(weight, place.normal(hidden, dtype=dtype, scale=0.2), 1e-5)

    heads = make_heads(place, num_heads, num_heads, size, alibi)
    layers = [
        DecoderLayer(
            attention_norm=norm(),
            qkv=linear(heads.qkv_size, hidden),
            dense=linear(hidden, num_heads * size),
            mlp_norm=norm(),
            up=linear(inner, hidden),
            down=linear(hidden, inner),
        )
        for _ in range(count)
    ]
    return heads, layers


def make_caches(place: Place, batch: Batch, heads: Heads, dtype: torch.dtype, count: int) -> list[CacheLayer]:
    shape = (batch.block_tables.numel(), 2, heads.num_kv_heads, BLOCK, heads.head_size)
    return [CacheLayer(place.normal(*shape, dtype=dtype)) for _ in range(count)]


def one_by_one(ops, x: Tensor, layers, heads: Heads, batch: Batch, caches) -> None:
    tokens, queries = x.shape[0], heads.num_heads * heads.head_size
    qkv, context = x.new_zeros(tokens, heads.qkv_size), x.new_zeros(tokens, queries)
    mlp = x.new_zeros(tokens, layers[0].down.weight.shape[1])
    for layer, cache in zip(layers, caches):
        ops.project_qkv(x, layer.qkv, layer.attention_norm, heads, batch, cache, out=qkv)
        ops.decode_attention(qkv, heads, batch, cache, out=context)
        ops.linear(context, layer.dense, residual=x, out=x)
        ops.linear(x, layer.up, norm=layer.mlp_norm, activation=ACTIVATION, out=mlp)
        ops.linear(mlp, layer.down, residual=x, out=x)


def widened(linear: Linear) -> Linear:
    return Linear(linear.weight.float(), None if linear.bias is None else linear.bias.float())


def in_float32(layer: DecoderLayer) -> DecoderLayer:
    norms = {
        name: Norm(norm.weight.float(), None if norm.bias is None else norm.bias.float(), norm.eps)
        for name, norm in (("attention_norm", layer.attention_norm), ("mlp_norm", layer.mlp_norm))
    }
    linears = {name: widened(getattr(layer, name)) for name in ("qkv", "dense", "up", "down")}
    return DecoderLayer(**norms, **linears)


def fresh(batch: Batch) -> Batch:
    return replace(batch, memo={})


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_all_layers_at_once_are_as_exact_as_the_operations(
    layers_place: Place, shape, tokens: int, dtype
) -> None:
    place, count = layers_place, 3
    heads, layers = make_layers(place, shape, dtype, count)
    batch = make_batch(place, CONTEXTS[-tokens:], [1] * tokens, BLOCK)
    caches = make_caches(place, batch, heads, dtype, count)
    x = place.normal(tokens, shape[0], dtype=dtype)
    wanted, wanted_caches = x.float(), [CacheLayer(cache.blocks.float()) for cache in caches]
    one_by_one(
        Reference(),
        wanted,
        [in_float32(layer) for layer in layers],
        heads,
        fresh(batch),
        wanted_caches,
    )
    single, single_caches = x.clone(), [CacheLayer(cache.blocks.clone()) for cache in caches]
    one_by_one(place.ops, single, layers, heads, batch, single_caches)
    place.settle()
    assert place.ops.decoder_layers(x, layers, heads, ACTIVATION, batch, caches)
    torch.cuda.synchronize()
    epsilon = torch.finfo(dtype).eps
    assert error(x, wanted) < max(1.5 * error(single, wanted), 2 * epsilon)
    for mine, other, exact in zip(caches, single_caches, wanted_caches):
        assert error(mine.blocks, exact.blocks) < max(1.5 * error(other.blocks, exact.blocks), epsilon)


def follow(batch: Batch, contexts: list[int]) -> None:
    """The same rows with other contexts, each token the last of its context."""
    newest = batch.context_lens.new_tensor(contexts) - 1
    blocks = batch.block_tables.gather(1, (newest // BLOCK).long()[:, None])[:, 0]
    batch.kv_slots.copy_(blocks * BLOCK + newest % BLOCK)
    batch.positions.copy_(newest)
    batch.context_lens.copy_(newest + 1)


def test_a_captured_launch_follows_its_inputs_and_leaves_its_counters_clean(layers_place: Place) -> None:
    place, dtype, tokens = layers_place, torch.float16, 4
    heads, layers = make_layers(place, SHAPES["heads of 128"], dtype, 2)
    batch = make_batch(place, [40, 300, 7, 513], [1] * tokens, BLOCK)
    caches = make_caches(place, batch, heads, dtype, 2)
    x, start = (place.normal(tokens, 1024, dtype=dtype) for _ in range(2))
    place.settle()

    def run() -> None:
        x.copy_(start)
        place.ops.decoder_layers(x, layers, heads, ACTIVATION, batch, caches)

    graph = capture(run)
    for _ in range(3):
        start.copy_(place.normal(tokens, 1024, dtype=dtype))
        follow(batch, [3, 100, 512, 64])
        graph.replay()
        again = start.clone()
        place.ops.decoder_layers(again, layers, heads, ACTIVATION, batch, caches)
        assert torch.equal(x, again)


def test_what_has_no_such_launch_is_left_to_the_operations(layers_place: Place) -> None:
    place = layers_place
    heads, layers = make_layers(place, SHAPES["bloom"], torch.float16, 1)
    rms_norm = replace(layers[0], attention_norm=replace(layers[0].attention_norm, bias=None))
    rope = Rope(torch.zeros(99, 32, device=place.device), torch.zeros(99, 32, device=place.device))
    for rows, queries, layer, activation, rotation in (
        (1, 1, layers[0], ACTIVATION, None),
        (5, 1, layers[0], ACTIVATION, None),
        (2, 5, layers[0], ACTIVATION, None),
        (1, 1, rms_norm, ACTIVATION, None),
        (1, 1, layers[0], "swiglu", None),
        (1, 1, layers[0], ACTIVATION, rope),
    ):
        batch = make_batch(place, [9] * rows, [1] * (rows - 1) + [queries], BLOCK)
        caches = make_caches(place, batch, heads, torch.float16, 1)
        x = place.normal(rows + queries - 1, 512, dtype=torch.float16)
        before, mine = x.clone(), replace(heads, rope=rotation)
        taken = (rows, queries, layer, activation, rotation) == (1, 1, layers[0], ACTIVATION, None)
        assert place.ops.decoder_layers(x, [layer], mine, activation, batch, caches) == taken
        assert torch.equal(x, before) != taken
