"""Decode rows of several tokens in the scheduler: random drafts and random numbers of kept tokens, while the
next step is in flight, give the tokens of one token a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.engine.toy_device import VOCAB, Run, expected, limits, next_token
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.speculation.depth import DepthPolicy
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.speculation.records import DRAFT_MODEL
from tridecode.backend.engine.step.plan import MOST_QUERIES, StepPlan
from tridecode.kernels import operands


class DeviceDrafter:
    """Forced drafts whose ids are on the device: as many as it draws."""

    needs_token = False

    def __init__(self, random: np.random.Generator, most: int = MOST_QUERIES - 1):
        self.random, self.most = random, most
        self.planned = self.in_flight = 0

    def drafts(self, sequence: Sequence, most: int) -> np.ndarray:
        count = int(self.random.integers(0, min(most, self.most) + 1))
        self.planned += count
        self.in_flight += sequence.in_flight > 0
        return np.full(count, -1, np.int32)

    def propose(self, known: list[int], seed: int, generated: int) -> list[int]:
        """Return drafts: a random number that the device accepts, then wrong ones."""
        drafts: list[int] = []
        right = int(self.random.integers(0, MOST_QUERIES))
        for i in range(MOST_QUERIES - 1):
            token = next_token([*known, *drafts], seed, generated + i)
            drafts.append(token if i < right else (token + 1) % VOCAB)
        return drafts


class HostDrafter:
    """Forced drafts of a drafter that reads all tokens: some that follow, then others."""

    needs_token = True

    def __init__(self, random: np.random.Generator):
        self.random = random

    def drafts(self, sequence: Sequence, most: int) -> np.ndarray:
        assert sequence.in_flight == 0, "asked for a sequence whose tokens are not known"
        known, seed = sequence.known_tokens().tolist(), sequence.params.seed
        drafts: list[int] = []
        for i in range(int(self.random.integers(0, most + 1))):
            token = next_token([*known, *drafts], seed, len(sequence.output) + i)
            drafts.append(token if self.random.random() < 0.7 else (token + 1) % VOCAB)
        return np.array(drafts, np.int32)


class PlannedDrafts:
    """Checks the parts of a planned drafter: its cache writes go only to unshared blocks of the row."""

    def __init__(self, run: Run):
        self.run, self.plan, self.rows = run, run.scheduler.plan, 0
        run.scheduler.plan = self.checked  # type: ignore[method-assign]

    def checked(self) -> StepPlan | None:
        plan = self.plan()
        part = None if plan is None else plan.part(Drafting)
        if plan is None or part is None:
            return plan
        assert 1 <= part.count <= MOST_QUERIES - 1
        cache, size = self.run.scheduler.cache, self.run.device.limits.block_tokens
        for row in part.rows.tolist():
            sequence, slot = plan.sequences[row], plan.slots.item(row)
            most = cache.lengths.item(slot) + part.count  # tokens if the row keeps all its drafts
            assert most <= self.run.device.limits.max_sequence_tokens
            first, columns = sequence.num_known // size, -(-most // size)  # of the newest token, at least
            assert plan.block_tables[row, first:columns].tolist() == sequence.blocks[first:columns]
            for block in sequence.blocks[first:columns]:
                assert cache.index.users(block) == 1, "a block that drafts are written to is shared"
            assert 1 <= sequence.draft_record.ahead <= part.count
            self.rows += 1
        return plan


def drafting_run(seed: int, overlap: bool | str, on_host: bool | str, **changes) -> Run:
    """Return a run with drafts. on_host "planned": a planned drafter on the device."""
    run, random = Run(limits(**changes), overlap), np.random.default_rng(seed)
    if on_host is True:
        run.scheduler.planner.use_drafter(HostDrafter(random))
    elif on_host == "planned":
        drafter = DeviceDrafter(random)
        learning = Learning(
            DepthPolicy(None, int(random.integers(1, MOST_QUERIES))), None, planned=DRAFT_MODEL
        )
        run.scheduler.planner.use_drafter(drafter, learning)
        run.device.propose, run.planned = drafter.propose, PlannedDrafts(run)  # type: ignore[attr-defined]
    else:
        drafter = DeviceDrafter(random)
        run.scheduler.planner.use_drafter(drafter)
        run.device.propose = drafter.propose
    return run


def kinds() -> pytest.MarkDecorator:
    every = [(False, False), (True, False), (False, True), (True, True), ("stages", True)]
    every += [(False, "planned"), (True, "planned")]
    return pytest.mark.parametrize(("overlap", "on_host"), every)


@kinds()
def test_rows_of_several_tokens_give_the_tokens_of_one_a_step(overlap, on_host: bool):
    run = drafting_run(1, overlap, on_host, max_sequences=16, max_step_tokens=32, num_blocks=60)
    prompts = {request: [request + 1, 5, 7][: 1 + request % 3] for request in range(5)}
    for request, prompt in prompts.items():
        run.submit(request, prompt, max_tokens=20, seed=request)
    steps = 0
    while run.scheduler.has_work or run.pending:
        run.step()
        run.check_holders()
        steps += 1
    for request, prompt in prompts.items():
        assert run.tokens[request, 0] == expected(prompt, 20, seed=request)
    assert steps < (60 if on_host == "planned" else 40)
    assert on_host != "planned" or run.planned.rows > 20
    run.finish()


def test_rows_are_placed_by_the_device_while_the_step_before_is_in_flight():
    run = drafting_run(3, True, False, max_sequences=16, max_step_tokens=32, num_blocks=40)
    run.submit(0, [4, 2], max_tokens=30)
    unknown = 0
    while run.scheduler.has_work or run.pending:
        run.step()
        if run.pending:
            plan = run.pending[-1][0]
            unknown += int((plan.context_lens < 0).sum())
    assert run.tokens[0, 0] == expected([4, 2], 30)
    drafter = run.scheduler.planner.drafts._drafter
    assert unknown > 3 and drafter.in_flight > 3 and drafter.planned > 10


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_load_with_drafts_equals_one_token_a_step(data):
    """Few blocks, so that sequences are preempted with rows in flight; end ids, forks and cancellations."""
    every = [(False, False), (True, False), (True, True), ("stages", True)]
    overlap, on_host = data.draw(st.sampled_from([*every, (False, "planned"), (True, "planned")]))
    slots = data.draw(st.integers(2, 12))
    run = drafting_run(
        data.draw(st.integers(0, 999)), overlap, on_host, max_sequences=slots, max_step_tokens=slots + 8,
        num_blocks=data.draw(st.integers(12, 24)), max_sequence_tokens=40,
    )  # fmt: skip
    wanted, cancelled = {}, set()
    for request in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
        count, end = data.draw(st.integers(1, 26)), data.draw(st.sampled_from([-1, 3]))
        samples = data.draw(st.sampled_from([1, 1, 2])) if slots > 2 else 1
        run.submit(request, prompt, max_tokens=count, seed=request, end_id=end, num_return_sequences=samples)
        for index in range(samples):
            wanted[request, index] = expected(prompt, count, end, seed=request + index)
        for _ in range(data.draw(st.integers(0, 4))):
            run.step()
            run.check_holders()
    if data.draw(st.booleans()):
        cancelled.add(0)
        run.scheduler.cancel(b"door", 0)
        run.take(run.scheduler.take_events())
    run.finish()
    for key, tokens in wanted.items():
        if key[0] not in cancelled:
            assert run.tokens[key] == tokens


@pytest.mark.parametrize("on_host", [True, "planned"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_fork_of_a_drafting_sequence_shares_no_block_that_is_written(overlap: bool, on_host):
    run = drafting_run(5, overlap, on_host, max_sequences=16, max_step_tokens=32, num_blocks=40)
    run.submit(0, [9, 1, 1], max_tokens=18)
    for _ in range(4):
        run.step()
    while run.pending:
        run.settle()
    (parent,) = run.open()
    child = run.scheduler.fork(parent, 1)
    known = child.known_tokens().tolist()[3:]
    run.finish()
    assert run.tokens[0, 0] == expected([9, 1, 1], 18)
    assert known + run.tokens[0, 1] == expected([9, 1, 1], 18)


def test_beams_and_rows_of_one_token_share_steps_with_drafts():
    run = drafting_run(2, True, False, max_sequences=16, max_step_tokens=32, num_blocks=60)
    run.submit(0, [3, 3], max_tokens=12, beam_width=2)
    run.submit(1, [8], max_tokens=25)
    plain = Run(limits(max_sequences=16, max_step_tokens=32, num_blocks=60), True)
    plain.submit(0, [3, 3], max_tokens=12, beam_width=2)
    run.finish()
    plain.finish()
    assert run.tokens[1, 0] == expected([8], 25)
    assert [step.tokens for step in run.beam_steps[0, 0]] == [step.tokens for step in plain.beam_steps[0, 0]]


def test_the_plans_limit_is_that_of_the_kernels():
    assert MOST_QUERIES == operands.MOST_QUERIES


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_nothing_is_drafted_for_a_step_that_has_prompts(keeps_cache: bool) -> None:
    """A step with a chunk of a prompt verifies nothing."""
    run = Run(limits(max_sequences=8, max_step_tokens=16, num_blocks=60, max_sequence_tokens=80))
    source = DeviceDrafter(np.random.default_rng(0))
    learning = Learning(DepthPolicy(None, 4), None, planned=DRAFT_MODEL, keeps_cache=keeps_cache)
    run.scheduler.planner.use_drafter(source, learning)
    run.device.propose, plan_next = source.propose, run.scheduler.plan  # type: ignore[assignment]
    plans: list[StepPlan] = []

    def planned() -> StepPlan | None:
        plan = plan_next()
        if plan is not None:
            plans.append(plan)
        return plan

    run.scheduler.plan = planned  # type: ignore[method-assign]
    run.submit(1, [3, 4], max_tokens=40, seed=1)
    for _ in range(4):
        run.step()
    run.submit(2, [5 + i % 7 for i in range(60)], max_tokens=4, seed=2)
    run.finish()
    has_prompts = [plan.num_decodes < plan.num_rows for plan in plans]
    drafts = [plan.part(Drafting) is not None for plan in plans]
    inner = [place for place, both in enumerate(zip(has_prompts, has_prompts[1:])) if all(both)]
    assert len(inner) >= 3 and not any(drafts[place] for place in inner)
    assert drafts[inner[-1] + 1], "the step behind the last chunk verifies"
    assert sum(drafts) > 5
    assert run.tokens[1, 0] == expected([3, 4], 40, seed=1)
