"""Attention of few queries after a long cached prefix, compared with float64, over a poisoned cache of 16 and
of 8 bits; rows share steps with others, with padding, and run in a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.batches import attend, make_batch, make_cache, make_heads
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.kernels.test_attention_8bit import filled_cache
from tridecode.kernels.bench.measure import capture
from tridecode.kernels.operands import FEW_TOKENS, Batch, CacheLayer, Heads

#: (query heads, kv heads, head size): LLaMA-3, BLOOM, Qwen2, Falcon, Phi-3, OPT, none, Gemma
HEADS = [
    (32, 8, 128),
    (32, 32, 128),
    (14, 2, 64),
    (71, 1, 64),
    (12, 4, 96),
    (6, 6, 80),
    (9, 3, 112),
    (8, 1, 256),
]
#: heads of tests that also run on the reference
FEW_HEADS = [(4, 4, 64), (6, 2, 128)]
#: (context, queries) of each row
ROWS = {
    "one row": [(700, 30)],
    "fewer keys than a tile": [(40, 30)],
    "one query": [(130, 1)],
    "beside fresh prompts": [(17, 17), (300, 17), (64, 64), (129, 1), (700, 100)],
    "queries of several blocks": [(513, 200), (256, 20)],
    "rows at the edges of tiles": [(64, 1), (65, 1), (63, 2), (128, 64), (129, 65), (192, 3)],
}
LONGER = {
    "a long prefix": [(8190, 30)],
    "long and short": [(4000, 16), (30, 30), (2046, 64), (1, 1), (333, 5)],
    "as many queries as there may be": [(3000, 256)],
    "more rows than a warp has lanes": [(60 + 41 * row % 900, 1 + row % 5) for row in range(80)],
}


def values_of(cache: CacheLayer, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
    """(K, L, D) float64 keys and values of a row."""
    held = cache.blocks[batch.block_tables[row].long()].double().cpu()  # (M, 2, K, P, D)
    both = held.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : int(batch.context_lens[row])]
    return both[0], both[1]


class Step:
    """A step of prompts with its cache, and the float64 keys and values of each row."""

    def __init__(self, place: Place, heads: Heads, rows, dtype: torch.dtype, format: str = ""):
        self.place, self.heads = place, heads
        contexts, queries = [c for c, _ in rows], [q for _, q in rows]
        self.batch = make_batch(place, contexts, queries, 16, decodes=0)
        self.batch = replace(self.batch, fresh_prompts=False, memo={})
        if format:
            self.cache, self.kv = filled_cache(place, self.batch, heads, 16, format, spread=10)
        else:
            self.cache = make_cache(place, self.batch, heads, 16, dtype)
            self.kv = [values_of(self.cache, self.batch, row) for row in range(len(rows))]
        self.rows = rows
        self.qkv = self.queries(dtype)

    def queries(self, dtype: torch.dtype) -> Tensor:
        """Return random queries, with the cache's new keys and values."""
        place, width = self.place, self.heads.num_heads * self.heads.head_size
        qkv = place.normal(self.batch.num_tokens, self.heads.qkv_size, dtype=dtype)
        starts = self.batch.query_starts.tolist()
        for row, (context, count) in enumerate(self.rows):
            new = torch.stack(self.kv[row])[:, :, context - count :].permute(2, 0, 1, 3)
            qkv[starts[row] : starts[row + 1], width:] = new.flatten(1).to(dtype).to(place.device)
        return qkv

    def output(self) -> Tensor:
        heads = self.heads
        return self.place.poison(
            self.batch.num_tokens, heads.num_heads * heads.head_size, dtype=self.qkv.dtype
        )

    def run(self) -> Tensor:
        out = self.output()
        self.place.settle()
        self.place.ops.prefill_attention(self.qkv, self.heads, self.batch, self.cache, out=out)
        return out

    def compare(self, out: Tensor) -> None:
        heads, starts = self.heads, self.batch.query_starts.tolist()
        q = self.qkv[:, : heads.num_heads * heads.head_size].unflatten(1, (-1, heads.head_size))
        for row in range(len(self.rows)):
            part = slice(starts[row], starts[row + 1])
            assert_close("attention", out[part], attend(q[part], *self.kv[row], heads))


@pytest.mark.parametrize("format", ["", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", FEW_HEADS)
@pytest.mark.parametrize("rows", ROWS)
def test_few_queries_attend_to_their_prefix(place: Place, rows: str, heads, dtype: torch.dtype, format: str):
    step = Step(place, make_heads(place, *heads, alibi=heads[0] == heads[1]), ROWS[rows], dtype, format)
    step.compare(step.run())


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["", "fp8", "int8"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", LONGER)
def test_few_queries_see_long_rows_and_many(cuda_place: Place, rows: str, heads, format: str):
    alibi = heads[0] == heads[1]
    step = Step(cuda_place, make_heads(cuda_place, *heads, alibi=alibi), LONGER[rows], torch.bfloat16, format)
    step.compare(step.run())


LIMITS = [{"window": 1}, {"window": 40}, {"window": 64}, {"window": 500, "softcap": 20.0}, {"softcap": 5.0}]


@pytest.mark.parametrize("format", ["", "fp8"])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 64), (6, 2, 128)])
def test_few_queries_see_their_windows(place: Place, heads, limits: dict, format: str):
    shape = replace(make_heads(place, *heads, alibi=heads[0] == heads[1]), **limits)
    for rows in (ROWS["beside fresh prompts"], ROWS["rows at the edges of tiles"]):
        step = Step(place, shape, rows, torch.bfloat16, format)
        step.compare(step.run())


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["", "fp8", "int8"])
@pytest.mark.parametrize("limits", [*LIMITS, {"window": 4096, "softcap": 50.0}], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 256), (8, 1, 256), (12, 4, 96), (14, 2, 64)])
@pytest.mark.parametrize("rows", LONGER)
def test_heads_of_models_see_their_windows(cuda_place: Place, rows: str, heads, limits: dict, format: str):
    shape = replace(make_heads(cuda_place, *heads), **limits)
    step = Step(cuda_place, shape, LONGER[rows], torch.bfloat16, format)
    step.compare(step.run())


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("place_of_peak", [0, 300, 998, 999])
def test_one_key_may_outweigh_all_others(place: Place, place_of_peak: int, size: int):
    """Parts without it have no weight, whatever their own maximum is."""
    heads, dtype = make_heads(place, 4, 2, size), torch.bfloat16
    step = Step(place, heads, [(1000, 3)], dtype)
    block = int(step.batch.block_tables[0, place_of_peak // 16])
    step.cache.blocks[block, 0, :, place_of_peak % 16] *= 30
    step.kv = [values_of(step.cache, step.batch, 0)]
    step.qkv = step.queries(dtype)
    step.qkv[:, : 4 * size] *= 8
    step.compare(step.run())


@pytest.mark.parametrize("format", ["", "fp8"])
def test_a_row_does_not_change_next_to_rows_with_nan(place: Place, format: str):
    rows = [(300, 20), (500, 40), (90, 9)]
    step = Step(place, make_heads(place, 8, 2, 128), rows, torch.bfloat16, format)
    out = step.run()
    step.qkv[20:60] = float("nan")
    beside = step.run()
    assert torch.isfinite(out).all() and torch.isnan(beside[20:60]).all()
    assert torch.equal(beside[:20], out[:20]) and torch.equal(beside[60:], out[60:])


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["", "fp8", "int8"])
def test_an_8_bit_cache_is_read_directly(cuda_place: Place, format: str):
    """Up to FEW_TOKENS tokens; more tokens need scratch memory for dequantised blocks."""
    gpu, heads = cuda_place.ops.gpu, make_heads(cuda_place, 8, 2, 128)
    held = gpu.arenas.pop("expanded", None)
    try:
        Step(cuda_place, heads, [(600, FEW_TOKENS)], torch.bfloat16, format).run()
        assert "expanded" not in gpu.arenas
    finally:
        if held is not None:
            gpu.arenas["expanded"] = held
    captured = cuda_place.ops.captured_tokens
    cache = Step(cuda_place, heads, [(17, 1)], torch.bfloat16, format).cache
    assert captured(heads, cache, torch.bfloat16) >= FEW_TOKENS
    biased = replace(heads, key_bias=torch.zeros(8, 4, device=cuda_place.device))
    assert (captured(biased, cache, torch.bfloat16) == 0) == bool(format)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["", "fp8"])
@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 32, 128), (14, 2, 64)])
def test_a_graph_follows_the_rows(cuda_place: Place, heads, format: str):
    """Rows, padding and lengths differ from replay to replay; padded tokens stay as they are."""
    place, shape = cuda_place, make_heads(cuda_place, *heads)
    full = [(3000, 40), (3000, 8), (3000, 8), (3000, 8)]
    step = Step(place, shape, full, torch.bfloat16, format)
    out = step.output()
    graph = capture(lambda: place.ops.prefill_attention(step.qkv, shape, step.batch, step.cache, out=out))
    every = step.kv
    width = shape.num_heads * shape.head_size
    for rows in (full, [(3000, 64), (0, 0), (0, 0), (0, 0)], [(5, 5), (1, 1), (2900, 40), (0, 0)], full[:2]):
        padded = [*rows, *[(0, 0)] * (4 - len(rows))]
        starts = [sum(count for _, count in padded[:row]) for row in range(5)]
        step.batch.context_lens.copy_(place.ints([context for context, _ in padded]))
        step.batch.query_starts.copy_(place.ints(starts))
        step.rows = padded
        step.kv = [tuple(x[:, :context] for x in every[row]) for row, (context, _) in enumerate(padded)]
        step.qkv.copy_(step.queries(torch.bfloat16))
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.isnan(out[starts[-1] :]).all()
        q = step.qkv[:, :width].unflatten(1, (-1, shape.head_size))
        for row, (context, count) in enumerate(padded):
            if count:
                part = slice(starts[row], starts[row] + count)
                k, v = (x[:, :context] for x in every[row])
                assert_close("attention", out[part], attend(q[part], k, v, shape))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(36))
def test_random_steps_of_few_queries(cuda_place: Place, seed: int):
    """Random heads, rows and lengths, up to FEW_TOKENS tokens."""
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    kv_heads, group, size = draw(1, 9), draw(1, 9), (64, 80, 96, 112, 128, 256)[seed % 6]
    rows, left = [], FEW_TOKENS
    for _ in range(draw(1, 12)):
        queries = min(draw(1, 1 << draw(0, 7)), left)
        if queries:
            rows.append((queries + draw(0, 1 << draw(0, 12)), queries))
            left -= queries
    heads = make_heads(cuda_place, kv_heads * group, kv_heads, size, alibi=seed % 4 == 1)
    dtype = (torch.float16, torch.bfloat16)[seed % 2]
    step = Step(cuda_place, heads, rows, dtype, ("", "fp8", "int8")[seed // 3 % 3])
    step.compare(step.run())
