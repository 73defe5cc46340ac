"""The open requests of a door without sockets: each one ends exactly once, whatever happens to the engine."""

from __future__ import annotations

import time

import msgspec
import pytest

from tests.fake_engine import LIMITS
from tridecode.backend import messages as m
from tridecode.backend.doors.open_requests import OpenRequest, OpenRequests


class Desk:
    """OpenRequests with a recorded engine: `sent` frames and messages, `ends` of requests by number."""

    def __init__(self, phase: str = "starting"):
        self.sent: list = []
        self.accepts = True
        self.ends: dict[int, list[m.Event]] = {}
        self.state = m.EngineState(1, phase, "loading weights", "")
        self.requests = OpenRequests(self._send, lambda: self.state)

    def _send(self, message: object) -> bool:
        self.sent.append(message)
        return self.accepts

    def submit(self, number: int, sequences: int = 1, hold_s: float = 5.0, timeout_s: float = 0.0, sink=None):
        events = self.ends.setdefault(number, [])
        hold_until = time.monotonic() + hold_s
        entry = OpenRequest(number, b"%d" % number, sink or events.append, sequences, hold_until, timeout_s)
        self.requests.submit(entry)
        return entry

    def texts(self, number: int) -> list[str]:
        return [event.error for event in self.ends[number]]


def event(number: int, sequence: int = 0, finish: str = "") -> m.Event:
    return m.Event(number, sequence, tokens=[7], finish=finish)


def test_requests_are_held_until_the_engine_is_ready_and_sent_in_order():
    desk = Desk()
    for number in (1, 2):
        desk.submit(number)
    assert desk.sent == []
    desk.requests.engine_ready(LIMITS)
    assert desk.sent == [b"1", b"2"]
    desk.requests.engine_ready(LIMITS)  # a second Welcome sends nothing twice
    assert desk.sent == [b"1", b"2"]


@pytest.mark.parametrize(("phase", "hold_s"), [("down", 5.0), ("failed", 5.0), ("starting", 0.0)])
def test_a_request_that_cannot_wait_is_refused_at_once_with_the_state(phase, hold_s):
    desk = Desk(phase)
    desk.submit(1, hold_s=hold_s)
    assert desk.texts(1) == [f"the engine is not ready ({phase}): loading weights"]


def test_a_lost_engine_ends_what_it_had_and_later_requests_are_held():
    desk = Desk()
    desk.submit(1)
    desk.requests.engine_ready(LIMITS)
    desk.requests.engine_lost("rank 0 died")
    desk.submit(2)
    assert desk.texts(1) == ["rank 0 died"] and desk.texts(2) == []
    desk.requests.take(event(1))  # of the lost engine: ignored
    desk.requests.fail_all("unloaded")
    assert desk.texts(1) == ["rank 0 died"] and desk.texts(2) == ["unloaded"]


def test_a_failed_sequence_ends_its_request_and_cancels_the_others():
    desk = Desk()
    desk.requests.engine_ready(LIMITS)
    desk.submit(1, sequences=3)
    desk.requests.take(event(1, 0, "length"))
    desk.requests.take(event(1, 1, "error"))
    desk.requests.take(event(1, 2))
    assert [one.finish for one in desk.ends[1]] == ["length", "error"]
    assert desk.sent == [b"1", m.Cancel(1)]


def test_a_cancelled_request_gets_no_more_events():
    desk = Desk()
    desk.requests.engine_ready(LIMITS)
    desk.submit(1)
    desk.requests.cancel(1)
    desk.requests.take(event(1, 0, "length"))
    desk.requests.cancel(1)
    assert desk.ends[1] == [] and desk.sent == [b"1", m.Cancel(1)]


def test_a_request_that_the_engine_does_not_accept_ends():
    desk = Desk()
    desk.accepts = False
    desk.requests.engine_ready(LIMITS)
    desk.submit(1)
    assert desk.texts(1) == ["the engine takes no messages"]


def test_a_sink_that_raises_cancels_its_own_request_only():
    def broken(_: m.Event) -> None:
        raise ValueError("broken")

    desk = Desk()
    desk.requests.engine_ready(LIMITS)
    desk.submit(1, sink=broken)
    desk.submit(2)
    for number in (1, 2):
        desk.requests.take(event(number))
    assert desk.sent == [b"1", b"2", m.Cancel(1)] and len(desk.ends[2]) == 1


@pytest.mark.parametrize(("own_s", "default_s"), [(2.0, 600.0), (0.0, 2.0)])
def test_an_overdue_request_ends_after_its_own_or_the_engines_deadline(own_s, default_s):
    desk = Desk()
    desk.requests.engine_ready(msgspec.structs.replace(LIMITS, request_timeout_s=default_s))
    began = time.monotonic()
    desk.submit(1, timeout_s=own_s)
    desk.requests.end_overdue(began + 6.9)  # 2 s and 5 s of grace
    assert desk.ends[1] == []
    desk.requests.end_overdue(began + 7.5)
    assert desk.texts(1) == ["the engine has not ended the request 5 s after its deadline"]
    assert desk.sent[-1] == m.Cancel(1)


def test_a_pause_of_the_process_moves_all_deadlines():
    desk = Desk()
    held = desk.submit(1, hold_s=1.0)
    now = held.hold_until
    desk.requests.forgive(10.0)
    desk.requests.refuse_late(now + 9.9)
    assert desk.ends[1] == []
    desk.requests.refuse_late(now + 10.1)
    assert len(desk.ends[1]) == 1
