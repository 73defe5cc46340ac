"""The number of drafts that the engine chooses against the best fixed number, with times of a GPU.

Times in us of SmolLM2-135M with one sequence, measured on an H200: those before the first request, and those
of steps in service, where host and device overlap. Chances: of each draft if those before it are right, on
prompts that were held back in training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import pytest

from tests.backend.engine.test_draft_chances import a_sequence
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.speculation.depth import DepthPolicy, StepCosts
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.speculation.records import DRAFT_MODEL, GLIDE, HEADS

#: tokens of an answer
ANSWER = 128
#: a step takes up to this share longer than usual
JITTER = 0.1


@dataclass(frozen=True)
class Drafter:
    """source: of its drafts. measured: us of a step with 0, 1, ... drafts at start-up; served: in service."""

    source: int
    measured: tuple[int, ...]
    served: tuple[int, ...]
    chances: tuple[float, ...]

    def costs(self) -> StepCosts:
        plain, *several = (us / 1e6 for us in self.measured)
        return StepCosts({1: plain}, {(1, drafts + 1): s for drafts, s in enumerate(several, 1)})


DRAFTERS = {
    "heads": Drafter(HEADS, (734, 790, 777, 777, 833), (667, 829, 829, 843, 857), (0.6, 0.35, 0.29, 0.29)),
    "glide": Drafter(GLIDE, (637, 741, 807, 872, 1003), (668, 875, 944, 1010, 1086), (0.48, 0.44, 0.4, 0.4)),
    "model": Drafter(
        DRAFT_MODEL, (662, 809, 897, 986, 1120), (667, 875, 964, 1040, 1120), (0.515, 0.48, 0.38, 0.38)
    ),
    "wrong": Drafter(GLIDE, (637, 741, 807, 872, 1003), (668, 875, 944, 1010, 1086), (0.02,) * 4),
}


@dataclass
class Service:
    """A server with one sequence after the other. us, tokens: in total. counts: drafts of each step."""

    us: float
    tokens: int
    counts: list[int]

    @property
    def us_per_token(self) -> float:
        return self.us / self.tokens


@cache
def the_sequence() -> Sequence:
    return a_sequence()


def new_sequence() -> Sequence:
    """Return a sequence without a result of a draft."""
    sequence = the_sequence()
    sequence.draft_record = None
    return sequence


def serve(drafter: Drafter, most: int, steps: int, fixed: bool = False, slow: int = 3) -> Service:
    """Run steps with up to `most` drafts. fixed: always as many. slow: number of the first steps with drafts
    that take four times as long as the others."""
    dice = random.Random(most)
    policy = DepthPolicy(None if fixed else drafter.costs(), most)
    learning = Learning(policy, None, planned=drafter.source, keeps_cache=drafter.source != HEADS)
    found, sequence, left, drafts = Service(0.0, 0, []), new_sequence(), ANSWER, 0
    for _ in range(steps):
        us = drafter.served[drafts] * (1 + JITTER * dice.random())
        if drafts and slow:
            us, slow = 4 * us, slow - 1
        found.us += us
        found.counts.append(drafts)
        policy.took(1, drafts + 1, found.us / 1e6)
        right = 0
        while right < drafts and dice.random() < drafter.chances[right]:
            right += 1
        if drafts:
            assert sequence.draft_record is not None
            policy.learn(sequence.draft_record, drafts, right)
        found.tokens += right + 1
        left -= right + 1
        if left <= 0:
            sequence, left = new_sequence(), ANSWER
        (drafts,) = learning.plan_ahead([sequence], [min(most, left - 1)], True) if left > 1 else (0,)
    return found


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("name", ["heads", "glide", "model"])
def test_the_choice_is_nearly_as_fast_as_the_best_fixed_number(name: str, most: int) -> None:
    drafter = DRAFTERS[name]
    fixed = min(serve(drafter, count, 4000, fixed=True, slow=0).us_per_token for count in range(most + 1))
    found = serve(drafter, most, 4000)
    assert found.us_per_token < 1.02 * fixed
    assert sum(count > 0 for count in found.counts[20:60]) > 30, "from the start"


def test_a_drafter_that_is_always_wrong_costs_nothing() -> None:
    found = serve(DRAFTERS["wrong"], 4, 4000)
    plain = serve(DRAFTERS["wrong"], 0, 4000, fixed=True)
    assert found.us_per_token < 1.01 * plain.us_per_token


def test_a_pause_of_the_host_does_not_end_drafts() -> None:
    """Each interval of some steps is five times as long as it should be."""
    drafter = DRAFTERS["heads"]
    policy = DepthPolicy(drafter.costs(), 4)
    learning, sequence, now = Learning(policy, None, planned=HEADS), new_sequence(), 0.0
    for step in range(200):
        (drafts,) = learning.plan_ahead([sequence], [4], True)
        assert drafts, step
        now += drafter.served[drafts] * (4.5 if step % 3 == 0 else 1.0) / 1e6
        policy.took(1, drafts + 1, now)
        assert sequence.draft_record is not None
        policy.learn(sequence.draft_record, drafts, 2 if step % 2 else 0)
