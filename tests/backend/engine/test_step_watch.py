"""A loop over steps that would not end fails, and says what each request waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.backend.engine import step_watch
from tests.backend.engine.grammar_models import constrained_engine, sampled
from tests.backend.engine.toy_device import Run, limits
from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.wire.structured_output import StructuredOutput


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "QUIET_S", 0.2)
    monkeypatch.setattr(step_watch, "QUIET_PLANS", 50)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Masks wait until it is set."""
    opened, advance = threading.Event(), Guidance.advance

    def waiting(self: Guidance, *given: object) -> object:
        opened.wait(60)
        return advance(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Guidance, "advance", waiting)
    yield opened
    opened.set()


def test_a_request_whose_mask_does_not_come_is_named(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first mask comes with the grammar, the second one does not."""
    offline = constrained_engine()
    number = offline.submit([5, 6, 7], sampled(), structured_output=StructuredOutput("regex", "[a-z]{9}"))
    while not offline.generations[number].tokens:
        offline.step()
    shorten(monkeypatch)
    with pytest.raises(AssertionError, match="no request has had an event") as caught:
        offline.run()
    first, second = str(caught.value).splitlines()
    assert "0 of " in first and first.endswith("plans had rows; 1 sequences run, 0 wait")
    assert second == "  request 0: AWAITED, 3 prompt tokens, 1 of 200 tokens, 0 in flight, waits for its mask"
    gate.set()
    offline.scheduler.grammars.close()


def test_a_condition_that_is_never_met_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    run = Run(limits())
    run.submit(1, [1, 2], max_tokens=4)
    with pytest.raises(AssertionError, match=r"0 of \d+ plans had rows; 0 sequences run, 0 wait$"):
        while len(run.tokens[1, 0]) < 5:
            run.step()
    assert run.ends[1, 0]


def test_requests_and_events_start_the_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "QUIET_S", -1.0)
    monkeypatch.setattr(step_watch, "QUIET_PLANS", 8)
    run = Run(limits())
    for number in range(20):
        run.submit(number, [1, 2], max_tokens=4)
        run.finish()
