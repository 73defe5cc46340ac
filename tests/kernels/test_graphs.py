"""Operations captured in a CUDA graph and replayed with other inputs: no value of the captured step may
persist."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.batches import attend, context_of, make_batch, make_cache, make_heads
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.kernels.test_linear import make_linear, norm64, product64
from tests.kernels.test_sample import configure, expected_draw, make_state
from tridecode.kernels.bench.measure import capture
from tridecode.kernels.operands import Norm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 8, 16, 40])
def test_a_chain_of_products_follows_its_input(cuda_place: Place, tokens: int):
    """Each kernel of the chain starts before its predecessor ends, and reads what its predecessor wrote."""
    place, dtype = cuda_place, torch.float16
    linears = [make_linear(place, 1024, 1024, dtype) for _ in range(6)]
    norm = Norm(place.normal(1024, dtype=dtype), place.normal(1024, dtype=dtype), 1e-5)
    x, middle, out = (place.normal(tokens, 1024, dtype=dtype) for _ in range(3))

    def run() -> None:
        out.copy_(x)
        for linear in linears:
            place.ops.linear(out, linear, norm=norm, activation="gelu_tanh", out=middle)
            place.ops.linear(middle, linear, residual=out, out=out)

    graph = capture(run)
    for _ in range(20):
        x.copy_(place.normal(tokens, 1024, dtype=dtype))
        graph.replay()
        wanted = x.clone()
        for linear in linears:
            inner = torch.nn.functional.gelu(product64(norm64(wanted, norm), linear), approximate="tanh").to(
                dtype
            )
            wanted = (product64(inner, linear) + wanted.double()).to(dtype)
        error = (out.double() - wanted.double()).norm() / wanted.double().norm()
        assert error < 2e-3


def test_attention_follows_the_lengths_and_the_table(cuda_place: Place):
    place, dtype = cuda_place, torch.float16
    heads = make_heads(place, 8, 2, 128, alibi=True)
    batch = make_batch(place, [400] * 5, [1] * 5, 32)
    cache = make_cache(place, batch, heads, 32, dtype)
    qkv, out = place.normal(5, heads.qkv_size, dtype=dtype), place.poison(5, 8 * 128, dtype=dtype)
    graph = capture(lambda: place.ops.decode_attention(qkv, heads, batch, cache, out=out))
    for contexts in ([1, 0, 33, 399, 2], [400, 400, 400, 400, 400], [0, 0, 0, 0, 7], [64, 65, 63, 0, 128]):
        batch.context_lens.copy_(place.ints(contexts))
        batch.block_tables.copy_(batch.block_tables.flip(0))
        qkv.copy_(place.normal(5, heads.qkv_size, dtype=dtype))
        torch.cuda.synchronize()
        graph.replay()
        q = qkv[:, : 8 * 128].unflatten(1, (8, 128))
        for row, context in enumerate(contexts):
            if context == 0:
                assert (out[row] == 0).all()
                continue
            k, v = context_of(cache, batch, row)
            assert_close("attention", out[row : row + 1], attend(q[row : row + 1], k, v, heads))


def test_sampling_follows_slots_and_state(cuda_place: Place):
    place, vocab = cuda_place, 30000
    state = make_state(place, 8, vocab)
    for slot in range(8):
        configure(state, slot, top_p_now=0.9 if slot % 2 else 1.0, top_k=20 * (slot // 4), seed=slot)
    source, logits = torch.zeros(4, vocab, device=place.device), torch.zeros(4, vocab, device=place.device)
    slots, tokens = place.ints([0, 1, 4, 5]), place.ints([0] * 4)
    log_probs = torch.zeros(4, device=place.device)

    def run() -> None:
        logits.copy_(source)
        place.ops.sample(logits, slots, state, tokens=tokens, log_probs=log_probs)

    graph = capture(run)
    state.column("generated").zero_()
    for step, held in enumerate(([0, 1, 4, 5], [7, 6, 3, 2], [5, 4, 1, 0])):
        source.copy_(torch.randn(4, vocab, generator=place.generator) * 4)
        slots.copy_(place.ints(held))
        before = state.column("generated").tolist()
        torch.cuda.synchronize()
        graph.replay()
        wanted = [
            expected_draw(
                source[row].double().cpu().numpy(),
                20 * (slot // 4),
                float(state.column("top_p_now")[slot]),
                slot,
                before[slot],
            )
            for row, slot in enumerate(held)
        ]
        assert tokens.tolist() == wanted, step
