"""Requests for the most likely tokens and for logits have drafts: each kept position has its own outputs, as
with one token a step and in transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.backend.engine.grammar_models import constrained_engine, random_model, sampled
from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.engine.test_draft_steps import (
    LENGTHS,
    NEW,
    SAMPLED,
    SIZES,
    answers_of,
    directory,
    drafting,
    generate,
    verified_on_ranks,
)
from tests.backend.engine.test_grammar_drafts import SIZES as GRAMMAR_SIZES
from tests.backend.engine.test_grammar_drafts import (
    accepted,
    assert_same,
    every_draft,
    outputs,
    run,
)
from tests.backend.engine.test_logits import check as check_logits
from tests.backend.engine.test_lookup import drafting as searching
from tests.backend.engine.test_lookup import learning_of
from tests.backend.engine.test_top_log_probs import check
from tests.backend.hf_models import gpt2, llama
from tridecode.backend.engine.offline import Generation
from tridecode.backend.wire.messages import SamplingParams

__all__ = ["directory", "every_draft"]  # fixtures
COUNTS = [5, -1, 0, 20, 3]


def assert_same_tops(found: Generation, wanted: Generation) -> None:
    assert found.tokens == wanted.tokens and found.finish == wanted.finish
    assert len(found.top_log_probs) == len(wanted.top_log_probs)
    for one, other in zip(found.top_log_probs, wanted.top_log_probs):
        assert (one.rank, one.ids) == (other.rank, other.ids)
        assert [one.log_prob, *one.log_probs] == pytest.approx([other.log_prob, *other.log_probs], abs=1e-4)


def assert_same_logits(found: Generation, wanted: Generation, vocab: int) -> None:
    for one, other in (
        (found.context_logits, wanted.context_logits),
        (found.generation_logits, wanted.generation_logits),
    ):
        assert len(one) == len(other)
        assert np.allclose(np.frombuffer(one, "<f4"), np.frombuffer(other, "<f4"), atol=1e-4)
    assert len(found.generation_logits) in (0, 4 * vocab * len(found.tokens))
    assert found.context_log_prob == pytest.approx(wanted.context_log_prob, abs=1e-3)


@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize(("needs_token", "depth"), [(True, 1), (False, 1), (False, 2), (False, 3)])
def test_each_kept_position_has_the_most_likely_tokens_of_transformers(make, needs_token, depth) -> None:
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    theirs = [hf_greedy(model, prompt, NEW) for prompt in prompts]
    offline = offline_engine(model, keep_logits=False, **SIZES)
    answers = {tuple(prompt): tokens for prompt, (tokens, _) in zip(prompts, theirs)}
    source = drafting(offline, answers, needs_token)
    params = [SamplingParams(max_tokens=NEW, top_log_probs=count) for count in COUNTS]
    done = generate(offline, prompts, params, depth)
    for generation, (tokens, logits), count in zip(done, theirs, COUNTS):
        if count < 0:
            assert generation.tokens == tokens and not generation.top_log_probs
        else:
            check(generation, tokens, logits, count)
    assert sum(source.counts) > 20


@pytest.mark.parametrize(("needs_token", "depth"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_logits_of_kept_positions_are_those_of_transformers(make, needs_token: bool, depth: int) -> None:
    """Rows without logits have drafts in the same steps."""
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    params = [
        SamplingParams(
            max_tokens=NEW,
            return_context_logits=place != 1,
            return_generation_logits=place != 1,
            return_context_log_prob=place != 1,
        )
        for place in range(len(prompts))
    ]
    plain = generate(offline_engine(model, keep_logits=False, **SIZES), prompts, params)
    offline = offline_engine(model, keep_logits=False, **SIZES)
    source = drafting(offline, answers_of(prompts, plain), needs_token)
    done = generate(offline, prompts, params, depth)
    for place, (found, wanted, prompt) in enumerate(zip(done, plain, prompts)):
        assert found.tokens == wanted.tokens == hf_greedy(model, prompt, NEW)[0]
        if place == 1:
            assert not found.generation_logits
        else:
            check_logits(model, prompt, found)
    assert sum(source.counts) > 20


#: an answer that ends within the kept tokens of a row, by its text or by an id
ENDS = [
    SamplingParams(
        max_tokens=NEW, stop_words=[[1], [2], [3], [4], [5], [6]], top_k=0, temperature=4.0, seed=8
    ),
    SamplingParams(max_tokens=NEW, end_id=7, top_k=0, temperature=4.0, seed=9),
    SamplingParams(max_tokens=7),
]


@pytest.mark.parametrize(("needs_token", "depth"), [(True, 1), (False, 2)])
def test_every_sampling_rule_keeps_its_outputs(needs_token: bool, depth: int) -> None:
    model = llama()
    vocab, rules = model.config.vocab_size, [*SAMPLED, *ENDS]
    prompts = prompts_of([*LENGTHS, 6, 4, 3, 9, 2], vocab)
    params = [
        replace(one, top_log_probs=place % 5, return_generation_logits=place % 2 == 0)
        for place, one in enumerate(rules)
    ]
    plain = generate(offline_engine(model, keep_logits=False, **SIZES), prompts, params)
    offline = offline_engine(model, keep_logits=False, **SIZES)
    source = drafting(offline, answers_of(prompts, plain), needs_token, seed=1)
    done = generate(offline, prompts, params, depth)
    for found, wanted in zip(done, plain, strict=True):
        assert len(found.top_log_probs) == len(found.tokens)
        assert_same_tops(found, wanted)
        assert_same_logits(found, wanted, vocab)
    assert sum(source.counts) > 20


def test_searched_drafts_serve_requests_for_outputs() -> None:
    """An equal prompt finds the answer that came before."""
    model = llama()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    theirs = [hf_greedy(model, prompt, 30) for prompt in prompts]
    offline, params = searching(model), SamplingParams(max_tokens=30, top_log_probs=4)
    generate(offline, prompts, params)
    before = learning_of(offline).accepted["lookup"]
    for generation, (tokens, logits) in zip(generate(offline, prompts, params, 2), theirs):
        check(generation, tokens, logits, 4)
    assert learning_of(offline).accepted["lookup"] - before > 60


def test_answers_with_a_grammar_have_the_models_own_probabilities() -> None:
    """The masks of drafts change neither the logits nor the most likely tokens that are returned."""
    requests = [
        (
            output,
            sampled(
                seed=seed,
                temperature=1.2,
                top_log_probs=seed % 4,
                max_tokens=60,
                return_generation_logits=seed % 2 == 1,
            ),
        )
        for seed, output in enumerate(outputs())
    ]
    plain = constrained_engine(**GRAMMAR_SIZES)
    wanted = run(plain, requests)
    plain.scheduler.grammars.close()
    offline = constrained_engine(**GRAMMAR_SIZES, speculation="lookup")
    found = run(offline, requests)
    assert_same(found, wanted)
    for one, other in zip(found, wanted):
        assert len(one.top_log_probs) == len(one.tokens)
        assert_same_tops(one, other)
        assert_same_logits(one, other, random_model().config.vocab_size)
    assert accepted(offline) > 60
    offline.scheduler.grammars.close()


@pytest.mark.parametrize(
    ("tensor", "stages", "pipelined", "needs_token"),
    [(2, 1, False, False), (1, 2, False, False), (1, 2, True, True), (2, 2, True, True)],
)
def test_ranks_return_the_outputs_of_kept_positions(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensor: int,
    stages: int,
    pipelined: bool,
    needs_token: bool,
) -> None:
    vocab = 96
    prompts = prompts_of([*LENGTHS, 6, 4], vocab)
    params = [
        replace(one, top_log_probs=place % 4, return_generation_logits=place % 2 == 0)
        for place, one in enumerate(SAMPLED)
    ]
    plain, done, source, engines = verified_on_ranks(
        directory, monkeypatch, (tensor, stages, pipelined), needs_token, prompts, params
    )
    for one, other in zip(done, plain, strict=True):
        assert_same_tops(one, other)
        assert_same_logits(one, other, engines[0].model_config.vocab_size)
    assert sum(source.counts) > 20
