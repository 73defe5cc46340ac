"""The model of step costs against measured runs (docs/lab/loads.md), and sums of parts."""

from __future__ import annotations

import pytest

from tridecode.tools.bench.measure import Step
from tridecode.tools.bench.studies.admission import over_parts
from tridecode.tools.bench.studies.step_model import lambada, mix


def test_lambadas_lockstep_takes_what_was_measured() -> None:
    """5,153 prompts took 11.5 s on an H200; the steps follow from the scheduler alone."""
    found = lambada(16, count=500)
    assert found.seconds == pytest.approx(11.5 * 500 / 5153, rel=0.05)
    assert len(found.kinds) == pytest.approx(3 * len(found.mixed), abs=3)


def test_the_load_of_chats_has_the_steps_that_were_measured() -> None:
    """1,028 steps that only decode and 100 with prompts of 2,285 tokens."""
    found = mix(256)
    assert len(found.mixed) == pytest.approx(100, abs=2)
    assert sum(kind[2] for kind in found.mixed) / len(found.mixed) == pytest.approx(2285, rel=0.02)
    assert len(found.kinds) == pytest.approx(1128, abs=3)


def test_a_step_is_compared_with_its_parts() -> None:
    """10 ms of decoding rows, 1 ms per prefill token; every other step has prompts and takes 20 % longer."""
    steps, now = [Step(0.0, 5, 0)], 0.0
    for number in range(100):
        tokens = 10 * (number % 2)
        now += (0.010 + 0.001 * tokens) * (1.2 if tokens else 1.0)
        steps.append(Step(now, 5, tokens))
    ratio, rows = over_parts(steps, 0.001)
    assert ratio == pytest.approx((0.010 + 0.024) / 0.030, rel=1e-3) and rows == 5
