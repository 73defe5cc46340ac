"""Whole models in fp32 with the prefix index and without it: equal tokens, however blocks came to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import fp32_bound, hf_greedy, offline_engine, prompts_of
from tests.backend.engine.thread_ranks import on_ranks
from tests.backend.hf_models import gpt2, llama
from tests.checkpoints import FAMILIES, save
from tridecode.backend.configuration.engine_config import CACHE_FORMATS
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

NEW = 6
#: families that run each time: learned positions, rotary ones with grouped heads, ALiBi, one kv head, windows
USUAL = ("gpt2", "llama", "bloom", "falcon", "gemma2")
GREEDY = SamplingParams(max_tokens=NEW)


def beginnings(vocab_size: int) -> list[list[int]]:
    """Prompts that share 0 to 3 blocks of 8 tokens with another one: also one that ends where a block does,
    one that is the beginning of another, and one that occurs twice."""
    common, *rest = prompts_of([24, 4, 9, 1, 13], vocab_size)
    return [common + rest[0], common, common[:16] + rest[1], common[:11], common + rest[2], rest[3], common]


def computed(offline: OfflineEngine) -> int:
    return offline.scheduler.counters.computed_prompt_tokens


def in_any_company(offline: OfflineEngine, prompts: list[list[int]]) -> list[list[Generation]]:
    """The prompts together, one by one (hits), in another order into a running batch, and the conversations
    that their answers begin."""
    together = offline.generate(prompts, GREEDY)
    alone = [offline.generate([prompt], GREEDY)[0] for prompt in prompts]
    late: dict[int, int] = {}
    for i in np.random.default_rng(1).permutation(len(prompts)):
        late[i] = offline.submit(prompts[i], GREEDY)
        offline.step()
    offline.run()
    again = [prompt + one.tokens + [3, 4] for prompt, one in zip(prompts, together)]
    return [
        together,
        alone,
        [offline.generations[late[i]] for i in range(len(prompts))],
        offline.generate(again, GREEDY),
    ]


@torch.inference_mode()
@pytest.mark.parametrize(
    "family",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES],
)
def test_answers_are_the_same_with_the_index_and_without_it(family: str) -> None:
    """Steps of 16 tokens, so that prompts are computed in chunks. The answers are transformers', too."""
    model = FAMILIES[family]()
    prompts = beginnings(model.config.vocab_size)
    offline, without = offline_engine(model), offline_engine(model, cache_scope="none")
    found, wanted = in_any_company(offline, prompts), in_any_company(without, prompts)
    for mine, theirs in zip(found, wanted):
        assert [one.tokens for one in mine] == [one.tokens for one in theirs]
        for one, other in zip(mine, theirs):
            logits = np.stack(other.logits)
            assert np.abs(np.stack(one.logits) - logits).max() < 2 * fp32_bound(logits)
    assert found[1][0].tokens == hf_greedy(model, prompts[0], NEW)[0]
    assert computed(offline) < 0.6 * computed(without)
    assert without.scheduler.cache.cached_tokens == 0


@torch.inference_mode()
@pytest.mark.parametrize("format", CACHE_FORMATS)
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_blocks_of_eight_bits_are_found_with_their_scales(make, format: str) -> None:
    model = make()
    prompts = beginnings(model.config.vocab_size)
    offline = offline_engine(model, kv_cache_dtype=format)
    without = offline_engine(model, kv_cache_dtype=format, prefix_cache=False)
    for mine, theirs in zip(in_any_company(offline, prompts), in_any_company(without, prompts)):
        assert [one.tokens for one in mine] == [one.tokens for one in theirs]
    assert computed(offline) < 0.6 * computed(without)


@torch.inference_mode()
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])
def test_all_ranks_find_the_same_blocks(family: str, tensor: int, stages: int, tmp_path: Path) -> None:
    """The plan names the blocks: ranks know nothing of the index."""
    model = FAMILIES[family](**FAMILIES[family].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompts = beginnings(model.config.vocab_size)

    def use(offline: OfflineEngine) -> tuple[list[list[Generation]], int]:
        return in_any_company(offline, prompts), computed(offline)

    (found, count), _ = on_ranks(directory, tensor, stages, use, pipelined=True)
    (wanted, most), _ = on_ranks(directory, tensor, stages, use, pipelined=True, cache_scope="none")
    for mine, theirs in zip(found, wanted):
        assert [one.tokens for one in mine] == [one.tokens for one in theirs]
    assert count < 0.6 * most


@torch.inference_mode()
def test_preempted_and_evicted_sequences_keep_their_tokens() -> None:
    """A cache of 12 blocks, in which sequences preempt each other and evict what others have left."""
    model = llama()
    prompts = beginnings(model.config.vocab_size)
    whole = offline_engine(model, cache_scope="none", max_sequence_tokens=64)
    block_bytes = sum(t[0].nbytes for layer in whole.engine.state.caches for t in layer.tensors)
    small = offline_engine(model, max_sequence_tokens=64, cache_bytes=12 * block_bytes)
    assert small.scheduler.limits.num_blocks <= 12
    long = SamplingParams(max_tokens=20)
    for _ in range(2):
        found, wanted = small.generate(prompts, long), whole.generate(prompts, long)
        assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert small.scheduler.counters.preemptions > 0 and small.scheduler.cache.index.evictions > 0


@torch.inference_mode()
def test_log_probabilities_are_the_same_bits_where_the_engine_is_batch_invariant() -> None:
    """Blocks of 32 tokens, as such an engine needs them."""
    model = llama()
    common, *rest = prompts_of([64, 4, 40, 9], model.config.vocab_size)
    prompts = [common + rest[0], common + rest[1], common[:33] + rest[2], common[:32]]
    wants = SamplingParams(max_tokens=NEW, return_log_probs=True)
    sizes = {"batch_invariant": True, "block_tokens": 32, "max_step_tokens": 48}
    offline, without = offline_engine(model, **sizes), offline_engine(model, **sizes, cache_scope="none")
    cold = [one.log_probs for one in offline.generate(prompts, wants)]
    warm = [one.log_probs for one in offline.generate(prompts, wants)]
    alone = [without.generate([prompt], wants)[0].log_probs for prompt in prompts]
    assert cold == alone and warm == alone
    assert offline.scheduler.cache.cached_tokens > 0
