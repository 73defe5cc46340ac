"""The prefill budget of a step: next to decode rows, and while sequences queue for few slots."""

from __future__ import annotations

import pytest

from tests.backend.engine.toy_device import Run, expected, limits
from tridecode.backend.engine.schedule import planner
from tridecode.backend.engine.step.plan import StepPlan, StepResult
from tridecode.tools.bench.studies.step_model import StepCost, simulate

#: reading the weights takes as long as multiplying 200 tokens
COST = StepCost(weights=4.0, token=0.02, cached_token=0.0)


def prompt_tokens(run: Run, steps: int = 1000) -> list[int]:
    """Return the prompt tokens of each step, until all requests have ended or for `steps` steps."""
    found: list[int] = []
    device_run = run.device.run

    def noting(plan: StepPlan) -> StepResult:
        found.append(plan.num_tokens - plan.num_decodes)
        return device_run(plan)

    run.device.run = noting  # type: ignore[method-assign]
    while len(found) < steps and (run.scheduler.has_work or run.pending):
        run.step()
    run.device.run = device_run  # type: ignore[method-assign]
    return found


def load(**changes) -> Run:
    run = Run(limits(num_blocks=40, max_step_tokens=100, **changes), overlap=True)
    for request in range(24):
        run.submit(request, [request % 7 + 1] * 8, max_tokens=4, cache="off")
    return run


def test_equal_sequences_that_queue_for_slots_do_not_stay_in_step() -> None:
    lockstep, spread = prompt_tokens(load()), prompt_tokens(load(spread_tokens=8))
    assert lockstep[:8] == [32, 0, 0, 0, 32, 0, 0, 0]
    assert spread[:4] == [8, 8, 8, 8] and max(spread) < 32
    assert sum(spread) == sum(lockstep) and spread.count(0) < lockstep.count(0)


def test_spread_sequences_have_their_own_tokens() -> None:
    run = load(spread_tokens=8)
    run.finish()
    assert all(run.tokens[i, 0] == expected([i % 7 + 1] * 8, 4) for i in range(24))


def test_prompts_that_all_have_a_slot_are_not_spread() -> None:
    run = Run(limits(num_blocks=40, max_step_tokens=100, spread_tokens=8))
    for request in range(4):
        run.submit(request, [1] * 8, max_tokens=2, cache="off")
    run.step()
    assert run.scheduler.num_running == 4


def test_many_slots_are_filled_at_once() -> None:
    run = Run(limits(num_blocks=400, max_sequences=65, max_step_tokens=2000, spread_tokens=8))
    for request in range(100):
        run.submit(request, [1] * 8, max_tokens=2, cache="off")
    run.step()
    assert run.scheduler.num_running == 65


def test_the_rule_never_idles_slots_for_good() -> None:
    """If prompts are longer than the mean so far, the budget follows the steps that ran."""
    short = [[1] * 20] * 60 + [[1] * 400] * 60
    plain = simulate(short, [3] * 120, 16, COST)
    assert simulate(short, [3] * 120, 16, COST, spread_tokens=100).seconds < 1.05 * plain.seconds


@pytest.mark.parametrize("output", [3, 5])
def test_spreading_saves_what_steps_of_a_few_rows_cost(output: int) -> None:
    prompts = [[1] * 80] * 200
    plain = simulate(prompts, [output] * 200, 16, COST)
    spread = simulate(prompts, [output] * 200, 16, COST, spread_tokens=256)
    assert spread.seconds < 0.93 * plain.seconds


def test_a_step_in_which_sequences_decode_is_smaller(monkeypatch) -> None:
    monkeypatch.setattr(planner, "MIXED_TOKENS", 10)
    run = Run(limits(num_blocks=40, max_step_tokens=30))
    run.submit(1, [1] * 30, max_tokens=8)
    assert prompt_tokens(run, 1) == [30]
    run.submit(2, [2] * 25, max_tokens=8)
    assert prompt_tokens(run, 4) == [9, 9, 7, 0]
    run.finish()
    assert run.tokens[2, 0] == expected([2] * 25, 8)
