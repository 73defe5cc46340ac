"""Drafts of a GLIDE layer: those of an independent PyTorch module, and the tokens of one token a step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backend.engine.glide_layers import PaperGlide, known_model, random_glide
from tests.backend.engine.glide_proposals import check_proposals, recorded
from tests.backend.engine.offline_models import drafting_engine, hf_greedy, offline_engine, prompts_of
from tests.backend.engine.test_adapters import ADAPTERS, engine_over, written
from tests.backend.engine.test_draft_steps import SAMPLED, SIZES, generate
from tests.backend.engine.test_lookup import check_sampling_rules, counted, learning_of
from tests.backend.engine.test_resumption import check_equal, finish, moved, submitted
from tests.backend.hf_models import bloom, gpt2, llama
from tests.checkpoints import FAMILIES, greedy
from tests.lora_adapters import make_adapter
from tridecode.backend.engine.device import preparation
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parts.draft_reads import DraftReads
from tridecode.backend.engine.speculation.depth import StepCosts
from tridecode.backend.engine.speculation.step_times import StepTimes
from tridecode.backend.weights.draft_files import write_draft
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest
from tridecode.tools.train_draft.texts import Text

NEW, VOCAB = 36, 97
LONGER = {**SIZES, "max_sequence_tokens": 64}
CHUNKED = {**SIZES, "max_sequences": 12, "max_step_tokens": 12, "max_sequence_tokens": 64}
PROMPTS = prompts_of([5, 11, 1, 8, 17], VOCAB)
MODELS = pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])


def known(make):
    return known_model(make, tuple(map(tuple, PROMPTS)), NEW)


def answers(texts: list[Text]) -> list[list[int]]:
    return [text.ids[text.prompt :].tolist() for text in texts]


def drafting(model, trained, **settings) -> OfflineEngine:
    """An engine whose rows get every draft, whatever the steps of this machine cost."""
    return drafting_engine(model, trained=trained, **{**LONGER, "speculation": "glide", **settings})


@pytest.mark.parametrize("depth", [1, 2])
@MODELS
def test_drafts_are_those_of_the_paper_and_answers_those_of_transformers(make, depth: int) -> None:
    model, texts, trained = known(make)
    offline = drafting(model, trained)
    proposals, steps = recorded(offline), counted(offline)
    done = generate(offline, PROMPTS, SamplingParams(max_tokens=NEW), depth)
    assert [one.tokens for one in done] == answers(texts)
    assert check_proposals(proposals, PaperGlide(make(), trained)) > 50
    learning = learning_of(offline)
    assert 0.5 * learning.drafted["glide"] < learning.accepted["glide"] < learning.drafted["glide"]
    assert len(steps) < 0.7 * NEW
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"


@MODELS
def test_a_layer_that_knows_nothing_changes_no_answer(make) -> None:
    """Its drafts are wrong, in steps with any number of them, and are still those of the paper."""
    model, texts, _ = known(make)
    trained = random_glide(model)
    offline = drafting(model, trained)
    proposals = recorded(offline)
    done = generate(offline, PROMPTS, SamplingParams(max_tokens=NEW))
    assert [one.tokens for one in done] == answers(texts)
    assert check_proposals(proposals, PaperGlide(make(), trained)) > 100
    assert learning_of(offline).accepted["glide"] < 20


def test_a_prompt_of_several_steps_and_a_full_step_are_drafted_for() -> None:
    model, _, trained = known(llama)
    prompts = [*prompts_of([30, 17], VOCAB), *PROMPTS, *prompts_of([5] * 5, VOCAB)]
    wanted = [hf_greedy(model, prompt, 20)[0] for prompt in prompts]
    offline = drafting(model, trained, **CHUNKED)
    proposals = recorded(offline)
    assert [one.tokens for one in generate(offline, prompts, SamplingParams(max_tokens=20), 2)] == wanted
    assert check_proposals(proposals, PaperGlide(llama(), trained)) > 20


@pytest.mark.parametrize("depth", [1, 2])
@MODELS
def test_every_sampling_rule_is_that_of_one_token_a_step(make, depth: int) -> None:
    model, _, trained = known(make)
    offline = drafting(model, trained)
    check_sampling_rules(model, offline, prompts_of([5, 11, 1, 8, 17, 6, 4], VOCAB), depth)
    assert learning_of(offline).drafted["glide"] > 20


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_of_a_prompt_and_preempted_sequences_keep_their_tokens(depth: int) -> None:
    model, _, trained = known(gpt2)
    prompts = prompts_of([5, 9, 7, 11], VOCAB)
    params = SamplingParams(max_tokens=40, num_return_sequences=2, temperature=0.8, top_k=20, seed=5)
    plain = generate(offline_engine(model, keep_logits=False, **LONGER), prompts, params)
    block = drafting(model, trained).engine.state.block_bytes()
    offline = drafting(model, trained, cache_bytes=24 * block)
    for _ in range(2):
        done = generate(offline, prompts, params, depth)
        for one, other in zip(done, plain, strict=True):
            assert [a.tokens for a in one.sequences] == [b.tokens for b in other.sequences]
    assert offline.scheduler.counters.preemptions > 0
    assert learning_of(offline).drafted["glide"] > 40
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"


def test_preempted_sequences_are_drafted_for_as_before() -> None:
    model, texts, trained = known(llama)
    block = drafting(model, trained).engine.state.block_bytes()
    offline = drafting(model, trained, cache_bytes=18 * block)
    proposals = recorded(offline)
    done = generate(offline, PROMPTS, SamplingParams(max_tokens=NEW), 2)
    assert [one.tokens for one in done] == answers(texts)
    assert offline.scheduler.counters.preemptions > 0
    assert check_proposals(proposals, PaperGlide(llama(), trained)) > 30


def test_cached_prefixes_have_the_layers_keys_and_values() -> None:
    """The second rounds begin with the first ones and their answers, whose blocks are found."""
    model, _, trained = known(llama)
    prompts = prompts_of([17, 20, 16], VOCAB)
    params = SamplingParams(max_tokens=20)
    offline = drafting(model, trained)
    first = generate(offline, prompts, params, 2)
    longer = [[*prompt, *one.tokens, 3, 4] for prompt, one in zip(prompts, first)]
    wanted = [hf_greedy(model, prompt, 20)[0] for prompt in longer]
    cached, proposals = offline.scheduler.cache.cached_tokens, recorded(offline)
    assert [one.tokens for one in generate(offline, longer, params, 2)] == wanted
    assert offline.scheduler.cache.cached_tokens - cached >= 3 * 32
    assert check_proposals(proposals, PaperGlide(llama(), trained)) > 20


def test_tokens_that_the_layer_has_missed_are_read_before_it_drafts() -> None:
    """The first answers are decoded without it; the second prompts begin with their blocks."""
    model, texts, trained = known(llama)
    offline = drafting(model, trained)
    learning = learning_of(offline)
    learning.may_draft = lambda rows: False  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=24, speculate=False)
    first = generate(offline, PROMPTS, params, 2)
    assert learning.drafted["glide"] == 0
    del learning.may_draft
    longer = [[*prompt, *one.tokens, 3, 4] for prompt, one in zip(PROMPTS, first)]
    wanted = [hf_greedy(model, prompt, 12)[0] for prompt in longer]
    cached, proposals, reads = offline.scheduler.cache.cached_tokens, recorded(offline), []
    launch = offline.engine.launch

    def launch_and_note(plan):
        reads.append(plan.part(DraftReads) is not None)
        return launch(plan)

    offline.engine.launch = launch_and_note  # type: ignore[method-assign]
    assert [one.tokens for one in generate(offline, longer, SamplingParams(max_tokens=12), 2)] == wanted
    assert offline.scheduler.cache.cached_tokens - cached >= 3 * 24 and sum(reads) > 0
    assert check_proposals(proposals, PaperGlide(llama(), trained)) > 10


@pytest.mark.parametrize("sampled", [False, True])
def test_lookup_and_the_layer_work_together(sampled: bool) -> None:
    model, _, trained = known(llama)
    params = SAMPLED if sampled else SamplingParams(max_tokens=40)
    prompts = prompts_of([5, 11, 1, 8, 17, 6, 4], VOCAB)[: len(SAMPLED)]
    plain = generate(offline_engine(model, keep_logits=False, **LONGER), prompts, params)
    offline = drafting(model, trained, speculation="lookup+glide")
    for _ in range(2):  # the second time, finished answers are found
        done = generate(offline, prompts, params, 2)
        assert [one.tokens for one in done] == [one.tokens for one in plain]
    drafted = learning_of(offline).drafted
    assert drafted["glide"] > 10 and drafted["lookup"] > 10


def test_rows_without_drafts_keep_their_tokens_beside_others() -> None:
    model, _, trained = known(llama)
    prompts = prompts_of([5, 9, 7, 6], VOCAB)
    params = [
        SamplingParams(max_tokens=20, beam_width=2),
        SamplingParams(max_tokens=20, return_generation_logits=True),
        SamplingParams(max_tokens=20, speculate=False),
        SamplingParams(max_tokens=40, return_perf_metrics=True),
    ]
    plain = generate(offline_engine(model, keep_logits=False, **LONGER), prompts, params)
    offline = drafting(model, trained)
    done = generate(offline, prompts, params)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    assert done[3].perf is not None and done[3].perf.draft_tokens > 5


def test_a_batch_invariant_engine_keeps_its_bits() -> None:
    model, _, trained = known(llama)
    params = SamplingParams(max_tokens=NEW, return_log_probs=True)
    settings = dict(batch_invariant=True, block_tokens=32)
    plain = generate(offline_engine(model, keep_logits=False, **{**LONGER, **settings}), PROMPTS, params)
    offline = drafting(model, trained, **settings)
    done = generate(offline, PROMPTS, params)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    assert [one.log_probs for one in done] == [one.log_probs for one in plain]
    assert learning_of(offline).accepted["glide"] > 20


def test_drafts_that_cost_more_than_they_yield_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "take", lambda *_: None)  # this device has other times
    model, texts, _ = known(llama)
    offline = drafting(model, random_glide(model))
    learning = learning_of(offline)
    costs = {(rows, queries): 1.5 for rows in (1, 4, 16) for queries in (2, 4)}
    learning.policy.costs = StepCosts({1: 1.0, 4: 1.0, 16: 1.0}, costs)
    done = generate(offline, PROMPTS[:1], SamplingParams(max_tokens=NEW), 2)
    assert [one.tokens for one in done] == answers(texts)[:1]
    assert 0 < learning.drafted["glide"] < 40, "wrong drafts end"


@pytest.mark.parametrize("steps", [2, 4])
def test_another_engine_continues_with_drafts_and_the_same_tokens(steps: int, monkeypatch) -> None:
    monkeypatch.setattr(preparation, "measured_costs", lambda engine, most_queries: None)
    model, _, trained = known(gpt2)
    prompts = prompts_of([5, 9, 7], VOCAB)
    params = SamplingParams(max_tokens=20, return_log_probs=True, seed=3, temperature=1.1, top_k=0)
    asked = [[SequenceRequest(np.asarray(prompt, np.int32).tobytes(), params)] for prompt in prompts]
    plain = finish(*submitted(model, asked, **SIZES))
    check_equal(moved(model, asked, steps, speculation="glide", trained=trained, **SIZES), plain)


def test_adapters_change_the_target_alone_and_the_cache_that_the_layer_reads(tmp_path) -> None:
    model = FAMILIES["gpt2"]()
    folder = written(model, tmp_path)
    models = {"": model}
    for name, settings in ADAPTERS.items():
        models[name] = make_adapter(model, tmp_path / "adapters" / name, **settings)
    trained = random_glide(model)
    write_draft(tmp_path / "draft", trained.info, trained.tensors)
    sizes = dict(max_sequences=24, max_step_tokens=48)
    chosen = dict(speculation="glide", draft_path=str(tmp_path / "draft"))
    offline = engine_over(folder, tmp_path / "adapters", **sizes, **chosen)
    offline.engine.on_logits = None
    learning_of(offline).policy.costs = None
    asked = [(name, prompt) for prompt in prompts_of([9, 4], model.config.vocab_size) for name in models]
    numbers = [offline.submit(prompt, SamplingParams(max_tokens=12), name) for name, prompt in asked]
    offline.run()
    for (name, prompt), number in zip(asked, numbers):
        assert offline.generations[number].tokens == greedy(models[name], prompt, 12)[0], name
    offline.engine.close()
    assert learning_of(offline).drafted["glide"] > 20
