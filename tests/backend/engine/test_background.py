"""Prompts of the lowest priority next to others: how many of them a step has."""

from __future__ import annotations

from tests.backend.engine.toy_device import Run, expected, limits
from tridecode.backend.base.priority import LOWEST_PRIORITY
from tridecode.backend.engine.schedule.prefill_planner import PUT_OFF_STEPS
from tridecode.backend.engine.step.plan import StepPlan, StepResult

LINE, OTHERS = [3] * 8, [5] * 8


class Noted:
    """A run that records the prompt tokens of each step, separately for LINE and other prompts."""

    def __init__(self, max_step_tokens: int = 100) -> None:
        sizes = limits(num_blocks=200, max_sequences=20, max_step_tokens=max_step_tokens)
        self.run = Run(sizes, overlap=True)
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


def test_another_prompt_goes_before_lines_that_have_begun() -> None:
    noted = Noted(max_step_tokens=20)
    noted.lines(4)
    noted.run.step()
    noted.other(1)
    noted.run.step()
    assert noted.steps[:2] == [(20, 0), (0, 8)]
    noted.run.finish()
    assert all(noted.run.tokens[request, 0] == expected(LINE, 2) for request in range(100, 104))


def test_lines_wait_for_a_bounded_number_of_steps() -> None:
    noted = Noted()
    noted.lines(3)
    for request in range(20):
        noted.other(request)
        noted.run.step()
    assert [lines for lines, _ in noted.steps[: PUT_OFF_STEPS + 1]] == [0] * PUT_OFF_STEPS + [24]
    assert noted.steps[PUT_OFF_STEPS][1] == 8
    noted.run.finish()


def test_a_line_does_not_give_way_while_an_urgent_prompt_waits_for_its_blocks() -> None:
    """A line and an urgent prompt begin with the same 96 tokens; two steps have computed 16 of them. Further
    prompts arrive in every step. The line computes the other common tokens at once, then gives way."""
    sizes = limits(num_blocks=200, max_sequences=12, max_step_tokens=16, max_sequence_tokens=400)
    run, common = Run(sizes), [(7 * i) % 50 for i in range(96)]
    run.submit(1, [*common, *[4] * 200], max_tokens=1, priority=LOWEST_PRIORITY)
    run.step()
    run.submit(2, [*common, 5], max_tokens=1)
    steps = 0
    while not run.tokens[2, 0]:
        steps += 1
        assert steps <= 96 // 16 + 2, "the urgent prompt waits for a line that gives way to others"
        run.submit(10 + steps, [steps % 50] * 8, max_tokens=1, cache="off")
        run.step()
    (line,) = (one for one in run.open() if one.group.request == 1)
    before = run.scheduler.cache.lengths[line.slot]
    run.submit(3, [6] * 8, max_tokens=1, cache="off")
    run.step()
    assert run.scheduler.cache.lengths[line.slot] == before, "nobody waits for the rest of the line"
    run.finish()
    assert run.tokens[2, 0] == expected([*common, 5], 1)
    assert run.scheduler.counters.computed_prompt_tokens == 296 + 1 + 8 * (steps + 1)
