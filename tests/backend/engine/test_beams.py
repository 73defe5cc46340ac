"""Beam search and samples: against transformers, against a search by the book, and on the toy device."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.engine.beam_oracle import competition, followed, pool
from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.engine.toy_device import DOOR, VOCAB, Run, ToyDevice, expected, limits, toy_logits
from tests.backend.hf_models import bloom, gpt2, llama
from tridecode.backend.base.errors import CapacityError, RequestError
from tridecode.backend.engine.offline import Generation
from tridecode.backend.engine.parts.forks import Forks
from tridecode.backend.engine.schedule.sequence import Finish
from tridecode.backend.wire.messages import SamplingParams

MODELS = pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])
PROMPT = [1, 2, 3, 4, 5]
NEW = 12


# ---------------------------------------------------------------- transformers


def hf_beams(model, prompt: list[int], params: SamplingParams) -> tuple[list[list[int]], list[float]]:
    """Tokens and scores of all beams that transformers' generate finds, best first."""
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=params.max_tokens,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        eos_token_id=params.end_ids or None,
        min_new_tokens=params.min_tokens or None,
        pad_token_id=0,
        length_penalty=params.len_penalty,
        early_stopping={0: False, 1: True, 2: "never"}[params.early_stopping],
        output_scores=True,
        return_dict_in_generate=True,
    )
    lengths = (answer.beam_indices >= 0).sum(1).tolist()
    rows = answer.sequences[:, len(prompt) :].tolist()
    return [row[:n] for row, n in zip(rows, lengths)], answer.sequences_scores.tolist()


def found_by(generation: Generation, len_penalty: float) -> tuple[list[list[int]], list[float]]:
    texts = [one.tokens for one in generation.sequences]
    return texts, [one.cum_log_prob / len(one.tokens) ** len_penalty for one in generation.sequences]


@MODELS
@pytest.mark.parametrize(
    ("width", "len_penalty", "early_stopping", "end_id"),
    [(2, 0.0, 1, 3), (4, 1.0, 0, 5), (3, -1.0, 2, 5), (5, 2.0, 2, 7), (4, 0.6, 1, -1)],
)
def test_beams_equal_transformers(make, width, len_penalty, early_stopping, end_id) -> None:
    """Three groups of beams in one batch, with greedy requests that come and go next to them."""
    model = make()
    prompts = prompts_of([13, 1, 8], model.config.vocab_size, seed=width)
    params = SamplingParams(
        max_tokens=NEW, beam_width=width, len_penalty=len_penalty, early_stopping=early_stopping,
        beam_pool=True, end_id=end_id, return_log_probs=True,
    )  # fmt: skip
    offline = offline_engine(model, keep_logits=False, max_sequences=16)
    beside = [offline.submit(prompt, SamplingParams(max_tokens=7 + i)) for i, prompt in enumerate(prompts)]
    with torch.inference_mode():
        found = offline.generate(prompts, params)
    for prompt, generation in zip(prompts, found):
        texts, scores = hf_beams(model, prompt, params)
        assert found_by(generation, len_penalty)[0] == texts
        assert found_by(generation, len_penalty)[1] == pytest.approx(scores, abs=1e-4, rel=1e-5)
    for i, number in enumerate(beside):
        assert offline.generations[number].tokens == hf_greedy(model, prompts[i], 7 + i)[0]


@MODELS
def test_beams_equal_transformers_when_they_are_preempted(make) -> None:
    """Blocks for little more than one group: the others are thrown out and computed again, several times."""
    model = make()
    prompts = prompts_of([13, 17, 8], model.config.vocab_size, seed=3)
    params = SamplingParams(max_tokens=NEW, beam_width=3, len_penalty=1.0, beam_pool=True, end_id=5)
    block = 2 * 8 * model.config.hidden_size * 4 * model.config.num_hidden_layers
    kv_heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    block = block * kv_heads // model.config.num_attention_heads
    offline = offline_engine(model, keep_logits=False, max_sequences=12, cache_bytes=11 * block)
    assert offline.engine.state.num_blocks == 11
    with torch.inference_mode():
        found = offline.generate(prompts, params)
    assert offline.scheduler.counters.preemptions > 0
    for prompt, generation in zip(prompts, found):
        assert [one.tokens for one in generation.sequences] == hf_beams(model, prompt, params)[0]


def test_fewer_beams_are_returned_than_searched() -> None:
    model = gpt2()
    params = SamplingParams(max_tokens=6, beam_width=4, num_return_sequences=2, beam_pool=True)
    found = offline_engine(model, keep_logits=False).generate([PROMPT], params)[0]
    assert [one.tokens for one in found.sequences] == hf_beams(model, PROMPT, params)[0][:2]


# ---------------------------------------------------------------- FasterTransformer's rule, by the book


def logits_of(model):
    """The model of beam_oracle: transformers' logits, without a cache."""

    @torch.inference_mode()
    def logits(tokens: list[int]) -> np.ndarray:
        return model(torch.tensor([tokens])).logits[0, -1].double().numpy()

    return logits


RULES = {
    "plain": {},
    "length penalty": {"len_penalty": 1.3, "end_id": 7},
    "negative length penalty": {"len_penalty": -2.0, "end_id": 7},
    "diversity": {"beam_search_diversity_rate": 0.7, "end_id": 7},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "temperature": 0.7},
    "presence": {"presence_penalty": 1.5, "temperature": 2.0},
    "words": {"bad_words": [[7], [3, 11], [20]], "stop_words": [[9], [5, 11]]},
    "min_tokens": {"end_id": 7, "min_tokens": 4, "bad_words": [[2], [4, 1, 6]]},
    "several ends": {"end_id": 7, "more_end_ids": [3, 11, 20], "min_tokens": 2, "len_penalty": 0.8},
    "temperature 0": {"temperature": 0.0},
}


@pytest.mark.parametrize("rule", RULES)
def test_beams_that_compete_to_the_end_equal_a_search_by_the_book(rule) -> None:
    """fp32 against float64 over transformers' logits; a step's log probabilities agree within 1e-4."""
    model, params = gpt2(), SamplingParams(max_tokens=8, beam_width=4, **RULES[rule])
    offline = offline_engine(model, keep_logits=False)
    prompts = prompts_of([9, 4], model.config.vocab_size, seed=11)
    with torch.inference_mode():
        found = offline.generate(prompts, params)
    for prompt, generation in zip(prompts, found):
        wanted = competition(logits_of(model), prompt, params)[-1]
        assert [one.tokens for one in generation.sequences] == [text.tokens for text in wanted]
        for one, text in zip(generation.sequences, wanted):
            assert one.log_probs == pytest.approx(text.log_probs, abs=1e-4)


def test_wide_beams_and_a_small_vocabulary() -> None:
    """64 beams of a vocabulary of 97: the first step has fewer candidates than 2 * 64."""
    model, params = gpt2(), SamplingParams(max_tokens=4, beam_width=64)
    found = offline_engine(model, keep_logits=False, max_sequences=64, max_step_tokens=64).generate(
        [PROMPT], params
    )[0]
    wanted = competition(logits_of(model), PROMPT, params)[-1]
    assert [one.tokens for one in found.sequences] == [text.tokens for text in wanted]


# ---------------------------------------------------------------- the toy device


def texts_of(run: Run, key: tuple[int, int]) -> list[list[int]]:
    return [text.tokens for text in followed(run.beam_steps[key])]


class Mixed:
    """Requests of beams, of samples and of one sequence on a run, and what each should get."""

    def __init__(self, run: Run):
        self.run, self.number = run, 0
        self.wanted: dict[int, tuple[list[int], SamplingParams]] = {}

    def submit(self, data: st.DataObject) -> None:
        self.number += 1
        prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7))
        kind = data.draw(st.sampled_from(["beams", "beams", "pool", "samples", "one"]))
        named: dict = {
            "max_tokens": data.draw(st.integers(0, 7)),
            "end_id": data.draw(st.sampled_from([-1, 3])),
        }
        if kind in ("beams", "pool"):
            named.update(
                beam_width=data.draw(st.integers(2, 4)),
                len_penalty=data.draw(st.sampled_from([0.0, 1.0, -1.0])),
                beam_search_diversity_rate=data.draw(st.sampled_from([0.0, 0.5])),
                beam_pool=kind == "pool",
                early_stopping=data.draw(st.integers(0, 2)),
                bad_words=data.draw(st.sampled_from([[], [[4], [1, 2]]])),
                min_tokens=data.draw(st.integers(0, 2)),
            )
        elif kind == "samples":
            named.update(num_return_sequences=data.draw(st.integers(2, 4)), seed=data.draw(st.integers(0, 3)))
        with contextlib.suppress(RequestError, CapacityError):
            self.run.submit(self.number, prompt, **named)
            self.wanted[self.number] = prompt, SamplingParams(**named)

    def cancel(self, data: st.DataObject) -> None:
        self.run.scheduler.cancel(DOOR, data.draw(st.integers(1, self.number + 1)))
        self.run.take(self.run.scheduler.take_events())

    def check_ends(self) -> None:
        for number, (prompt, params) in self.wanted.items():
            keys = [(number, i) for i in range(params.num_sequences)]
            assert [len(self.run.ends[key]) for key in keys] == [1] * len(keys), "not exactly one end"
            finishes = {self.run.ends[key][0].finish for key in keys}
            if finishes == {"cancelled"} or params.max_tokens == 0:
                continue
            assert "error" not in finishes and "deadline" not in finishes
            if params.beam_width == 1:
                for i, key in enumerate(keys):
                    if self.run.ends[key][0].finish != "cancelled":
                        wanted = expected(prompt, params.max_tokens, params.end_id, params.seed + i)
                        assert self.run.tokens[key] == wanted
            elif params.beam_pool:
                wanted = [text.tokens for text in pool(toy_logits, prompt, params)]
                assert [self.run.tokens[key] for key in keys] == wanted
            else:
                history = competition(toy_logits, prompt, params)
                assert len(self.run.beam_steps[keys[0]]) == len(history)
                for step, beams in enumerate(history, 1):
                    now = followed(self.run.beam_steps[keys[0]][:step])
                    assert [text.tokens for text in now] == [text.tokens for text in beams]


@pytest.mark.parametrize("overlap", [False, True, "stages"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_beams_and_samples_get_the_tokens_of_a_run_on_their_own(overlap: bool, data: st.DataObject) -> None:
    run = Run(
        limits(
            num_blocks=data.draw(st.integers(12, 30)),
            block_tokens=data.draw(st.sampled_from([1, 3, 4])),
            max_sequences=data.draw(st.integers(4, 8)),
            max_sequence_tokens=20,
            long_prompt_tokens=data.draw(st.sampled_from([0, 0, 3, 6])),
            recompute_long=data.draw(st.booleans()),
        ),
        overlap,
    )
    mixed = Mixed(run)
    mixed.submit(data)
    for action in data.draw(
        st.lists(st.sampled_from(["submit", "submit", "step", "step", "step", "cancel"]), max_size=20)
    ):
        if action == "step":
            run.step()
        else:
            getattr(mixed, action)(data)
        run.check_holders()
    while run.scheduler.has_work or run.pending:
        run.step()
        run.check_holders()
    run.finish()
    assert run.scheduler.cache.reserved == 0
    mixed.check_ends()


def beams_of(run: Run, **params) -> None:
    run.submit(1, PROMPT, **{"max_tokens": 6, "beam_width": 3, **params})


def test_a_group_holds_its_slots_from_its_admission_to_its_end() -> None:
    run = Run(limits(max_sequences=4, num_blocks=40))
    run.submit(1, list(range(12)), max_tokens=6, beam_width=3)
    run.submit(2, [1], max_tokens=3)
    run.submit(3, [2], max_tokens=3)
    run.step()
    assert run.scheduler.cache.reserved == 2  # one beam computes the prompt, in two steps
    run.step()
    assert run.scheduler.cache.reserved == 0
    assert run.scheduler.num_running == 4 and run.scheduler.num_waiting == 1
    run.finish()
    assert run.tokens[3, 0] == expected([2], 3)
    assert run.scheduler.cache.reserved == 0


def test_beams_share_the_blocks_of_their_prompt_and_its_tokens_are_computed_once() -> None:
    run = Run(limits(num_blocks=40, max_sequences=4))
    run.submit(1, list(range(10)), max_tokens=6, beam_width=4)
    plans = []
    execute = run.device.run
    run.device.run = lambda plan: plans.append(plan) or execute(plan)
    run.step()
    run.step()  # four beams of 10 + 1 tokens in blocks of 4: two full ones are shared
    (group,) = run.scheduler.requests.groups()
    blocks = [beam.blocks for beam in group.sequences]
    assert len(blocks) == 4 and len({tuple(one[:2]) for one in blocks}) == 1
    assert len({block for one in blocks for block in one}) == 3
    assert [plan.num_tokens for plan in plans] == [8, 2]  # max_step_tokens is 8
    run.step()
    assert plans[2].num_tokens == 4 and len(plans[2].part(Forks).blocks) == 3  # the partial block


def test_samples_share_the_prompt_and_compute_its_last_token_only() -> None:
    run = Run(limits(num_blocks=40, max_step_tokens=16))
    run.submit(1, list(range(10)), max_tokens=6, num_return_sequences=3, seed=2**64 - 1)
    plans = []
    execute = run.device.run
    run.device.run = lambda plan: plans.append(plan) or execute(plan)
    run.step()
    run.step()
    assert [plan.num_tokens for plan in plans] == [10, 1 + 2]
    assert len(plans[1].part(Forks).blocks) == 2  # the partial block, with two of the prompt's tokens
    run.finish()
    for i, seed in enumerate((2**64 - 1, 0, 1)):
        assert run.tokens[1, i] == expected(list(range(10)), 6, seed=seed)


def test_others_run_in_every_step_and_beams_in_every_second_one_of_a_pipeline() -> None:
    """A beam's next token is known when its step has been committed."""
    run = Run(limits(num_blocks=40, max_sequences=5, max_step_tokens=16), overlap=True)
    run.submit(1, [9], max_tokens=12)
    run.submit(2, PROMPT, max_tokens=6, beam_width=2)
    counts = []
    execute = run.device.run
    run.device.run = lambda plan: counts.append((plan.num_decodes, len(plan.slots))) or execute(plan)
    run.finish()
    assert counts[0] == (0, 2) and counts[1:8] == [(1, 1), (3, 3), (1, 1), (3, 3), (1, 1), (3, 3), (1, 1)]
    assert run.tokens[1, 0] == expected([9], 12)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"beam_width": 5}, r"beam_width is 5; this model accepts 4 \(max_sequences in config.pbtxt\)"),
        ({"beam_width": 65}, "beam_width is 65; wanted 1 to 64"),
        ({"beam_width": 0}, "beam_width is 0; wanted 1 to 64"),
        ({"beam_width": 4, "max_tokens": 14}, "with 4 beams need 17 cache blocks; the cache has 12"),
        (
            {"beam_width": 2, "num_return_sequences": 3},
            "num_return_sequences is 3; wanted at most beam_width, 2",
        ),
        (
            {"beam_width": 2, "return_generation_logits": True},
            "return_generation_logits is set and beam_width",
        ),
        ({"beam_width": 2, "top_log_probs": 1}, "top_log_probs is set and beam_width is 2"),
    ],
)
def test_beams_that_can_never_run_are_refused_by_name(params, text) -> None:
    run = Run(limits())
    with pytest.raises(RequestError, match=text):
        run.submit(1, PROMPT, **params)
    assert not run.scheduler.has_work and run.scheduler.num_waiting == 0


ENDS = pytest.mark.parametrize(
    ("params", "count"),
    [
        ({}, 1),
        ({"beam_pool": True}, 3),
        ({"beam_width": 1, "num_return_sequences": 4}, 4),
    ],
    ids=["beams", "pool", "samples"],
)


@ENDS
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("how", ["cancelled", "deadline", "error"])
def test_a_request_that_is_ended_gives_all_back_and_ends_once(params, count, steps, how) -> None:
    run = Run(limits(num_blocks=40, request_timeout_s=5.0), overlap=True)
    beams_of(run, **params)
    for _ in range(steps):
        run.step()
    if how == "cancelled":
        run.scheduler.cancel(DOOR, 1)
    elif how == "deadline":
        run.now = 6.0
        run.scheduler.plan()
    else:
        (group,) = run.scheduler.requests.of_request((DOOR, 1))  # as where its adapter cannot be loaded
        run.scheduler.requests.end_group(group, Finish.ERROR, CapacityError("the end"))
    cache = run.scheduler.cache
    assert (cache.index.num_available, cache.reserved, cache.num_free_slots) == (40, 0, 4)
    run.take(run.scheduler.take_events())
    run.finish()  # steps in flight are dropped
    assert [run.ends[1, i][0].finish for i in range(count)] == [how] * count
    assert run.scheduler.num_waiting == run.scheduler.num_running == 0


@ENDS
def test_a_step_without_memory_computes_beams_and_samples_again(params, count) -> None:
    run = Run(limits(num_blocks=40, max_step_tokens=16))
    beams_of(run, **params)
    for _ in range(4):
        run.step()
    plan = run.scheduler.plan()
    assert plan is not None and plan.num_decodes == plan.num_rows > 1
    run.scheduler.abandon(plan, CapacityError("no memory"))
    run.finish()
    prompt, wanted = PROMPT, SamplingParams(max_tokens=6, **{"beam_width": 3, **params})
    if wanted.beam_pool:
        assert [run.tokens[1, i] for i in range(3)] == [t.tokens for t in pool(toy_logits, prompt, wanted)]
    elif wanted.beam_width == 3:
        assert texts_of(run, (1, 0)) == [text.tokens for text in competition(toy_logits, prompt, wanted)[-1]]
    else:
        assert [run.tokens[1, i] for i in range(4)] == [expected(prompt, 6, seed=i) for i in range(4)]


@ENDS
def test_a_prompt_that_does_not_fit_in_memory_ends_its_sequences_once(params, count) -> None:
    run = Run(limits(num_blocks=40))
    beams_of(run, **params)
    plan = run.scheduler.plan()
    assert plan is not None
    run.scheduler.abandon(plan, CapacityError("no memory"))
    run.take(run.scheduler.take_events())
    assert run.ends[1, 0][0].finish == "error" and "no memory" in run.ends[1, 0][0].error
    run.scheduler.cancel(DOOR, 1)  # as the door does after an error
    run.take(run.scheduler.take_events())
    run.finish()
    assert [len(run.ends[1, i]) for i in range(count)] == [1] * count


@ENDS
def test_no_new_tokens_end_at_once(params, count) -> None:
    run = Run(limits())
    beams_of(run, max_tokens=0, **params)
    assert [run.ends[1, i][0].finish for i in range(count)] == ["length"] * count
    assert not run.scheduler.has_work


@pytest.mark.parametrize(("params", "count"), [({}, 1), ({"beam_pool": True}, 3)], ids=["beams", "pool"])
def test_beams_without_a_possible_token_end_with_an_error_of_their_request_alone(params, count) -> None:
    run = Run(limits(num_blocks=40))
    words, ends = [[token] for token in range(VOCAB - 2)], {"end_id": VOCAB - 1, "more_end_ids": [VOCAB - 2]}
    beams_of(run, bad_words=words, min_tokens=3, **ends, **params)
    run.submit(2, [5, 4, 3], max_tokens=6)
    run.finish()
    for end in (run.ends[1, i][0] for i in range(count)):
        assert (end.finish, end.code) == (
            "error",
            "INVALID_ARG",
        ) and "no token is possible after" in end.error
    assert run.ends[2, 0][0].finish == "length" and run.tokens[2, 0] == expected([5, 4, 3], 6)


def test_a_pool_is_the_answer_where_its_beams_cannot_go_on() -> None:
    """All but 3, the end, and 9 is banned; behind 9 they are, too."""
    run = Run(limits(num_blocks=40))
    words = [[token] for token in range(VOCAB) if token not in (3, 9)] + [[9, 3], [9, 9]]
    beams_of(run, bad_words=words, end_id=3, beam_pool=True)
    run.finish()
    assert run.tokens[1, 0] == [3] and run.ends[1, 0][0].finish == "end_id"


class NanDevice(ToyDevice):
    """The logits of one of several beams are not numbers, from the third step on."""

    def candidates(self, beams, contexts):
        ids, log_probs = super().candidates(beams, contexts)
        if len(contexts[beams.rows[-1]]) > len(PROMPT) + 1:
            assert len(log_probs) > 1
            log_probs[-1] = np.nan
        return ids, log_probs


@pytest.mark.parametrize(("params", "count"), [({}, 1), ({"beam_pool": True}, 3)], ids=["beams", "pool"])
def test_logits_of_a_beam_that_are_not_numbers_are_an_error_of_that_request(params, count) -> None:
    run = Run(limits(num_blocks=40))
    run.device = NanDevice(run.device.limits)
    beams_of(run, **params)
    run.submit(2, [5, 4, 3], max_tokens=6)
    run.finish()
    assert [len(run.ends[1, i]) for i in range(count)] == [1] * count
    for i in range(count):
        assert run.ends[1, i][0].finish == "error" and "not numbers" in run.ends[1, i][0].error
    assert run.ends[2, 0][0].finish == "length" and run.tokens[2, 0] == expected([5, 4, 3], 6)


# ---------------------------------------------------------------- samples and outputs of a real model


@pytest.mark.parametrize("length", [1, 2, 13])
def test_sample_i_is_the_request_alone_with_its_seed_plus_i(length: int) -> None:
    model = gpt2()
    prompt = prompts_of([length], model.config.vocab_size)[0]
    params = {"max_tokens": 10, "top_k": 0, "temperature": 1.5, "end_id": 4, "repetition_penalty": 1.2}
    offline = offline_engine(model, keep_logits=False)
    together = offline.generate([prompt], SamplingParams(seed=7, num_return_sequences=6, **params))[0]
    alone = [offline.generate([prompt], SamplingParams(seed=7 + i, **params))[0].tokens for i in range(6)]
    assert [one.tokens for one in together.sequences] == alone
    assert len({tuple(tokens) for tokens in alone}) > 3


def test_the_context_embedding_and_log_prob_come_with_the_beams() -> None:
    model = gpt2()
    offline = offline_engine(model, keep_logits=False)
    wanted = {"return_context_embedding": True, "return_context_log_prob": True}
    alone = offline.generate([PROMPT], SamplingParams(max_tokens=1, **wanted))[0]
    beams = offline.generate([PROMPT], SamplingParams(max_tokens=5, beam_width=3, **wanted))[0]
    assert np.array_equal(alone.embedding, beams.embedding) and len(beams.sequences) == 3
    assert offline.scheduler.requests.num_extra_outputs == 0
