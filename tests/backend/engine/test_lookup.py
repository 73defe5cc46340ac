"""Drafts from earlier text: the tokens of transformers and of one token a step, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.backend.engine.offline_models import drafting_engine, hf_greedy, offline_engine, prompts_of
from tests.backend.engine.test_draft_steps import SAMPLED, SIZES, generate
from tests.backend.engine.thread_ranks import on_ranks
from tests.backend.hf_models import bloom, gpt2, llama
from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.errors import RequestError
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

NEW = 40
LONGER = {**SIZES, "max_sequence_tokens": 64}
LENGTHS = [5, 11, 1, 8, 17]


def drafting(model, **settings) -> OfflineEngine:
    """An engine whose rows get every draft."""
    return drafting_engine(model, "lookup", **{**LONGER, **settings})


def check_sampling_rules(model, offline: OfflineEngine, prompts: list[list[int]], depth: int) -> None:
    """Compare answers under every rule of sampling with those of an engine without drafts."""
    prompts = prompts[: len(SAMPLED)]
    plain = generate(offline_engine(model, keep_logits=False, **LONGER), prompts, SAMPLED)
    done = generate(offline, prompts, SAMPLED, depth)
    for one, other in zip(done, plain, strict=True):
        assert one.tokens == other.tokens and one.finish == other.finish
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def learning_of(offline: OfflineEngine):
    learning = offline.scheduler.planner.drafts.learning
    assert learning is not None
    return learning


def counted(offline: OfflineEngine) -> list[int]:
    """The number of rows of each step from now on."""
    rows: list[int] = []
    launch = offline.engine.launch

    def launch_and_count(plan):
        rows.append(plan.num_rows)
        return launch(plan)

    offline.engine.launch = launch_and_count  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_finished_answer_is_found_by_an_equal_prompt(make, depth: int) -> None:
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    offline, params = drafting(model), SamplingParams(max_tokens=NEW)
    first, second = counted(offline), []
    assert [one.tokens for one in generate(offline, prompts, params, depth)] == wanted
    num_first, learning = len(first), learning_of(offline)
    before = learning.accepted["lookup"]
    assert [one.tokens for one in generate(offline, prompts, params, depth)] == wanted
    second = first[num_first:]
    assert learning.accepted["lookup"] - before > 3 * NEW, "of five answers of NEW tokens"
    assert learning.drafted["lookup"] >= learning.accepted["lookup"] and not learning.drafted["client"]
    assert len(second) < NEW / 2
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"


@pytest.mark.parametrize("make", [gpt2, bloom], ids=["gpt2", "bloom"])
def test_text_that_repeats_is_drafted_from_itself(make) -> None:
    """These tiny random models fall into loops."""
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    offline = drafting(model)
    done = generate(offline, prompts, SamplingParams(max_tokens=NEW), 2)
    assert [one.tokens for one in done] == wanted
    assert learning_of(offline).accepted["lookup"] > 5


@pytest.mark.parametrize("sequences", [1, 2])
def test_few_sequences_have_drafts_while_all_of_them_decode(sequences: int) -> None:
    """Each draft takes a row of a step; an engine has more rows than max_sequences for them."""
    model = gpt2()
    prompts = prompts_of([5, 11], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    offline = drafting(model, max_sequences=sequences)
    rows = counted(offline)
    for _ in range(2):  # the second time, finished answers are found
        done = generate(offline, prompts, SamplingParams(max_tokens=NEW), 2)
        assert [one.tokens for one in done] == wanted
    assert learning_of(offline).accepted["lookup"] > NEW
    assert max(rows) <= sequences, "no more sequences than max_sequences decode at once"


def accepted_of_repeats(offline: OfflineEngine, prompts, first: SamplingParams, second: SamplingParams):
    """Drafts that are accepted when prompts come twice, and both answers."""
    one = generate(offline, prompts, first)
    before = dict(learning_of(offline).accepted)
    other = generate(offline, prompts, second)
    return sum(learning_of(offline).accepted.values()) - sum(before.values()), one, other


@pytest.mark.parametrize(
    ("first", "second", "finds"),
    [
        (dict(), dict(), True),
        (dict(cache="off"), dict(), False),
        (dict(), dict(cache="off"), False),
        (dict(cache="write"), dict(), True),
        (dict(), dict(cache="write"), False),
        (dict(cache_salt="a"), dict(cache_salt="b"), False),
        (dict(cache_salt="a"), dict(cache_salt="a"), True),
        (dict(cache_salt="a"), dict(), False),
        (dict(), dict(speculate=False), False),
    ],
)
def test_answers_stay_within_their_scope(first: dict, second: dict, finds: bool) -> None:
    model = llama()  # its answers do not repeat themselves
    prompts = prompts_of([9, 13], model.config.vocab_size)
    params = SamplingParams(max_tokens=30)
    accepted, one, other = accepted_of_repeats(
        drafting(model), prompts, replace(params, **first), replace(params, **second)
    )
    assert [a.tokens for a in one] == [b.tokens for b in other]
    assert (accepted > 20) == finds and (finds or accepted < 3)


def test_an_engine_of_its_own_scopes_shares_answers_by_salt_alone() -> None:
    model = llama()
    prompts = prompts_of([9, 13], model.config.vocab_size)
    params = SamplingParams(max_tokens=30)
    for settings in (dict(cache_scope="salt"), dict(prefix_cache=False)):
        accepted, *_ = accepted_of_repeats(drafting(model, **settings), prompts, params, params)
        assert accepted < 3, settings


@pytest.mark.parametrize("depth", [1, 2])
def test_a_clients_drafts_are_found_and_do_not_change_the_answer(depth: int) -> None:
    model = llama()
    prompts = prompts_of([9, 13, 2], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, 40)[0] for prompt in prompts]
    offline = drafting(model)
    # right; with a wrong part in the middle, behind which it is found again; of another prompt
    drafts = [wanted[0], wanted[1][:12] + [1, 2, 3] + wanted[1][15:], wanted[0]]
    params = [SamplingParams(max_tokens=40, draft_tokens=one, return_perf_metrics=True) for one in drafts]
    steps = counted(offline)
    done = generate(offline, prompts[:1], params[0], depth)
    assert len(steps) < 20 and done[0].tokens == wanted[0]
    assert done[0].perf.accepted_draft_tokens > 25
    assert done[0].perf.draft_tokens >= done[0].perf.accepted_draft_tokens
    done = generate(offline, prompts, params, depth)
    assert [one.tokens for one in done] == wanted
    assert done[1].perf.accepted_draft_tokens > 20
    assert learning_of(offline).accepted["client"] > 40


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("by", ["stop_words", "end_id"])
def test_drafts_behind_the_end_of_an_answer_are_not_counted_as_accepted(by: str, depth: int) -> None:
    model = llama()
    (prompt,) = prompts_of([9], model.config.vocab_size)
    wanted = hf_greedy(model, prompt, 30)[0]
    ends = {"stop_words": [wanted[8:10]]} if by == "stop_words" else {"end_id": wanted[9]}
    params = SamplingParams(max_tokens=30, draft_tokens=wanted, return_perf_metrics=True, **ends)
    offline = drafting(model)
    (done,) = generate(offline, [prompt], params, depth)
    assert done.tokens == wanted[:10] and done.perf is not None
    # the prompt's step gives the first token, and the step of the other ones a token behind its drafts
    assert 5 < done.perf.accepted_draft_tokens <= 8
    learning = learning_of(offline)
    assert learning.accepted["client"] == done.perf.accepted_draft_tokens
    assert learning.drafted["client"] == done.perf.draft_tokens


@pytest.mark.parametrize(
    ("drafts", "text"), [([3, 999_999], "token id outside"), ([-1], "token id outside"), ([1] * 65, "65 ids")]
)
def test_impossible_drafts_are_refused_by_name(drafts: list[int], text: str) -> None:
    offline = drafting(llama())
    with pytest.raises(RequestError, match=f"draft_tokens has .*{text}"):
        offline.submit([1, 2], SamplingParams(draft_tokens=drafts))


def test_a_step_with_logits_and_beams_go_without_drafts() -> None:
    model = gpt2()
    prompts = prompts_of([5, 9, 7], model.config.vocab_size)
    params = [
        SamplingParams(max_tokens=20, beam_width=2),
        SamplingParams(max_tokens=20, return_generation_logits=True),
        SamplingParams(max_tokens=20),
    ]
    plain = generate(offline_engine(model, keep_logits=False, **LONGER), prompts, params)
    offline = drafting(model)
    for _ in range(2):
        done = generate(offline, prompts, params)
        assert [one.tokens for one in done] == [one.tokens for one in plain]
        got = np.frombuffer(done[1].generation_logits, np.float32)
        assert got == pytest.approx(np.frombuffer(plain[1].generation_logits, np.float32), abs=1e-3)


def test_samples_of_a_prompt_and_preempted_sequences_keep_their_tokens() -> None:
    model = gpt2()
    prompts = prompts_of([5, 9, 7, 11], model.config.vocab_size)
    params = SamplingParams(max_tokens=40, num_return_sequences=2, temperature=0.8, top_k=20, seed=5)
    plain = generate(offline_engine(model, keep_logits=False, **LONGER), prompts, params)
    block = offline_engine(model, keep_logits=False, **LONGER).engine.state.block_bytes()
    offline = drafting(model, cache_bytes=24 * block)
    for _ in range(2):
        done = generate(offline, prompts, params, 2)
        for one, other in zip(done, plain, strict=True):
            assert [a.tokens for a in one.sequences] == [b.tokens for b in other.sequences]
    assert offline.scheduler.counters.preemptions > 0
    assert learning_of(offline).accepted["lookup"] > 40


def test_a_batch_invariant_engine_keeps_its_bits() -> None:
    model = llama()
    prompts = prompts_of([5, 9, 7], model.config.vocab_size)
    params = SamplingParams(max_tokens=30, return_log_probs=True)
    settings = dict(batch_invariant=True, block_tokens=32)
    plain = generate(offline_engine(model, keep_logits=False, **{**LONGER, **settings}), prompts, params)
    offline = drafting(model, **settings)
    for _ in range(2):
        done = generate(offline, prompts, params)
        assert [one.tokens for one in done] == [one.tokens for one in plain]
        assert [one.log_probs for one in done] == [one.log_probs for one in plain]
    assert learning_of(offline).accepted["lookup"] > 30


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_every_sampling_rule_is_that_of_one_token_a_step(make, depth: int) -> None:
    model = make()
    check_sampling_rules(model, drafting(model), prompts_of(LENGTHS, model.config.vocab_size), depth)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lookup")
    model = FAMILIES["gpt2"](**{**FAMILIES["gpt2"].shared, "n_layer": 4})
    plan_conversion(open_checkpoint(str(save(model, folder / "hf")))).write(folder / "w")
    return folder / "w"


@pytest.mark.parametrize(("tensor", "stages", "pipelined"), [(2, 1, False), (1, 2, False), (1, 2, True)])
@pytest.mark.parametrize("sampled", [False, True])
def test_ranks_draft_the_same(directory: Path, tensor: int, stages: int, pipelined: bool, sampled: bool):
    """Ranks that search on their own, and stages for which rank 0 searches."""
    prompts = prompts_of(LENGTHS, 96)
    params = SAMPLED if sampled else SamplingParams(max_tokens=NEW)
    (plain, _) = on_ranks(directory, 1, 1, lambda offline: generate(offline, prompts, params), **LONGER)

    def twice(offline: OfflineEngine):
        learning = learning_of(offline)
        learning.policy.costs = None
        assert (learning.host is not None) == pipelined
        depth = offline.engine.micro_batches if pipelined else 2
        runs = [generate(offline, prompts, params, depth) for _ in range(2)]
        return runs, learning.accepted["lookup"]

    (runs, accepted), _ = on_ranks(
        directory, tensor, stages, twice, pipelined, speculation="lookup", **LONGER
    )
    for done in runs:
        for one, other in zip(done, plain, strict=True):
            assert one.tokens == other.tokens
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert accepted > sum(len(one.tokens) for one in plain) / 3
