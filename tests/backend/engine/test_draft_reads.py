"""A draft model reads the tokens that it has missed: drafts are then as often right as in a run in which it
has missed none, and the answers stay those of one token a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.engine.test_draft_model import LONGER, drafting, folders, like  # noqa: F401
from tests.backend.engine.test_draft_steps import generate
from tests.backend.engine.test_lookup import learning_of
from tests.backend.engine.thread_ranks import on_ranks
from tests.backend.hf_models import gpt2, llama
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parts.draft_reads import DraftReads
from tridecode.backend.wire.messages import SamplingParams

RULES = {
    "greedy": {},
    "sampled": dict(temperature=1.0, top_k=0, seed=3),
    "penalties": dict(temperature=1.0, top_k=20, seed=4, repetition_penalty=1.3, frequency_penalty=0.2),
}


def second_round(offline: OfflineEngine, prompts, params: SamplingParams, drafts: bool):
    """Answer prompts, with or without drafts, then prompts that begin with them and their answers. Return the
    second answers, and the numbers of their drafts and of those that were right."""
    learning = learning_of(offline)
    if not drafts:
        learning.may_draft = lambda rows: False  # type: ignore[method-assign]
    first = generate(offline, prompts, params, 2)
    if not drafts:
        assert learning.drafted["draft"] == 0
        del learning.may_draft
    before = learning.drafted["draft"], learning.accepted["draft"]
    cached = offline.scheduler.cache.cached_tokens
    longer = [[*prompt, *one.tokens, 3, 4] for prompt, one in zip(prompts, first)]
    done = generate(offline, longer, params, 2)
    assert offline.scheduler.cache.cached_tokens - cached >= len(prompts) * 32, (
        "the answers' blocks are found"
    )
    return done, learning.drafted["draft"] - before[0], learning.accepted["draft"] - before[1]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_a_hit_on_blocks_without_the_draft_models_keys_costs_no_acceptance(make, rules: str) -> None:
    model = make()
    prompts = prompts_of([17, 20, 16], model.config.vocab_size)
    params = SamplingParams(max_tokens=20, **RULES[rules])
    plain = offline_engine(model, keep_logits=False, **LONGER)
    first = generate(plain, prompts, params)
    wanted = generate(plain, [[*prompt, *one.tokens, 3, 4] for prompt, one in zip(prompts, first)], params)
    for draft in (model, like(model)):
        rates = []
        for drafts in (True, False):
            done, drafted, accepted = second_round(drafting(model, draft), prompts, params, drafts)
            assert [one.tokens for one in done] == [one.tokens for one in wanted]
            assert drafted > 30
            rates.append(accepted / drafted)
            if draft is model:
                assert accepted >= drafted - 2, "but for logits equal within rounding"
        assert abs(rates[0] - rates[1]) < 0.12, rates


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_is_drafted_again_when_load_falls(depth: int) -> None:
    model = llama()
    prompts = prompts_of([6, 9], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, 50)[0] for prompt in prompts]
    offline = drafting(model, model)
    learning, steps, read = learning_of(offline), 0, 0
    launch = offline.engine.launch

    def launch_and_note(plan):
        nonlocal read
        part = plan.part(DraftReads)
        read += 0 if part is None else int(part.counts.sum())
        return launch(plan)

    def after_a_while(rows: int) -> bool:
        nonlocal steps
        steps += 1
        return steps > 30

    offline.engine.launch = launch_and_note  # type: ignore[method-assign]
    learning.may_draft = after_a_while  # type: ignore[method-assign]
    done = generate(offline, prompts, SamplingParams(max_tokens=50), depth)
    assert [one.tokens for one in done] == wanted
    assert read >= 8, "the tokens of the plain steps"
    assert learning.accepted["draft"] == learning.drafted["draft"] > 20


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_missed_tokens_are_read_into_an_eight_bit_cache(kind: str) -> None:
    model = llama()
    prompts = prompts_of([17, 20, 16], model.config.vocab_size)
    params = SamplingParams(max_tokens=20)
    done, drafted, accepted = second_round(
        drafting(model, model, kv_cache_dtype=kind), prompts, params, False
    )
    assert accepted > 0.8 * drafted > 20


def test_blocks_of_answers_that_decline_and_of_beams_are_read() -> None:
    model = llama()
    (prompt,) = prompts_of([16], model.config.vocab_size)
    for params in (
        SamplingParams(max_tokens=20, speculate=False),
        SamplingParams(max_tokens=20, beam_width=2),
    ):
        offline = drafting(model, model)
        learning = learning_of(offline)
        tokens = generate(offline, [prompt], params, 2)[0].tokens
        assert learning.drafted["draft"] == 0
        again = [*prompt, *tokens, 3]
        done = generate(offline, [again], SamplingParams(max_tokens=20), 2)
        assert done[0].tokens == hf_greedy(model, again, 20)[0]
        assert learning.accepted["draft"] >= learning.drafted["draft"] - 1 > 8


@pytest.mark.parametrize("sampled", [False, True])
def test_tensor_ranks_read_the_same(folders: Path, sampled: bool) -> None:  # noqa: F811
    prompts = prompts_of([17, 20, 16], 96)
    params = SamplingParams(max_tokens=20, **RULES["sampled" if sampled else "greedy"])

    def plain(offline: OfflineEngine):
        first = generate(offline, prompts, params)
        return generate(offline, [[*p, *one.tokens, 3, 4] for p, one in zip(prompts, first)], params)

    def use(offline: OfflineEngine):
        learning_of(offline).policy.costs = None
        return second_round(offline, prompts, params, False)

    (wanted, _) = on_ranks(folders / "target", 1, 1, plain, **LONGER)
    settings = {**LONGER, "speculation": "draft", "draft_path": str(folders / "draft")}
    (done, drafted, accepted), _ = on_ranks(folders / "target", 2, 1, use, **settings)
    assert [one.tokens for one in done] == [one.tokens for one in wanted]
    assert accepted >= 0.98 * drafted > 30
