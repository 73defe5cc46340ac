"""Sampling through the engine: distributions, seeds, penalties and banned tokens. The references are
transformers' logits processors, a chi-square test, and the published vectors of the generator."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.hf_models import gpt2, llama
from tridecode.backend.base.errors import RequestError
from tridecode.backend.wire.messages import SamplingParams
from tridecode.kernels.philox import philox


@pytest.mark.parametrize(
    "key, counter, words",
    [  # known-answer vectors of Random123 for philox4x32 with 10 rounds
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_gives_the_published_words(key, counter, words) -> None:
    assert philox(key, np.array([counter], np.uint64))[0].tolist() == list(words)


DRAWS = 3000
PROMPT = [5, 17, 3]


def _first_tokens(model, params: dict, draws: int = DRAWS) -> np.ndarray:
    """The first sampled token under many seeds."""
    offline = offline_engine(
        model, keep_logits=False, max_sequences=64, max_step_tokens=512, max_queued_requests=10_000
    )
    done = offline.generate([PROMPT] * 1, SamplingParams(max_tokens=1))  # warm
    assert done[0].finish == "length"
    numbers = [
        offline.submit(PROMPT, SamplingParams(max_tokens=1, seed=seed, **params)) for seed in range(draws)
    ]
    offline.run()
    return np.array([offline.generations[number].tokens[0] for number in numbers])


def _chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; rare classes are pooled."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    pooled = (
        np.append(counts[common], counts[~common].sum()),
        np.append(expected[common], expected[~common].sum()),
    )
    keep = pooled[1] > 0
    statistic = ((pooled[0][keep] - pooled[1][keep]) ** 2 / pooled[1][keep]).sum()
    return float(statistic), int(keep.sum()) - 1


@pytest.mark.parametrize(
    "params, processors",
    [
        ({"top_k": 0, "temperature": 3.0}, [TemperatureLogitsWarper(3.0)]),
        ({"top_k": 6, "temperature": 2.0}, [TemperatureLogitsWarper(2.0), TopKLogitsWarper(6)]),
        (
            {"top_k": 0, "top_p": 0.7, "temperature": 2.5},
            [TemperatureLogitsWarper(2.5), TopPLogitsWarper(0.7)],
        ),
        (
            {"top_k": 12, "top_p": 0.8, "temperature": 4.0},
            [TemperatureLogitsWarper(4.0), TopKLogitsWarper(12), TopPLogitsWarper(0.8)],
        ),
    ],
    ids=["temperature", "top-k", "top-p", "top-k and top-p"],
)
def test_draws_follow_the_distribution_of_transformers_processors(params: dict, processors: list) -> None:
    model = gpt2()
    _, logits = hf_greedy(model, PROMPT, 1)
    scores = LogitsProcessorList(processors)(torch.tensor([PROMPT]), torch.from_numpy(logits))
    probabilities = scores.double().softmax(-1)[0].numpy()
    counts = np.bincount(_first_tokens(model, params), minlength=len(probabilities)).astype(float)
    assert counts[probabilities == 0].sum() == 0, "a token outside top-k or top-p was drawn"
    statistic, freedom = _chi_square(counts, probabilities)
    # Wilson and Hilferty's approximation of the 99.9 % quantile
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, (
        f"chi-square {statistic:.1f} with {freedom} degrees of freedom; 99.9 % lie below {limit:.1f}"
    )


def test_the_same_request_gives_the_same_tokens_alone_in_company_and_after_preemption() -> None:
    model = llama()
    prompts = prompts_of([9, 12, 7, 10], model.config.vocab_size)
    params = [
        SamplingParams(
            max_tokens=20,
            top_k=0,
            top_p=0.95,
            temperature=2.0,
            seed=seed,
            top_p_decay=0.9,
            top_p_min=0.3,
            repetition_penalty=1.2,
        )
        for seed in (1, 2**64 - 1, 2**40 + 5, 0)
    ]
    alone = [offline_engine(model).generate([p], q)[0].tokens for p, q in zip(prompts, params)]
    small = 8 * offline_engine(model).engine.state.block_bytes()
    offline = offline_engine(model, cache_bytes=small)
    numbers = []
    for prompt, param in zip(prompts, params):
        numbers.append(offline.submit(prompt, param))
        offline.step()
    offline.run()
    assert offline.scheduler.counters.preemptions > 0
    assert [offline.generations[number].tokens for number in numbers] == alone
    again = offline_engine(model).generate(prompts[:1], params[1])[0].tokens
    assert again != alone[0], "the seed makes no difference"


@pytest.mark.parametrize("penalty", [1.5, 0.7])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    model = gpt2()
    prompts = prompts_of([3, 20], model.config.vocab_size)
    done = offline_engine(model).generate(prompts, SamplingParams(max_tokens=15, repetition_penalty=penalty))
    wanted = [hf_greedy(model, p, 15, RepetitionPenaltyLogitsProcessor(penalty))[0] for p in prompts]
    assert [generation.tokens for generation in done] == wanted


def test_presence_and_frequency_penalties_are_subtracted_once_and_per_occurrence() -> None:
    model = gpt2()
    prompt = [4, 4, 4, 9]
    _, logits = hf_greedy(model, prompt, 1)
    scores = torch.from_numpy(logits[0]).double()
    scores[4] -= 0.5 + 3 * 0.25
    scores[9] -= 0.5 + 0.25
    params = SamplingParams(max_tokens=1, presence_penalty=0.5, frequency_penalty=0.25, return_log_probs=True)
    done = offline_engine(model).generate([prompt], params)[0]
    assert done.tokens == [int(scores.argmax())]
    assert done.log_probs[0] == pytest.approx(float(scores.log_softmax(0).max()), abs=1e-4)


def test_bad_words_of_one_and_of_several_ids_equal_transformers() -> None:
    model = gpt2()
    prompt = prompts_of([6], model.config.vocab_size)[0]
    free, _ = hf_greedy(model, prompt, 12)
    words = [[free[0]], [prompt[-2], prompt[-1], free[1]], [free[2], free[3]], [prompt[-1], free[5]]]
    wanted = hf_greedy(model, prompt, 12, NoBadWordsLogitsProcessor(words))[0]
    done = offline_engine(model).generate([prompt], SamplingParams(max_tokens=12, bad_words=words))[0]
    assert done.tokens == wanted != free


def test_min_tokens_holds_back_the_end_as_transformers_does() -> None:
    model = gpt2()
    prompt = prompts_of([6], model.config.vocab_size)[0]
    free, _ = hf_greedy(model, prompt, 12)
    end = free[2]
    stopped = offline_engine(model).generate([prompt], SamplingParams(max_tokens=12, end_id=end))[0]
    assert stopped.tokens == free[: free.index(end) + 1] and stopped.finish == "end_id"
    held = offline_engine(model).generate([prompt], SamplingParams(max_tokens=12, end_id=end, min_tokens=8))[
        0
    ]
    wanted = hf_greedy(model, prompt, 12, MinNewTokensLengthLogitsProcessor(len(prompt), 8, end))[0]
    wanted = wanted[: wanted.index(end, 8) + 1] if end in wanted[8:] else wanted
    assert held.tokens == wanted and end not in held.tokens[:8]


@pytest.mark.parametrize("sampling", [{}, {"top_k": 0, "seed": 4}, {"beam_width": 2}, {"top_log_probs": 2}])
@pytest.mark.parametrize("held_back", [[], [7, 3, 11]], ids=["bad words", "and end ids"])
def test_a_request_without_a_possible_token_ends_alone(sampling, held_back) -> None:
    """Bad words, or bad words and end ids before min_tokens, exclude all tokens: at once, or after two."""
    model, words = gpt2(vocab=20), [[token] for token in range(20) if token not in held_back]
    ends = {"min_tokens": 9, "end_id": held_back[0], "more_end_ids": held_back[1:]} if held_back else {}
    prompts = prompts_of([5, 6, 7], 20)
    beside = hf_greedy(model, prompts[1], 6)[0]
    first, second, third = hf_greedy(model, prompts[2], 3)[0]
    offline = offline_engine(model, max_sequences=8)
    params = SamplingParams(max_tokens=6, return_log_probs=True, bad_words=words, **ends, **sampling)
    numbers = [offline.submit(prompts[0], params), offline.submit(prompts[1], SamplingParams(max_tokens=6))]
    with pytest.raises(RequestError, match="no token is possible after 5 tokens of prompt and 0 of output"):
        offline.run()
    offline.run()
    assert offline.generations[numbers[0]].tokens == [] and offline.generations[numbers[1]].tokens == beside
    if sampling in ({}, {"top_log_probs": 2}) and first != second:
        later = [[first, second, token] for token in range(20)]
        params = msgspec.structs.replace(params, bad_words=later, end_id=-1, more_end_ids=[])
        number = offline.submit(prompts[2], params)
        with pytest.raises(
            RequestError, match="no token is possible after 7 tokens of prompt and 2 of output"
        ):
            offline.run()
        assert offline.generations[number].tokens == [first, second]


def test_one_requests_parameters_never_reach_another() -> None:
    model = gpt2()
    prompts = prompts_of([5, 6, 7, 8], model.config.vocab_size)
    greedy = [hf_greedy(model, prompt, 10)[0] for prompt in prompts]
    offline = offline_engine(model, max_sequences=2)
    odd = SamplingParams(
        max_tokens=10,
        top_k=0,
        temperature=5.0,
        seed=3,
        repetition_penalty=1.8,
        bad_words=[[greedy[0][0]]],
        min_tokens=4,
        return_log_probs=True,
        end_id=greedy[1][0],
    )
    for _ in range(2):  # the slots are used again with other parameters
        numbers = [
            offline.submit(prompt, odd if i % 2 else SamplingParams(max_tokens=10))
            for i, prompt in enumerate(prompts)
        ]
        offline.run()
        for i in (0, 2):
            assert offline.generations[numbers[i]].tokens == greedy[i]
            assert offline.generations[numbers[i]].log_probs == []
