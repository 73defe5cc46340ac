"""Biases, allowed ids and n-grams that must not repeat, on whole models: transformers' greedy tokens, in a
batch and alone, as samples and beams, after preemption, after a lost engine, in sessions, and with drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.backend.engine.draft_source import ForcedDrafts
from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.hf_models import llama
from tridecode.backend.base.errors import RequestError
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.wire.messages import SamplingParams, Sent, SequenceRequest, SessionRound, Submit

NEW = 20
MODEL = llama()
VOCAB = MODEL.config.vocab_size
#: few ids, so that n-grams repeat
FEW = sorted(prompts_of([9], VOCAB, seed=4)[0])
BIASES = {token: 40.0 - index for index, token in enumerate(FEW[:6])}
RULES: dict[str, dict] = {
    "nothing": {},
    "biases": {"logit_bias": BIASES},
    "allowed ids": {"allowed_token_ids": FEW},
    "n-grams of 1": {"no_repeat_ngram_size": 1},
    "n-grams of 2": {"no_repeat_ngram_size": 2, "logit_bias": BIASES},
    "n-grams of 3": {"no_repeat_ngram_size": 3, "allowed_token_ids": FEW[:5]},
    "all": {"no_repeat_ngram_size": 2, "allowed_token_ids": FEW, "logit_bias": {FEW[0]: 3.5, FEW[8]: -2.0}},
}
#: (prompt, parameters) of the rows of one batch
PROMPTS = [[*prompt, *FEW[:3], *FEW[:3]] for prompt in prompts_of([3, 7, 1, 12, 5, 9, 4], VOCAB)]


def processors(params: dict) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = []
    if biases := params.get("logit_bias"):
        found.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()]))
    if allowed := params.get("allowed_token_ids"):
        found.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1))
    if size := params.get("no_repeat_ngram_size"):
        found.append(NoRepeatNGramLogitsProcessor(size))
    return found


def wanted_of(prompt: list[int], params: dict, new: int = NEW) -> list[int]:
    return hf_greedy(MODEL, prompt, new, *processors(params))[0]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    found = [wanted_of(prompt, params) for prompt, params in zip(PROMPTS, RULES.values())]
    plain = [wanted_of(prompt, {}) for prompt in PROMPTS]
    changed = [one != other for one, other in zip(found[1:], plain[1:])]
    assert all(changed), "a rule does not change its answer"
    return found


def greedy(params: dict) -> SamplingParams:
    return SamplingParams(max_tokens=NEW, cache="off", **params)


def run(offline: OfflineEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Generation]:
    numbers = [offline.submit(prompt, one) for prompt, one in zip(prompts, params)]
    offline.run()
    return [offline.generations[number] for number in numbers]


def test_greedy_answers_are_those_of_transformers_in_a_batch_and_alone(wanted: list[list[int]]) -> None:
    offline, rows = offline_engine(MODEL), [greedy(params) for params in RULES.values()]
    assert [one.tokens for one in run(offline, PROMPTS, rows)] == wanted
    for prompt, params, tokens in zip(PROMPTS, rows, wanted):
        assert run(offline, [prompt], [params])[0].tokens == tokens


def test_an_answer_that_is_preempted_goes_on_by_the_same_rules(wanted: list[list[int]]) -> None:
    block = offline_engine(MODEL).engine.state.block_bytes()
    offline = offline_engine(MODEL, cache_bytes=10 * block)
    found = run(offline, PROMPTS, [greedy(params) for params in RULES.values()])
    assert offline.scheduler.counters.preemptions > 0
    assert [one.tokens for one in found] == wanted


@pytest.mark.parametrize("name", RULES)
def test_an_answer_of_a_lost_engine_continues_by_the_same_rules(wanted: list[list[int]], name: str) -> None:
    """Its door sends the tokens that it had received."""
    row = list(RULES).index(name)
    offline, tokens = offline_engine(MODEL), wanted[row]
    request = SequenceRequest(np.array(PROMPTS[row], "<i4").tobytes(), greedy(RULES[name]))
    for count in (1, 7, NEW - 1):
        number = len(offline.generations)
        offline.generations.append(Generation())
        sent = [Sent(np.array(tokens[:count], "<i4").tobytes())]
        offline.scheduler.submit(b"offline", Submit(number, [request], sent=sent))
        offline.run()
        assert offline.generations[number].tokens == tokens[count:], count


def test_samples_of_a_prompt_are_those_of_single_requests() -> None:
    """Each sample has its own history, which also holds for draws with typical_p."""
    offline = offline_engine(MODEL)
    for params in (RULES["all"], RULES["n-grams of 2"], {"typical_p": 0.5, "no_repeat_ngram_size": 2}):
        drawn = {"top_k": 0, "temperature": 3.0, **params}
        (group,) = run(
            offline, PROMPTS[:1], [SamplingParams(max_tokens=NEW, seed=5, num_return_sequences=3, **drawn)]
        )
        alone = [
            run(offline, PROMPTS[:1], [SamplingParams(max_tokens=NEW, seed=5 + i, **drawn)])[0]
            for i in range(3)
        ]
        tokens = [one.tokens for one in group.sequences]
        assert tokens == [one.tokens for one in alone] and len(set(map(tuple, tokens))) == 3


def repeats(ids: list[int], size: int) -> bool:
    grams = [tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)]
    return len(set(grams)) < len(grams)


@pytest.mark.parametrize("pool", [False, True])
def test_beams_obey_the_rules(pool: bool) -> None:
    """The prompt has no repeated bigram itself. Without the rules the beams repeat some."""
    offline, prompt = offline_engine(MODEL), prompts_of([6], VOCAB, seed=8)[0]
    for allowed in (FEW, FEW[:5]):
        for size in (0, 2):
            params = SamplingParams(
                max_tokens=NEW - 4, beam_width=3, beam_pool=pool, allowed_token_ids=allowed,
                no_repeat_ngram_size=size, logit_bias={allowed[0]: 20.0, allowed[1]: 19.0}, cache="off",
            )  # fmt: skip
            (found,) = run(offline, [prompt], [params])
            assert len(found.sequences) == 3
            for beam in found.sequences:
                assert len(beam.tokens) == NEW - 4 and set(beam.tokens) <= set(allowed)
                assert repeats([*prompt, *beam.tokens], 2) is (size == 0)


def test_rounds_of_a_session_count_the_whole_conversation() -> None:
    offline, history = offline_engine(MODEL), []
    params = {"no_repeat_ngram_size": 2, "logit_bias": BIASES}
    for turn, new in enumerate(prompts_of([5, 2, 3], VOCAB, seed=3)):
        retained = [len(history)] if turn else []
        session = SessionRound(1, 60, retained)
        number = offline.submit(new, SamplingParams(max_tokens=8, **params), session=session)
        offline.run()
        tokens = offline.generations[number].tokens
        assert tokens == wanted_of([*history, *new], params, 8)
        history += [*new, *tokens]


@pytest.mark.parametrize("needs_token", [False, True])
def test_rows_of_several_tokens_obey_the_rules(wanted: list[list[int]], needs_token: bool) -> None:
    """Some of the forced drafts are right: the tokens are those of one token a step."""
    offline = offline_engine(MODEL, max_sequences=24, max_step_tokens=48)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, wanted)}
    source = ForcedDrafts(answers, VOCAB, needs_token)
    offline.scheduler.planner.use_drafter(source)
    offline.engine.drafter = None if needs_token else source
    found = run(offline, PROMPTS, [greedy(params) for params in RULES.values()])
    assert [one.tokens for one in found] == wanted


WRONG = [
    ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias has token id {VOCAB}"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias has token id -1"),
    ({"logit_bias": {1: float("nan")}}, "logit_bias of token id 1 is nan"),
    ({"logit_bias": {1: float("inf")}}, "logit_bias of token id 1 is inf"),
    ({"logit_bias": {token: 0.5 for token in range(1025)}}, "logit_bias has 1,025 token ids; wanted 1,024"),
    ({"allowed_token_ids": [3, VOCAB]}, f"allowed_token_ids has token id {VOCAB}"),
    ({"allowed_token_ids": [1] * (VOCAB + 1)}, "allowed_token_ids has"),
    ({"no_repeat_ngram_size": 65}, "no_repeat_ngram_size is 65; wanted 0 (off) to 64"),
    ({"typical_p": 0.0}, "typical_p is 0.0; wanted a number in (0, 1]"),
    ({"typical_p": float("nan")}, "typical_p is nan"),
]


@pytest.mark.parametrize(("params", "text"), WRONG, ids=lambda value: str(value)[:40])
def test_the_engine_refuses_values_out_of_range(params: dict, text: str) -> None:
    """Its doors check them first; this is the engine's own check."""
    offline = offline_engine(MODEL)
    with pytest.raises(RequestError) as caught:
        offline.submit([1, 2], greedy(params))
        offline.run()
    assert text in str(caught.value)


def test_an_answer_without_an_allowed_token_left_ends_with_an_error() -> None:
    offline = offline_engine(MODEL)
    with pytest.raises(Exception, match="token"), torch.inference_mode():
        offline.submit([5], SamplingParams(max_tokens=9, allowed_token_ids=[5], no_repeat_ngram_size=1))
        offline.run()
    assert run(offline, PROMPTS[:1], [greedy({})])[0].tokens == wanted_of(PROMPTS[0], {})
