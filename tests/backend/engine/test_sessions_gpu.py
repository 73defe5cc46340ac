"""Sessions on a GPU; as in the loop, each step is launched before the previous tokens are read."""

from __future__ import annotations

import pytest

from tests.backend.engine.offline_models import hf_greedy, offline_engine, run_ahead
from tests.backend.engine.test_session_models import COUNT, NEW, Talk, banded_greedy
from tests.backend.hf_models import bloom, gpt2, llama
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu

MODELS = {
    "gpt2": lambda: gpt2(head_size=64, heads=3, vocab=331),
    "bloom": lambda: bloom(head_size=64, heads=6, vocab=500),
    "llama": lambda: llama(head_size=64, heads=8, kv_heads=2, inner=344, vocab=512),
}


# BLOOM refuses a ring: test_session_models.py
@pytest.mark.parametrize(
    ("name", "memory"), [("gpt2", 0), ("gpt2", 10), ("llama", 0), ("llama", 10), ("bloom", 0)]
)
@pytest.mark.parametrize("graphs", [True, False])
def test_rounds_give_transformers_tokens_on_the_whole_history(name, memory, graphs):
    model = MODELS[name]()
    offline = offline_engine(
        model, device="cuda", keep_logits=False, block_tokens=16, cache_bytes=64 << 20, cuda_graphs=graphs
    )
    talks = [Talk(offline, number, memory) for number in (1, 2)]
    for new in NEW:
        for talk in talks:
            talk.submit([token + talk.number for token in new])
        beside = offline.submit([3, 5], SamplingParams(max_tokens=COUNT))
        run_ahead(offline)
        assert offline.generations[beside].tokens == hf_greedy(model, [3, 5], COUNT)[0]
        for talk in talks:
            wanted = (
                banded_greedy(model, talk.whole, memory) if memory else hf_greedy(model, talk.whole, COUNT)[0]
            )
            assert talk.take() == wanted
