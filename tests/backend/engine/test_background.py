"""Prompts of the lowest priority next to others: what a step has of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backend.engine.toy_device import Run, expected, limits
from tridecode.backend.base.priority import LOWEST_PRIORITY
from tridecode.backend.engine.schedule import prompt_spread
from tridecode.backend.engine.step.plan import StepPlan, StepResult

LINE, OTHERS = [3] * 8, [5] * 8


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prompt_spread, "FEWEST_TOKENS", 12)
    monkeypatch.setattr(prompt_spread, "ATTENTIVE_STEPS", 6)
    yield


class Noted:
    """A run that notes the prompt tokens of each step: those of LINE and those of other prompts."""

    def __init__(self) -> None:
        self.run = Run(limits(num_blocks=200, max_sequences=20, max_step_tokens=100), overlap=True)
        self.steps: list[tuple[int, int]] = []
        device_run = self.run.device.run

        def noting(plan: StepPlan) -> StepResult:
            prompts = plan.token_ids[plan.num_decodes :].tolist()
            self.steps.append((prompts.count(LINE[0]), prompts.count(OTHERS[0])))
            return device_run(plan)

        self.run.device.run = noting  # type: ignore[method-assign]

    def lines(self, count: int, first: int = 100) -> None:
        for request in range(first, first + count):
            self.run.submit(request, LINE, max_tokens=2, priority=LOWEST_PRIORITY, cache="off")

    def other(self, request: int) -> None:
        self.run.submit(request, OTHERS, max_tokens=2, cache="off")


def test_lines_alone_fill_a_step() -> None:
    noted = Noted()
    noted.lines(12)
    noted.run.step()
    assert noted.steps[0] == (96, 0)
    noted.run.finish()


def test_a_step_with_another_prompt_has_no_line() -> None:
    noted = Noted()
    noted.lines(4)
    noted.other(1)
    noted.run.finish()
    assert noted.steps[0] == (0, 8)
    assert sum(lines for lines, _ in noted.steps) == 32
    assert all(noted.run.tokens[request, 0] == expected(LINE, 2) for request in range(100, 104))
    assert noted.run.tokens[1, 0] == expected(OTHERS, 2)


def test_lines_are_spread_after_another_prompt_and_only_for_a_while() -> None:
    noted = Noted()
    noted.other(1)
    noted.run.step()
    noted.lines(4)
    for _ in range(3):
        noted.run.step()
    assert [lines for lines, _ in noted.steps[1:4]] == [12, 12, 8]
    for _ in range(4):
        noted.run.step()
    noted.lines(5, first=200)
    noted.run.step()
    assert noted.steps[-1][0] == 40
    noted.run.finish()


def test_another_prompt_goes_before_lines_that_have_begun() -> None:
    noted = Noted()
    noted.other(1)
    noted.run.step()
    noted.lines(4)
    noted.run.step()
    noted.other(2)
    noted.run.step()
    assert noted.steps[1:3] == [(12, 0), (0, 8)]
    noted.run.finish()
    assert all(noted.run.tokens[request, 0] == expected(LINE, 2) for request in range(100, 104))


def test_the_limit_follows_what_lines_need() -> None:
    """A load of more prompt tokens per step than the smallest limit is not starved."""
    noted = Noted()
    noted.other(1)
    noted.run.step()
    for first in range(100, 200, 5):
        noted.lines(5, first)
        for _ in range(3):
            noted.run.step()
        noted.other(1000 + first)
    noted.run.finish()
    assert max(lines for lines, _ in noted.steps) > 12
