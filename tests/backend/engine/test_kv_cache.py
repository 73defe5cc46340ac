"""Engines with an 8-bit cache against transformers whose cache rounds as the format is defined, and against
an exact cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import fp32_bound, hf_greedy, offline_engine, prompts_of
from tests.backend.engine.test_beams import hf_beams
from tests.backend.engine.test_prompts import TOKENS, ask, random_prefix, random_table
from tests.backend.engine.test_session_models import Talk
from tests.backend.engine.thread_ranks import generate_on_ranks
from tests.backend.hf_models import bloom, gpt2, llama
from tests.checkpoints import FAMILIES, save
from tests.prompt_adapters import greedy_prefixed, prefix, soft
from tests.rounded_cache import transformers_rounds
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.configuration.engine_config import CACHE_FORMATS
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

FORMATS = pytest.mark.parametrize("format", CACHE_FORMATS)
MODELS = pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])
LENGTHS = [1, 9, 23, 5, 17]
NEW = 4
#: of the first logits: root mean square of what rounding changes, as a share of their standard deviation. The
#: weights are random and large: trained models are far below (docs/guides/kv_cache.md)
CHANGE = {"int8": 0.06, "fp8": 0.6}
#: their attention reads past keys and values without Cache.update's results, or has no cache
NO_ROUNDING = ("mpt", "baichuan")


@FORMATS
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_with_the_same_rounding_and_near_the_exact_ones(family: str, format: str):
    """A value within fp32's rounding of the middle between two steps may be stored as the other one, so some
    prompts may differ by more than fp32's rounding: not half of them."""
    model = FAMILIES[family]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    params = SamplingParams(max_tokens=NEW)
    exact, found = (
        offline_engine(model, kv_cache_dtype=dtype).generate(prompts, params) for dtype in ("auto", format)
    )
    first = np.stack([one.logits[0] for one in exact])
    change = np.stack([one.logits[0] for one in found]) - first
    assert 1e-4 < np.sqrt((change**2).mean()) / first.std() < CHANGE[format]
    if family in NO_ROUNDING:
        return
    with transformers_rounds(format):
        wanted = [hf_greedy(model, prompt, NEW)[1] for prompt in prompts]
    largest = max(np.abs(logits).max() for logits in wanted)
    errors = [np.abs(one.logits[0] - logits[0]).max() / largest for one, logits in zip(found, wanted)]
    assert np.median(errors) < 2e-5 and max(errors) < 0.02


@FORMATS
@MODELS
def test_tokens_depend_neither_on_chunks_nor_on_company_nor_on_preemption(make, format: str) -> None:
    model = make()
    prompts = prompts_of([9, 12, 7, 30], model.config.vocab_size)
    params, settings = SamplingParams(max_tokens=16), {"kv_cache_dtype": format, "keep_logits": False}
    alone = [
        offline_engine(model, max_step_tokens=64, **settings).generate([prompt], params)[0].tokens
        for prompt in prompts
    ]
    block = offline_engine(model, **settings).engine.state.block_bytes()
    for change in ({"max_step_tokens": 5}, {"cache_bytes": 9 * block}, {"block_tokens": 3}):
        offline = offline_engine(model, **settings, **change)
        assert [one.tokens for one in offline.generate(prompts, params)] == alone
        assert (offline.scheduler.counters.preemptions > 0) == ("cache_bytes" in change)
    with transformers_rounds(format):
        assert alone[0] == hf_greedy(model, prompts[0], 16)[0]


def test_batch_invariant_engines_have_the_same_bits_in_any_company() -> None:
    model, params = llama(), SamplingParams(max_tokens=6, return_log_probs=True)
    prompts = prompts_of([40, 9, 33, 17], model.config.vocab_size)
    settings = dict(keep_logits=False, batch_invariant=True, block_tokens=32, kv_cache_dtype="int8")
    whole, cut = (offline_engine(model, max_step_tokens=most, **settings) for most in (64, 16))
    alone = [whole.generate([prompt], params)[0].log_probs for prompt in prompts]
    assert [one.log_probs for one in cut.generate(prompts, params)] == alone


@FORMATS
@pytest.mark.parametrize("blocks", [64, 11])
def test_beams_share_and_copy_blocks_with_their_scales(format: str, blocks: int) -> None:
    """11 blocks: groups are preempted."""
    model = llama()
    prompts = prompts_of([13, 17, 8], model.config.vocab_size, seed=3)
    params = SamplingParams(max_tokens=10, beam_width=3, len_penalty=1.0, beam_pool=True, end_id=5)
    settings = {"keep_logits": False, "max_sequences": 12, "kv_cache_dtype": format}
    block = offline_engine(model, **settings).engine.state.block_bytes()
    offline = offline_engine(model, cache_bytes=blocks * block, **settings)
    with torch.inference_mode():
        found = offline.generate(prompts, params)
    assert (offline.scheduler.counters.preemptions > 0) == (blocks == 11)
    with transformers_rounds(format):
        for prompt, generation in zip(prompts, found):
            assert [one.tokens for one in generation.sequences] == hf_beams(model, prompt, params)[0]


@FORMATS
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_a_prefix_is_rounded_in_the_cache(family: str, format: str) -> None:
    """It shares a batch with the same prompt without a prefix; embeddings of tokens act like the tokens."""
    model = FAMILIES[family]()
    offline, vocab = offline_engine(model, kv_cache_dtype=format), model.config.vocab_size
    ids = prompts_of([17], vocab, seed=6)[0]
    cached = random_prefix(offline, 9)
    rows = model.get_input_embeddings()(torch.tensor(ids[:6])).detach()
    virtual = [*range(vocab, vocab + 6), *ids[6:]]
    forms = ((ids, None), (virtual, soft(rows)), ([*range(vocab, vocab + 9), *ids], prefix(cached)))
    numbers = [ask(offline, prompt, learned) for prompt, learned in forms]
    offline.run()
    plain, embedded, prefixed = (offline.generations[number] for number in numbers)
    assert plain.tokens == embedded.tokens
    with transformers_rounds(format):
        tokens, logits = greedy_prefixed(model, ids, cached, TOKENS)
    assert prefixed.tokens == tokens
    errors = np.abs(np.stack(prefixed.logits) - logits).max(-1)
    assert np.median(errors) < fp32_bound(logits), errors


@FORMATS
def test_a_round_of_a_conversation_goes_on_from_rounded_keys(format: str) -> None:
    model = llama()
    talk = Talk(offline_engine(model, kv_cache_dtype=format), 1)
    for new in ([7, 11, 13, 17, 19, 23, 29], [31, 37], [41, 43, 47]):
        talk.submit(new)
        talk.offline.run()
        with transformers_rounds(format):
            assert talk.take() == hf_greedy(model, talk.whole, 5)[0]


def test_values_that_overflow_do_not_stay_in_the_blocks() -> None:
    """A table of huge values makes an fp16 model compute infinities, whose scales are NaN."""
    model = FAMILIES["gpt2"]()
    settings = {"data_type": "fp16", "kv_cache_dtype": "int8"}
    block = offline_engine(model, **settings).engine.state.block_bytes()
    offline, vocab = offline_engine(model, cache_bytes=5 * block, **settings), model.config.vocab_size
    plain = prompts_of([2], vocab)[0]
    first = ask(offline, plain)
    offline.run()
    huge = random_table(4, offline.model_config.hidden_size).sign() * 65504
    ask(offline, [*range(vocab, vocab + 4), 1, 2, 3], soft(huge))
    with pytest.raises(TridecodeError, match="logits are not numbers"):
        offline.run()
    assert not all(cache.scales.isfinite().all() for cache in offline.engine.state.caches)
    again = ask(offline, plain)
    offline.run()
    assert all(cache.scales.isfinite().all() for cache in offline.engine.state.caches)
    assert offline.generations[again].tokens == offline.generations[first].tokens


@FORMATS
def test_ranks_together_give_the_tokens_of_one(format: str, tmp_path: Path) -> None:
    model = FAMILIES["llama"](num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "w")
    prompts = prompts_of([5, 1, 20, 9], model.config.vocab_size)
    found = [
        generate_on_ranks(tmp_path / "w", tensor, stages, prompts, 8, kv_cache_dtype=format)[0]
        for tensor, stages in ((1, 1), (2, 1), (1, 2))
    ]
    assert found[0] == found[1] == found[2]
    with transformers_rounds(format):
        assert found[0][3] == hf_greedy(model, prompts[3], 8)[0]


@FORMATS
def test_more_blocks_fit_into_the_same_bytes(format: str) -> None:
    model = gpt2(head_size=16, heads=3, layers=2)
    settings = {"cache_bytes": 49152, "max_sequences": 64, "max_step_tokens": 64}
    exact, found = (
        offline_engine(model, kv_cache_dtype=dtype, **settings).engine for dtype in ("auto", format)
    )
    tokens = 2 * 2 * 3 * 8  # layers, keys and values, heads, tokens of a block
    assert exact.state.num_blocks == 49152 // (tokens * 16 * 4)
    assert found.state.num_blocks == 49152 // (tokens * (16 + 4))
