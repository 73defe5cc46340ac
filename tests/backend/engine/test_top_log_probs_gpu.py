"""The most likely tokens, and logits and vectors of prompts, in CUDA graphs, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of, run_ahead
from tests.backend.engine.test_pooling import LAST, MEAN, wanted_of
from tests.backend.hf_models import bloom, gpt2, llama
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu

MODELS = {
    "gpt2": lambda: gpt2(head_size=64, heads=3, vocab=331),
    "bloom": lambda: bloom(head_size=64, heads=6, vocab=500),
    "llama": lambda: llama(head_size=64, heads=8, kv_heads=2, inner=344, vocab=512),
}
LENGTHS = [1, 2, 7, 30, 33, 9, 40, 5]
NEW = 12
FP32_BOUND = 2e-3  # relative to the logits' standard deviation: another summation order over two layers


def gpu_engine(model: torch.nn.Module, **settings) -> OfflineEngine:
    """Return an engine with more than 16 slots: its steps with prompts are graphs up to 16 decode rows."""
    defaults = dict(keep_logits=False, max_sequences=24, block_tokens=16, max_step_tokens=128)
    return offline_engine(model, "cuda", **{**defaults, **settings})


@contextmanager
def counted(engine: Engine) -> Iterator[list[int]]:
    """Yield the numbers of decode rows of steps that run without a graph."""
    run, without = engine.run, []

    def counting(batch, *arguments):
        without.append(batch.num_decodes)
        run(batch, *arguments)

    engine.run = counting
    try:
        yield without
    finally:
        del engine.run


def generated(offline: OfflineEngine, prompts: list[list[int]], params: list[SamplingParams]):
    numbers = [offline.submit(prompt, one) for prompt, one in zip(prompts, params)]
    run_ahead(offline)
    return [offline.generations[number] for number in numbers]


def check(generation: Generation, tokens: list[int], logits: np.ndarray, count: int) -> None:
    """Compare a generation's most likely tokens with transformers' (T, V) logits for these tokens; ids with
    equal probability within float32 rounding may be swapped."""
    assert generation.tokens == tokens and len(generation.top_log_probs) == len(tokens)
    bound = FP32_BOUND * float(logits.std())
    for token, row, top in zip(
        tokens, torch.from_numpy(logits).double().log_softmax(-1).numpy(), generation.top_log_probs
    ):
        assert len(set(top.ids)) == len(top.ids) == len(top.log_probs) == count
        assert np.abs(np.array(top.log_probs) - row[top.ids]).max(initial=0) <= bound
        assert top.log_probs == sorted(top.log_probs, reverse=True)
        others = np.delete(row, top.ids)
        assert count == 0 or others.max() <= row[top.ids].min() + 2 * bound
        assert abs(top.log_prob - row[token]) <= bound
        least, most = (int((row > row[token] + side).sum()) for side in (2 * bound, -2 * bound))
        assert least + 1 <= top.rank <= most


def check_own(model: torch.nn.Module, prompt: list[int], found: Generation, count: int) -> None:
    """Compare the most likely tokens with transformers' logits for the sampled tokens."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + found.tokens])).logits[0, len(prompt) - 1 : -1].numpy()
    check(found, found.tokens, logits, count)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_rows_with_no_one_and_many_top_tokens_share_graphs(make) -> None:
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    counts = [5, -1, 0, 20, -1, 1, 20, 0]
    offline = gpu_engine(model)
    params = [SamplingParams(max_tokens=NEW, top_log_probs=count) for count in counts]
    with counted(offline.engine) as without:
        done = generated(offline, prompts, params)
    assert without == []
    for prompt, found, count in zip(prompts, done, counts):
        tokens, logits = hf_greedy(model, prompt, NEW)
        if count < 0:
            assert found.tokens == tokens and not found.top_log_probs
        else:
            check(found, tokens, logits, count)


def test_top_tokens_come_from_the_logits_before_all_edits() -> None:
    """Rows with n-grams run without a graph."""
    model = MODELS["llama"]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    common = dict(max_tokens=NEW, top_log_probs=4, top_k=0, temperature=1.7)
    edits: list[dict] = [
        {"logit_bias": {3: 4.0, 77: 30.0, 78: 30.5}},
        {"min_tokens": NEW, "end_id": 9},
        {"bad_words": [[4], [5, 6], [301]]},
        {"presence_penalty": 0.7, "frequency_penalty": 0.2},
        {"allowed_token_ids": [1, 2, 3, 50, 51]},
        {"logit_bias": {9: 20.0}, "min_tokens": 6, "end_id": 9, "bad_words": [[8]]},
    ]
    offline = gpu_engine(model)
    params = [SamplingParams(**common, seed=seed, **edit) for seed, edit in enumerate(edits)]
    with counted(offline.engine) as without:
        done = generated(offline, prompts[: len(edits)], params)
    assert without == []
    for prompt, found in zip(prompts, done):
        check_own(model, prompt, found, 4)
    assert any(top.rank > 4 for found in done for top in found.top_log_probs)
    params = [SamplingParams(**common, seed=9, no_repeat_ngram_size=1), SamplingParams(**common, seed=10)]
    with counted(offline.engine) as without:
        done = generated(offline, prompts[:2], params)
    assert len(without) >= NEW - 1
    for prompt, found in zip(prompts, done):
        check_own(model, prompt, found, 4)


def test_samples_of_a_prompt_have_their_own_in_graphs() -> None:
    model = MODELS["gpt2"]()
    (prompt,) = prompts_of([11], model.config.vocab_size)
    params = SamplingParams(
        max_tokens=NEW, top_k=0, temperature=2.0, seed=3, num_return_sequences=3, top_log_probs=2
    )
    offline = gpu_engine(model)
    with counted(offline.engine) as without:
        (done,) = generated(offline, [prompt], [params])
    assert not any(without)  # the prompt's own step has three samples of one row
    assert len({tuple(one.tokens) for one in done.sequences}) == 3
    for one in done.sequences:
        check_own(model, prompt, one, 2)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_logits_and_vectors_of_prompts_leave_the_others_in_their_graph(make) -> None:
    """Prompts arrive while five rows decode, a number that graphs pad."""
    model = make()
    vocab = model.config.vocab_size
    decoding, prompts = prompts_of(LENGTHS[:5], vocab), prompts_of([9, 21, 1, 13], vocab, seed=5)
    offline = gpu_engine(model)
    wanted = [
        SamplingParams(max_tokens=2, return_context_logits=True),
        SamplingParams(max_tokens=2, return_context_log_prob=True, top_log_probs=3),
        LAST,
        MEAN,
    ]
    with counted(offline.engine) as without:
        numbers = [offline.submit(prompt, SamplingParams(max_tokens=2 * NEW)) for prompt in decoding]
        for _ in range(3):
            offline.step()
        others = []
        for prompt, params in zip(prompts, wanted):
            others.append(offline.submit(prompt, params))
            offline.step()
            offline.step()
        run_ahead(offline)
    assert without == []
    for number, prompt in zip(numbers, decoding):
        assert offline.generations[number].tokens == hf_greedy(model, prompt, 2 * NEW)[0]
    logits, log_prob, last, mean = (offline.generations[number] for number in others)
    with torch.inference_mode():
        theirs = model(torch.tensor([prompts[0]])).logits[0].numpy()
        scores = model(torch.tensor([prompts[1]])).logits[0].double().log_softmax(-1)
    found = np.frombuffer(logits.context_logits, np.float32).reshape(len(prompts[0]), -1)
    assert np.abs(found - theirs).max() < FP32_BOUND * theirs.std()
    sum_of = float(scores[torch.arange(len(prompts[1]) - 1), torch.tensor(prompts[1][1:])].sum())
    assert abs(log_prob.context_log_prob - sum_of) < len(prompts[1]) * FP32_BOUND * theirs.std()
    check(log_prob, *hf_greedy(model, prompts[1], 2), 3)
    for one, prompt, params in ((last, prompts[2], LAST), (mean, prompts[3], MEAN)):
        vector = wanted_of(model, prompt, params)
        assert one.embedding is not None
        assert np.abs(one.embedding - vector).max() < FP32_BOUND * np.abs(vector).max()


def test_beams_next_to_a_prompt_that_returns_logits_keep_their_candidates() -> None:
    """Both use the buffer of logits."""
    model = MODELS["llama"]()
    vocab = model.config.vocab_size
    one, other = prompts_of([9, 12], vocab)
    beams = SamplingParams(max_tokens=NEW, beam_width=3, num_return_sequences=3)
    alone = gpu_engine(model)
    (wanted,) = generated(alone, [one], [beams])
    offline = gpu_engine(model)
    number = offline.submit(one, beams)
    for _ in range(3):
        offline.step()
    offline.submit(other, SamplingParams(max_tokens=2, return_context_logits=True))
    run_ahead(offline)
    found = offline.generations[number]
    assert [each.tokens for each in found.sequences] == [each.tokens for each in wanted.sequences]
