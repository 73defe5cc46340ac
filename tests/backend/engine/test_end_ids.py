"""Several end ids of one sequence: each ends it, and none comes before min_tokens, as in transformers."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.engine.test_beams import hf_beams
from tests.backend.engine.thread_ranks import generations_on_ranks
from tests.backend.hf_models import gpt2, llama
from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.errors import RequestError
from tridecode.backend.engine.step import plan
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.sampling_params import MAX_END_IDS, check
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.kernels import sampling_state

NEW = 14


def hf_until_end(model, prompt: list[int], params: SamplingParams) -> list[int]:
    """transformers' greedy tokens with a list of end ids and min_new_tokens."""
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        do_sample=False,
        eos_token_id=params.end_ids,
        pad_token_id=0,
    )
    return answer[0, len(prompt) :].tolist()


def ends_of(model, prompt: list[int]) -> list[int]:
    """Three ids that the greedy answer has, the last of them first, and one that it does not have."""
    free = list(dict.fromkeys(hf_greedy(model, prompt, NEW)[0]))
    other = next(token for token in range(model.config.vocab_size) if token not in free)
    return [free[-1], other, free[min(4, len(free) - 1)], free[1]]


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("min_tokens", [0, 3, 9, NEW])
def test_greedy_answers_equal_transformers(make, min_tokens: int) -> None:
    model = make()
    offline, wanted = offline_engine(model, max_sequences=8), []
    for prompt in prompts_of([5, 9, 2], model.config.vocab_size):
        for count in (1, 2, 3, 4):
            first, *more = ends_of(model, prompt)[:count]
            params = SamplingParams(max_tokens=NEW, min_tokens=min_tokens, end_id=first, more_end_ids=more)
            wanted.append((offline.submit(prompt, params), hf_until_end(model, prompt, params), params))
    offline.run()
    lengths = set()
    for number, tokens, params in wanted:
        done = offline.generations[number]
        assert done.tokens == tokens
        assert done.finish == ("end_id" if tokens[-1] in params.end_ids else "length")
        lengths.add(len(tokens))
    assert len(lengths) > 2 or min_tokens


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_beams_equal_transformers(min_tokens: int) -> None:
    model = gpt2()
    offline = offline_engine(model, keep_logits=False, max_sequences=8)
    params = SamplingParams(
        max_tokens=NEW, beam_width=3, beam_pool=True, len_penalty=1.0, min_tokens=min_tokens
    )
    for prompt in prompts_of([13, 8], model.config.vocab_size, seed=3):
        first, *more = ends_of(model, prompt)
        asked = msgspec.structs.replace(params, end_id=first, more_end_ids=more)
        (found,) = offline.generate([prompt], asked)
        assert [one.tokens for one in found.sequences] == hf_beams(model, prompt, asked)[0]


def test_ranks_that_share_the_vocabulary_hold_all_end_ids_back(tmp_path) -> None:
    model = FAMILIES["llama"](**{**FAMILIES["llama"].shared, "tie_word_embeddings": False})
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "w")
    prompts = prompts_of([7], model.config.vocab_size)
    first, *more = ends_of(model, prompts[0])
    for min_tokens in (0, 6):
        params = SamplingParams(max_tokens=NEW, min_tokens=min_tokens, end_id=first, more_end_ids=more)
        (done,), _ = generations_on_ranks(tmp_path / "w", 2, 1, prompts, params)
        assert done.tokens == hf_until_end(model, prompts[0], params)


def test_a_preempted_sequence_keeps_its_end_ids() -> None:
    model = llama()
    prompts = prompts_of([9, 9, 9], model.config.vocab_size)
    size = offline_engine(model).engine.state.block_bytes()
    offline = offline_engine(model, cache_bytes=6 * size)
    asked = []
    for prompt in prompts:
        first, *more = ends_of(model, prompt)
        asked.append(SamplingParams(max_tokens=NEW, min_tokens=9, end_id=first, more_end_ids=more))
    numbers = [offline.submit(prompt, params) for prompt, params in zip(prompts, asked)]
    offline.run()
    assert offline.scheduler.counters.preemptions > 0
    for number, prompt, params in zip(numbers, prompts, asked):
        assert offline.generations[number].tokens == hf_until_end(model, prompt, params)


def test_more_end_ids_than_a_slot_has_are_refused_by_name() -> None:
    most = sampling_state.SLOT["end_ids"].shape
    assert most == (MAX_END_IDS,)
    within = SamplingParams(end_id=0, more_end_ids=list(range(1, MAX_END_IDS)))
    assert check(within) is None
    beyond = SamplingParams(end_id=0, more_end_ids=list(range(1, MAX_END_IDS + 1)))
    assert check(beyond) == "end_id and more_end_ids are 17 tokens; wanted 16 at most"
    offline = offline_engine(llama())
    for ends in ({"end_id": 10**6}, {"end_id": 1, "more_end_ids": [10**6]}):
        with pytest.raises(RequestError, match="end_id 1000000 is not a token"):
            offline.submit([1, 2], SamplingParams(**ends))


def test_the_scheduler_has_the_samplers_words_for_no_token() -> None:
    assert (plan.BROKEN_LOGITS, plan.NO_TOKEN) == (sampling_state.BROKEN_LOGITS, sampling_state.NO_TOKEN)
