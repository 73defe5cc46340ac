"""Sequences that fork: the toy device shows a wrongly shared block or slot, a real model on the CPU shows
that a fork continues as its parent does."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.engine.toy_device import DOOR, VOCAB, Run, expected, limits
from tests.backend.hf_models import bloom, gpt2, llama
from tridecode.backend.base.errors import CapacityError, RequestError
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parts import forks as fork_part
from tridecode.backend.engine.schedule.sequence import Sequence, Stage
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest, Submit

PROMPT = [1, 2, 3, 4, 5]
MODELS = pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])


class Forks:
    """Random actions on a run, and of every sequence the output it had when it was submitted or forked."""

    def __init__(self, run: Run):
        self.run, self.requests, self.forks = run, 0, 0
        self.wanted: dict[tuple[int, int], tuple[Sequence, list[int]]] = {}

    def submit(self, data: st.DataObject) -> None:
        self.requests += 1
        prompts = data.draw(
            st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7), min_size=1, max_size=2)
        )
        count, end_id = data.draw(st.integers(0, 10)), data.draw(st.sampled_from([-1, 3, 17]))
        seed = data.draw(st.integers(0, 3))
        before = set(self.run.open())
        with contextlib.suppress(RequestError, CapacityError):
            self.run.submit(self.requests, *prompts, max_tokens=count, end_id=end_id, seed=seed)
        for sequence in set(self.run.open()) - before:
            self.wanted[self.requests, sequence.index] = sequence, []

    def fork(self, data: st.DataObject) -> None:
        if data.draw(st.booleans()):
            self.run.settle()
        sequences = self.run.open()
        if 0 < len(sequences) < 12:
            parent = data.draw(st.sampled_from(sequences))
            token = data.draw(st.none() | st.integers(0, VOCAB - 1)) if parent.output else None
            self.forks += 1
            child = self.run.scheduler.fork(parent, 100 + self.forks, token)
            output = parent.output if token is None else [*parent.output[:-1], token]
            self.wanted[child.group.request, child.index] = child, list(output)
            self.run.take(self.run.scheduler.take_events())

    def cancel(self, data: st.DataObject) -> None:
        self.run.scheduler.cancel(DOOR, data.draw(st.integers(1, self.requests + 1)))
        self.run.take(self.run.scheduler.take_events())

    def check_ends(self) -> None:
        """Every sequence got the tokens that it gets on its own."""
        for key, (sequence, output) in self.wanted.items():
            params, (end,) = sequence.params, self.run.ends[key]
            prompt = sequence.prompt.tolist()
            alone = expected(prompt, params.max_tokens, params.end_id, params.seed, output)
            found = output + self.run.tokens[key]
            if end.finish == "cancelled":
                assert found == alone[: len(found)]
            else:
                assert found == alone
                assert end.finish == ("end_id" if alone[-1:] == [params.end_id] else "length")


@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_forks_get_the_tokens_of_a_run_on_their_own(overlap: bool, data: st.DataObject) -> None:
    run = Run(
        limits(
            num_blocks=data.draw(st.integers(5, 16)),
            block_tokens=data.draw(st.sampled_from([1, 3, 4])),
            max_sequences=data.draw(st.integers(2, 5)),
            max_sequence_tokens=20,
            long_prompt_tokens=data.draw(st.sampled_from([0, 3, 6, 9])),
            recompute_long=data.draw(st.booleans()),
        ),
        overlap,
    )
    forks = Forks(run)
    forks.submit(data)
    actions = st.sampled_from(["submit", "fork", "fork", "step", "step", "step", "cancel"])
    for action in data.draw(st.lists(actions, max_size=30)):
        if action == "step":
            run.step()
        else:
            getattr(forks, action)(data)
        run.check_holders()
    while run.scheduler.has_work:
        run.step()
        run.check_holders()
    run.finish()
    forks.check_ends()


def decoding(run: Run, steps: int, max_tokens: int = 20) -> Sequence:
    """Return the sequence of a request of PROMPT after this many tokens."""
    run.submit(1, PROMPT, max_tokens=max_tokens)
    for _ in range(steps):
        run.step()
    (sequence,) = run.open()
    assert len(sequence.output) == steps
    return sequence


def plans_of(run: Run, advance: Callable[[], None]) -> list[StepPlan]:
    """The plans that are executed while the run advances."""
    plans: list[StepPlan] = []
    execute = run.device.run
    run.device.run = lambda plan: plans.append(plan) or execute(plan)
    advance()
    run.device.run = execute
    return plans


def copies_of(run: Run) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Slot and block copies of the next step."""
    (plan,) = plans_of(run, run.step)
    forks = plan.part(fork_part.Forks) or fork_part.Forks()
    return forks.slots, forks.blocks


def test_a_fork_shares_its_blocks_until_one_of_the_two_writes() -> None:
    run = Run(limits())
    parent = decoding(run, steps=6)  # 10 of 5 + 6 tokens are in the cache: 2 full blocks and a half
    held = list(parent.blocks)
    child = run.scheduler.fork(parent, 1)
    assert child.stage is Stage.DECODE and child.blocks == held
    assert run.scheduler.cache.index.num_available == 12 - 3
    slot_copies, block_copies = copies_of(run)
    assert slot_copies == [(parent.slot, child.slot)]
    assert [source for source, _ in block_copies] == [held[2]]
    assert parent.blocks[:2] == child.blocks[:2] == held[:2] and parent.blocks[2] != child.blocks[2]
    assert run.scheduler.cache.index.num_available == 12 - 4
    assert copies_of(run) == ([], [])
    run.finish()
    assert run.tokens[1, 0] == expected(PROMPT, 20) == run.tokens[1, 0][:6] + run.tokens[1, 1]


def test_a_fork_at_the_end_of_a_block_copies_no_block() -> None:
    run = Run(limits())
    parent = decoding(run, steps=4)  # 8 tokens are in the cache
    run.scheduler.fork(parent, 1)
    assert copies_of(run)[1] == []
    run.finish()
    assert run.tokens[1, 1] == expected(PROMPT, 20)[4:]


def test_a_fork_of_a_fork_copies_the_first_parents_slot() -> None:
    run = Run(limits())
    parent = decoding(run, steps=3)
    child = run.scheduler.fork(parent, 1)
    grandchild = run.scheduler.fork(child, 2)
    assert copies_of(run)[0] == [(parent.slot, child.slot), (parent.slot, grandchild.slot)]
    run.finish()
    assert run.tokens[1, 1] == run.tokens[1, 2] == expected(PROMPT, 20)[3:]


def test_a_fork_of_a_fork_with_another_token_starts_from_its_tokens() -> None:
    run = Run(limits())
    child = run.scheduler.fork(decoding(run, steps=3), 1, VOCAB - 1)
    run.scheduler.fork(child, 2)
    assert copies_of(run)[0] == []
    run.finish()
    alone = expected(PROMPT, 20, output=[*expected(PROMPT, 2), VOCAB - 1])
    assert run.tokens[1, 1] == run.tokens[1, 2] == alone[3:]


def test_the_slot_of_a_fork_that_ended_at_once_is_not_copied_to() -> None:
    run = Run(limits())
    run.scheduler.fork(decoding(run, steps=3), 1)
    run.scheduler.cancel(DOOR, 1)
    run.submit(2, [9, 8], max_tokens=2)
    assert copies_of(run) == ([], [])


def test_the_copy_of_a_block_is_dropped_when_the_fork_is_preempted_for_it() -> None:
    """The fork takes the last free block for its copy; then an older sequence needs a block."""
    run = Run(limits(num_blocks=4, max_sequence_tokens=16))
    run.submit(1, PROMPT[:3], max_tokens=10)
    run.submit(2, PROMPT, max_tokens=10)
    run.step()
    run.step()
    _, parent = run.open()
    child = run.scheduler.fork(parent, 1)
    assert run.scheduler.cache.index.num_available == 1
    assert copies_of(run) == ([], []) and child.stage is Stage.WAITING
    run.finish()
    assert run.tokens[2, 0] == expected(PROMPT, 10) == run.tokens[2, 0][:2] + run.tokens[2, 1]


def test_another_token_starts_another_text() -> None:
    run = Run(limits())
    parent = decoding(run, steps=3)
    token = (parent.output[-1] + 1) % VOCAB
    output = [*parent.output[:-1], token]
    run.scheduler.fork(parent, 1, token)
    run.finish()
    assert run.tokens[1, 0] == expected(PROMPT, 20)
    assert output + run.tokens[1, 1] == expected(PROMPT, 20, output=output)


def test_a_token_that_ends_the_fork_ends_it_at_once() -> None:
    run = Run(limits())
    run.submit(1, PROMPT, max_tokens=9, end_id=VOCAB - 1)
    run.step()
    run.scheduler.fork(run.open()[0], 1, VOCAB - 1)
    run.finish()
    assert run.ends[1, 1][0].finish == "end_id" and run.tokens[1, 1] == []
    assert len(run.tokens[1, 0]) > 1


def test_forks_without_blocks_are_preempted_and_get_the_right_tokens() -> None:
    run = Run(limits(num_blocks=7, max_sequence_tokens=28))
    parent = decoding(run, steps=5)
    for index in (1, 2, 3):
        run.scheduler.fork(parent, index, index)
    assert run.scheduler.num_running == 4
    run.finish()
    assert run.scheduler.counters.preemptions > 0
    first = expected(PROMPT, 4)
    for index in (1, 2, 3):
        output = [*first, index]
        assert output + run.tokens[1, index] == expected(PROMPT, 20, output=output)
    assert run.tokens[1, 0] == expected(PROMPT, 20)


def test_a_fork_is_not_planned_beyond_its_last_token() -> None:
    run = Run(limits(), overlap=True)
    run.submit(1, PROMPT, max_tokens=9)
    for _ in range(3):
        run.step()
    run.settle()
    (parent,) = run.open()
    assert len(parent.output) == 3
    assert run.scheduler.fork(parent, 1).stage is Stage.DECODE
    assert sum(plan.num_rows for plan in plans_of(run, run.finish)) == 2 * (9 - 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_fork_that_finds_no_slot_or_a_token_in_flight_waits(overlap: bool) -> None:
    run = Run(limits(max_sequences=4 if overlap else 1), overlap)
    run.submit(1, PROMPT, max_tokens=9)
    for _ in range(3):
        run.step()
    (parent,) = run.open()
    known = len(parent.output)
    child = run.scheduler.fork(parent, 1)
    assert child.stage is Stage.WAITING and run.scheduler.num_waiting == 1
    run.finish()
    assert run.tokens[1, 1] == expected(PROMPT, 9)[known:]


def test_a_cancelled_request_ends_its_forks_and_frees_their_blocks() -> None:
    run = Run(limits())
    run.scheduler.fork(decoding(run, steps=3), 1)
    run.scheduler.cancel(DOOR, 1)
    assert run.scheduler.cache.index.num_available == 12 and not run.scheduler.has_work
    run.take(run.scheduler.take_events())
    assert [run.ends[1, index][0].finish for index in (0, 1)] == ["cancelled", "cancelled"]
    assert run.scheduler.counters.cancelled == 2


def test_a_step_without_memory_computes_forks_again() -> None:
    run = Run(limits())
    run.scheduler.fork(decoding(run, steps=3), 1)
    plan = run.scheduler.plan()
    assert plan is not None and plan.part(fork_part.Forks).slots
    run.scheduler.abandon(plan, CapacityError("no memory"))
    run.finish()
    assert run.tokens[1, 1] == expected(PROMPT, 20)[3:]


class RealRun:
    """The scheduler and a CPU engine: tokens by index of one request."""

    def __init__(self, offline: OfflineEngine, prompt: list[int], params: SamplingParams):
        self.scheduler, self.engine = offline.scheduler, offline.engine
        request = SequenceRequest(np.asarray(prompt, np.int32).tobytes(), params)
        self.scheduler.submit(DOOR, Submit(0, [request]))
        self.tokens: dict[int, list[int]] = defaultdict(list)
        (group,) = self.scheduler.requests.of_request((DOOR, 0))
        (self.sequence,) = group.sequences

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        for _, event in self.scheduler.commit(plan, self.engine.launch(plan).wait()):
            self.tokens[event.sequence] += event.tokens

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()


@MODELS
@pytest.mark.parametrize("at", [1, 4, 5])
def test_greedy_forks_equal_their_parent_or_a_fresh_run(make, at: int) -> None:
    """Blocks have 8 tokens and the prompt 13: forks in the middle and at the end of a block."""
    model = make()
    prompt = prompts_of([13], model.config.vocab_size)[0]
    tokens = hf_greedy(model, prompt, 20)[0]
    run = RealRun(offline_engine(model, keep_logits=False), prompt, SamplingParams(max_tokens=20))
    while len(run.sequence.output) < at:
        run.step()
    other = (tokens[at - 1] + 1) % model.config.vocab_size
    run.scheduler.fork(run.sequence, 1)
    run.scheduler.fork(run.sequence, 2, other)
    assert run.scheduler.num_running == 3
    run.finish()
    assert run.tokens[0] == tokens and run.tokens[1] == tokens[at:]
    assert run.tokens[2] == hf_greedy(model, [*prompt, *tokens[: at - 1], other], 20 - at)[0]


def test_a_sampled_fork_draws_what_its_parent_draws() -> None:
    """Each of these parameters has state in the slot: the generator, counts, the history, top_p's decay."""
    model = gpt2()
    prompt = prompts_of([9], model.config.vocab_size)[0]
    params = SamplingParams(
        max_tokens=24, top_k=0, top_p=0.9, top_p_decay=0.97, temperature=1.3, seed=5, min_tokens=24,
        repetition_penalty=1.4, frequency_penalty=0.2, bad_words=[prompt[:2], [7]], end_id=3,
    )  # fmt: skip
    run = RealRun(offline_engine(model, keep_logits=False), prompt, params)
    while len(run.sequence.output) < 6:
        run.step()
    run.scheduler.fork(run.sequence, 1)
    run.finish()
    assert len(set(run.tokens[0])) > 8 and run.tokens[1] == run.tokens[0][6:]
