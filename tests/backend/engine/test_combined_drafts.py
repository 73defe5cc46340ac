"""Lookup and a planned drafter in one engine: the tokens of one token a step, with the drafts of both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.backend.engine.offline_models import drafting_engine, hf_greedy, offline_engine, prompts_of
from tests.backend.engine.test_draft_model import LENGTHS, folders, like  # noqa: F401
from tests.backend.engine.test_draft_steps import SAMPLED, generate
from tests.backend.engine.test_heads import NEW, PROMPTS, known
from tests.backend.engine.test_lookup import LONGER, learning_of
from tests.backend.engine.thread_ranks import on_ranks
from tests.backend.hf_models import gpt2, llama
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.speculation.combined import CombinedLearning
from tridecode.backend.engine.speculation.depth import DepthPolicy, StepCosts
from tridecode.backend.engine.speculation.records import DRAFT_MODEL, NEVER, DraftRecord
from tridecode.backend.wire.messages import SamplingParams


def drafting(model, draft, **settings) -> OfflineEngine:
    return drafting_engine(model, "lookup+draft", draft=draft, **{**LONGER, **settings})


def mix(offline: OfflineEngine, least: int = 2, seed: int = 0) -> None:
    """Let rows rely on either drafter at random, and the device keep every match of `least` tokens."""
    learning, random = learning_of(offline), np.random.default_rng(seed)
    assert isinstance(learning, CombinedLearning)

    def relies(record) -> bool:
        return record is None or record.planned is None or bool(random.integers(0, 2))

    learning._relies = relies  # type: ignore[method-assign]
    learning.policy.least_match = lambda source: least  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_answers_are_those_of_one_token_a_step_with_drafts_of_both(make, sampled: bool, depth: int) -> None:
    model = make()
    prompts = prompts_of([*LENGTHS, 6, 4], model.config.vocab_size)
    params = SAMPLED if sampled else [SamplingParams(max_tokens=NEW)] * len(prompts)
    plain = generate(offline_engine(model, keep_logits=False, **LONGER), prompts, params)
    offline = drafting(model, like(model))
    mix(offline)
    for _ in range(2):  # the second time behind cached prefixes, and with the first answers to search
        done = generate(offline, prompts, params, depth)
        for one, other in zip(done, plain, strict=True):
            assert one.tokens == other.tokens and one.finish == other.finish
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    learning = learning_of(offline)
    assert learning.accepted["lookup"] > 20 and learning.accepted["draft"] > 20
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_draft_model_stays_right_behind_tokens_of_a_match(depth: int) -> None:
    """It equals the target, and reads the tokens that a step has verified, those of the other drafter too."""
    model = llama()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    offline = drafting(model, model)
    mix(offline, least=4)
    for _ in range(2):
        done = generate(offline, prompts, SamplingParams(max_tokens=NEW), depth)
        assert [one.tokens for one in done] == wanted
    learning = learning_of(offline)
    assert learning.accepted["lookup"] > 10
    assert learning.accepted["draft"] >= 0.98 * learning.drafted["draft"] > 40


def test_a_long_match_is_used_and_the_draft_model_elsewhere() -> None:
    """Without the choices of a test: a draft model that is often wrong gives way to answers that repeat."""
    model = llama()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    offline = drafting(model, like(model, 0.2))
    learning = learning_of(offline)
    assert [one.tokens for one in generate(offline, prompts, SamplingParams(max_tokens=NEW), 2)] == wanted
    drafted = learning.drafted["draft"]
    assert drafted > 20
    before = dict(learning.accepted)
    assert [one.tokens for one in generate(offline, prompts, SamplingParams(max_tokens=NEW), 2)] == wanted
    assert learning.accepted["lookup"] - before["lookup"] > NEW * len(prompts) / 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_clients_drafts_are_used_with_a_draft_model(depth: int) -> None:
    model = llama()
    prompts = prompts_of([9, 13], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    offline = drafting(model, like(model, 0.2))
    params = [SamplingParams(max_tokens=NEW, draft_tokens=one, return_perf_metrics=True) for one in wanted]
    done = generate(offline, prompts, params, depth)
    assert [one.tokens for one in done] == wanted
    learning = learning_of(offline)
    assert learning.accepted["client"] > 20
    total = sum(one.perf.accepted_draft_tokens for one in done)
    assert total == sum(learning.accepted.values()), "the drafts of both count for a sequence"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_heads_and_lookup_give_the_tokens_of_one_token_a_step(make, depth: int) -> None:
    model, texts, _, trained = known(make)
    offline = drafting_engine(model, "lookup+heads", trained=trained, **LONGER)
    mix(offline)
    for _ in range(2):
        done = generate(offline, PROMPTS, SamplingParams(max_tokens=NEW), depth)
        assert [one.tokens for one in done] == [text.ids[text.prompt :].tolist() for text in texts]
    learning = learning_of(offline)
    assert learning.accepted["lookup"] > 20 and learning.accepted["heads"] > 20


@pytest.mark.parametrize("sampled", [False, True])
def test_tensor_ranks_choose_the_same(folders: Path, sampled: bool) -> None:  # noqa: F811
    prompts = prompts_of([*LENGTHS, 6, 4], 96)
    params = SAMPLED if sampled else [SamplingParams(max_tokens=NEW)] * len(prompts)
    (plain, _) = on_ranks(folders / "target", 1, 1, lambda one: generate(one, prompts, params), **LONGER)

    def use(offline: OfflineEngine):
        learning_of(offline).policy.costs = None
        mix(offline)
        done = [generate(offline, prompts, params, 2) for _ in range(2)]
        return done, learning_of(offline)

    settings = {**LONGER, "speculation": "lookup+draft", "draft_path": str(folders / "llama")}
    (both, learning), _ = on_ranks(folders / "target", 2, 1, use, **settings)
    for done in both:
        for one, other in zip(done, plain, strict=True):
            assert one.tokens == other.tokens
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert learning.accepted["lookup"] > 20 < learning.drafted["draft"]


def test_the_length_from_which_a_match_is_used_follows_from_what_was_learned() -> None:
    policy = DepthPolicy(None, 7)
    assert policy.least_match(DRAFT_MODEL) == 4, "the first chances"
    policy._shared[7] = 0.8
    assert policy.least_match(DRAFT_MODEL) == 16
    policy._shared[7] = 0.97
    assert policy.least_match(DRAFT_MODEL) == NEVER


def test_steps_with_drafts_of_a_search_do_not_cost_the_time_of_the_draft_model() -> None:
    several = {(1, 2): 1.9, (1, 4): 2.5}
    policy = DepthPolicy(StepCosts({1: 1.0}, several, searched={(1, 2): 1.01, (1, 4): 1.02}), 7)
    record = DraftRecord(matched=2, source=1)
    assert policy.choose([record], [7]) == [0]
    assert policy.choose([record], [7], searched=True) == [3]
