"""Learned chances of drafts: a sequence whose first drafts were wrong is tried again, and searches that find
nothing lead to steps without drafts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backend.engine.toy_device import Run, limits
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.speculation.depth import DepthPolicy, StepCosts
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.speculation.records import HEADS, DraftRecord
from tridecode.backend.engine.speculation.sources import AnswerSources
from tridecode.backend.engine.step.decode_graphs import decode_plan
from tridecode.backend.engine.step.plan import StepPlan, StepResult

#: one draft pays from a chance of 1.03 * 1.4 - 1 = 0.44 on
COSTS = StepCosts({1: 1.0}, {(1, 2): 1.4})


def a_sequence() -> Sequence:
    """Return a sequence that decodes."""
    run = Run(limits())
    run.submit(1, [3, 4], max_tokens=30)
    run.step()
    (sequence,) = run.scheduler.planner._decode.decoding
    return sequence


def steps_with_drafts(learning: Learning, sequence: Sequence, steps: int, right: bool) -> list[int]:
    """Run steps of a sequence whose drafts are all right or all wrong; return those that had a draft."""
    found = []
    for step in range(steps):
        (count,) = learning.plan_ahead([sequence], [1], True)
        if count:
            assert sequence.draft_record is not None
            learning.policy.learn(sequence.draft_record, count, count if right else 0)
            found.append(step)
    return found


def test_a_sequence_whose_first_drafts_were_wrong_gets_drafts_again() -> None:
    """Drafts of other sequences are right, so the chance of all stays high."""
    learning, sequence, other = (
        Learning(DepthPolicy(COSTS, 1), None, planned=HEADS),
        a_sequence(),
        a_sequence(),
    )
    assert len(steps_with_drafts(learning, other, 40, right=True)) == 40
    wrong = steps_with_drafts(learning, sequence, 60, right=False)
    assert len(wrong) < 40, "drafts become rare where they are wrong"
    assert sum(step >= 40 for step in wrong) <= 6
    right = steps_with_drafts(learning, sequence, 200, right=True)
    assert right and right[0] < 100, "the sequence is tried again"
    assert len(right) > 100, "and keeps its drafts, which are right now"


def test_drafts_that_are_always_wrong_are_tried_rarely() -> None:
    learning, sequence = Learning(DepthPolicy(COSTS, 1), None, planned=HEADS), a_sequence()
    tried = steps_with_drafts(learning, sequence, 20_000, right=False)
    assert sum(step < 2000 for step in tried) <= 10 and len(tried) <= 20
    assert max(tried) > 16_000, "also after long"


def test_a_drafter_that_becomes_right_is_used_again() -> None:
    learning, sequence = Learning(DepthPolicy(COSTS, 1), None, planned=HEADS), a_sequence()
    steps_with_drafts(learning, sequence, 700, right=False)
    right = steps_with_drafts(learning, sequence, 1000, right=True)
    assert right[0] < 400 and right == list(range(right[0], 1000))


def result(*matched: int) -> StepResult:
    """Return the result of a step whose rows have found matches of these lengths in themselves."""
    rows = len(matched)
    found = np.array([(count, 1 if count else 0, 0) for count in matched], np.int32)
    return StepResult(np.ones(rows, np.int32), np.zeros(rows, np.float32), found=(np.arange(rows), found))


def plan_of(*sequences: Sequence) -> StepPlan:
    plan = decode_plan(len(sequences))
    plan.sequences = list(sequences)
    return plan


@pytest.mark.parametrize("lengths", [(0, 0), (0, 5)])
def test_steps_have_drafts_from_the_first_match_to_the_last(lengths: tuple[int, int]) -> None:
    learning = Learning(DepthPolicy(None, 4), AnswerSources(lambda _: True))
    rows = [a_sequence(), a_sequence()]
    for sequence in rows:
        sequence.draft_record = DraftRecord()
    for matched in (0, 0), lengths, (0, 0):
        learning.end_step(plan_of(*rows), result(*matched))
        assert learning.finds_nothing is not any(matched)
        assert learning.choose(rows, [4, 4]) == [4 if count else 0 for count in matched]
