"""Prompts after a long cached prefix on a GPU: steps run as graphs, also over an 8-bit cache, and logits
agree with transformers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backend.engine.offline_models import first_logits, offline_engine, prompts_of, rounding_bound
from tests.backend.engine.test_kv_cache import CHANGE
from tests.backend.hf_models import bloom, llama
from tridecode.backend.configuration.engine_config import CACHE_FORMATS
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu

MODELS = {
    "llama": lambda: llama(
        seed=3, head_size=128, heads=4, kv_heads=1, inner=520, vocab=640, hidden=512, positions=1024
    ),
    "bloom": lambda: bloom(head_size=64, heads=6, vocab=500),
}
PREFIX, TAILS = 688, [12, 1, 30, 100]
NEW = 4


def engine_of(model, format: str, **settings) -> OfflineEngine:
    sizes = {"block_tokens": 16, "max_step_tokens": 1024, "max_sequence_tokens": 1024, "max_sequences": 4}
    return offline_engine(
        model, device="cuda", kv_cache_dtype=format, cache_bytes=32 << 20, **{**sizes, **settings}
    )


def prompts_behind_one_prefix(vocab_size: int) -> list[list[int]]:
    prefix, *tails = prompts_of([PREFIX, *TAILS], vocab_size)
    return [prefix + tail for tail in tails]


@pytest.mark.parametrize("format", ["auto", *CACHE_FORMATS])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_logits_after_a_cached_prefix_are_those_of_transformers(make, dtype: str, format: str) -> None:
    model = make()
    prompts = prompts_behind_one_prefix(model.config.vocab_size)
    offline = engine_of(model, format, data_type=dtype)
    one = SamplingParams(max_tokens=1)
    offline.generate([prompts[0][: PREFIX + 1]], one)  # puts the prefix in the cache
    before = offline.scheduler.counters.computed_prompt_tokens
    found = offline.generate(prompts, one)
    assert offline.scheduler.counters.computed_prompt_tokens - before == sum(TAILS)
    wanted = first_logits(model, prompts)
    errors = np.stack([each.logits[0] for each in found]) - wanted
    bound = rounding_bound(model, prompts, dtype, "cuda")
    if format == "auto":
        assert np.abs(errors).max() <= bound
    else:
        assert np.sqrt((errors**2).mean()) < CHANGE[format] * wanted.std() + bound


@pytest.mark.parametrize("format", ["auto", *CACHE_FORMATS])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_steps_after_a_cached_prefix_are_graphs(make, format: str) -> None:
    model, answers = make(), []
    prompts = prompts_behind_one_prefix(model.config.vocab_size)
    for graphs in (True, False):
        offline = engine_of(model, format, data_type="bf16", keep_logits=False, cuda_graphs=graphs)
        offline.generate([prompts[0][: PREFIX + 1]], SamplingParams(max_tokens=1))
        captured = offline.engine.prompt_graphs
        assert (captured is not None) == graphs
        before = 0 if captured is None else captured.replayed
        answers.append(
            [
                each.tokens
                for each in (offline.generate([p], SamplingParams(max_tokens=NEW))[0] for p in prompts)
            ]
        )
        if captured is not None:
            assert captured.replayed - before == len(prompts)
    assert sum(a == b for a, b in zip(*answers)) >= len(prompts) - 1
