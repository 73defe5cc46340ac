"""Drafts of one-pass heads: the tokens of transformers and of one token a step, in fewer steps."""

from __future__ import annotations

import pytest
import torch

from tests.backend.engine.draft_heads import hidden_states, known_model
from tests.backend.engine.offline_models import drafting_engine, offline_engine, prompts_of
from tests.backend.engine.test_draft_steps import SIZES, generate
from tests.backend.engine.test_lookup import check_sampling_rules, counted, learning_of
from tests.backend.hf_models import bloom, gpt2, llama
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.train_draft.figures import tokens_per_step

NEW, VOCAB = 40, 97
LONGER = {**SIZES, "max_sequence_tokens": 64}
PROMPTS = prompts_of([5, 11, 1, 8, 17], VOCAB)


def known(make):
    return known_model(make, tuple(map(tuple, PROMPTS)), NEW)


def drafting(model, trained, **settings) -> OfflineEngine:
    """Return an engine whose rows get all drafts."""
    settings = {**LONGER, **settings}
    return drafting_engine(model, "heads", trained=trained, **settings)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])
def test_answers_are_those_of_transformers_in_fewer_steps(make, depth: int) -> None:
    model, texts, _, trained = known(make)
    offline = drafting(model, trained)
    steps = counted(offline)
    done = generate(offline, PROMPTS, SamplingParams(max_tokens=NEW), depth)
    assert [one.tokens for one in done] == [text.ids[text.prompt :].tolist() for text in texts]
    learning = learning_of(offline)
    assert 0.5 * learning.drafted["heads"] < learning.accepted["heads"] <= learning.drafted["heads"]
    assert len(steps) < 0.8 * NEW
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"


@pytest.mark.parametrize("depth", [1, 2])
def test_only_the_heads_of_a_step_are_computed(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a library's layout of the weights, as on a GPU."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model, texts, _, trained = known(llama)
    offline = drafting(model, trained, max_draft_tokens=depth)
    assert offline.engine.drafter.weights.first_outs(depth)[1] == depth
    done = generate(offline, PROMPTS, SamplingParams(max_tokens=NEW), depth)
    assert [one.tokens for one in done] == [text.ids[text.prompt :].tolist() for text in texts]
    learning = learning_of(offline)
    assert learning.accepted["heads"] > 0.5 * learning.drafted["heads"] > 20


@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_the_engine_takes_as_many_steps_as_the_figures_say(make) -> None:
    """torch computes the figures from transformers' hidden states; one sequence at a time."""
    model, texts, heads, trained = known(make)
    table = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    for text in texts:
        drafts = heads.drafts(text, hidden_states(model, text), table, head, None)
        rates = tokens_per_step([(text, drafts)], 3)
        for most in (1, 3):
            offline = drafting(model, trained, max_draft_tokens=most)
            steps = counted(offline)
            prompt = text.ids[: text.prompt].tolist()
            (done,) = generate(offline, [prompt], SamplingParams(max_tokens=NEW))
            assert done.tokens == text.ids[text.prompt :].tolist()
            prefills = -(-len(prompt) // offline.engine.config.max_step_tokens)
            # the last step may have no room for all of its drafts
            assert len(steps) - prefills == pytest.approx((NEW - 1) / rates[most - 1], abs=1.01)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])
def test_every_sampling_rule_is_that_of_one_token_a_step(make, depth: int) -> None:
    model, _, _, trained = known(make)
    offline = drafting(model, trained)
    check_sampling_rules(model, offline, prompts_of([5, 11, 1, 8, 17, 6, 4], VOCAB), depth)
    assert learning_of(offline).drafted["heads"] > 20


def test_drafts_are_drawn_with_the_noise_of_the_target() -> None:
    """Heads with the target's logits would be right at any temperature. Real heads only approximate them, so
    equal noise shows in more accepted drafts than heads get that take the most likely token."""
    model, texts, _, trained = known(llama)
    params = SamplingParams(max_tokens=NEW, top_k=0, temperature=0.4, seed=7)
    plain = generate(offline_engine(model, keep_logits=False, **LONGER), PROMPTS, params)
    offline = drafting(model, trained)
    done = generate(offline, PROMPTS, params)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    assert learning_of(offline).accepted["heads"] > 10


def test_heads_that_know_nothing_change_no_answer() -> None:
    model, texts, _, trained = known(llama)
    wrong = {
        name: torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        for name, x in trained.tensors.items()
    }
    offline = drafting(model, type(trained)(trained.info, wrong))
    done = generate(offline, PROMPTS, SamplingParams(max_tokens=NEW))
    assert [one.tokens for one in done] == [text.ids[text.prompt :].tolist() for text in texts]
    assert learning_of(offline).accepted["heads"] < 20
