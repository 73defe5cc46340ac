"""Attention with a window, a soft cap and ALiBi in all combinations, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.batches import context_of, make_batch, make_cache, make_heads
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tridecode.kernels.operands import Heads

FORMS = [
    {"window": 1},
    {"window": 7},
    {"window": 16},
    {"window": 33, "softcap": 3.0},
    {"softcap": 3.0},
    {"window": 500},
]


def attend(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """(T, H, D) float64, query by query: q (T, H, D), the last T positions of k, v (K, L, D)."""
    group, before, rows = heads.num_heads // heads.num_kv_heads, k.shape[1] - q.shape[0], []
    for i, query in enumerate(q.double().cpu()):
        position = before + i
        first = max(position - heads.window + 1, 0) if heads.window else 0
        for head, vector in enumerate(query):
            keys, values = (x[head // group, first : position + 1] for x in (k, v))
            scores = keys @ vector * heads.scale
            if heads.softcap:
                scores = heads.softcap * torch.tanh(scores / heads.softcap)
            if heads.slopes is not None:
                distances = torch.arange(first, position + 1) - position
                scores = scores + heads.slopes[head].double().cpu() * distances
            rows.append(scores.softmax(0) @ values)
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_query_sees_its_window(place: Place, form: dict, alibi: bool):
    """Decoding rows, fresh prompts and chunks of prompts. Where the window ends, blocks hold NaN: a decoding
    row does not read them."""
    heads = replace(make_heads(place, 6, 2, 24, alibi=alibi), **form)
    contexts, queries = [1, 40, 0, 33, 16, 200, 19, 150, 317], [1, 1, 1, 1, 1, 1, 19, 150, 17]
    batch = make_batch(place, contexts, queries, 16)
    cache = make_cache(place, batch, heads, 16, torch.float32)
    cache.blocks.nan_to_num_()  # unused places of used blocks: masked, but torch spreads NaN through a mask
    seen = [context_of(cache, batch, row) if context else None for row, context in enumerate(contexts)]
    for row, context in enumerate(contexts[: batch.num_decodes]):
        outside = max(context - heads.window, 0) // 16 if heads.window else 0
        cache.blocks[batch.block_tables[row, :outside].long()] = torch.nan
    qkv = place.normal(batch.num_tokens, heads.qkv_size, dtype=torch.float32)
    queried, keys = 6 * 24, 2 * 24
    first = int(batch.query_starts[6])  # a fresh prompt's keys and values are in qkv, too
    for row in (6, 7):
        k, v = (x.transpose(0, 1).flatten(1).float().to(qkv.device) for x in seen[row])
        rows = slice(first, first + queries[row])
        qkv[rows, queried : queried + keys], qkv[rows, queried + keys :] = k, v
        first += queries[row]
    out = place.poison(batch.num_tokens, queried, dtype=torch.float32)
    place.settle()
    decodes = batch.num_decodes
    place.ops.decode_attention(qkv[:decodes], heads, batch, cache, out=out[:decodes])
    place.ops.prefill_attention(qkv[decodes:], heads, batch, cache, out=out[decodes:])
    q, starts = qkv[:, :queried].unflatten(1, (6, 24)), batch.query_starts.tolist()
    for row, context in enumerate(contexts):
        rows = slice(starts[row], starts[row + 1])
        if context == 0:
            assert (out[rows] == 0).all()
        else:
            wanted = attend(q[rows], *seen[row], heads).flatten(1)
            assert_close("attention", out[rows], wanted)
