"""A door's open requests, tested without sockets: each ends exactly once, whatever the engine does."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from tests.fake_engine import LIMITS
from tridecode.backend.service.open_requests import OpenRequest, OpenRequests
from tridecode.backend.wire import messages as m
from tridecode.backend.wire.prompt_learning import LearnedPrompt


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


# ---------------------------------------------------------------- requests that the next engine continues

PROMPT = m.SequenceRequest(np.array([4, 5], "<i4").tobytes(), m.SamplingParams(max_tokens=9))


def resumable(
    desk: Desk, number: int, sequences: int = 1, within_s: float = 60.0, timeout_s: float = 0.0, **others
) -> OpenRequest:
    """Submit a request that has got the tokens 7 and 8 of its first sequence, from an engine."""
    desk.requests.engine_ready(LIMITS)
    frame = m.encode(
        m.Submit(number, [PROMPT] * sequences, timeout_s=timeout_s, session=others.get("session"))
    )
    events = desk.ends.setdefault(number, [])
    entry = OpenRequest(number, frame, events.append, sequences, 0.0, timeout_s, within_s, **others)
    desk.requests.submit(entry)
    for token in (7, 8):
        desk.requests.take(m.Event(number, 0, tokens=[token]))
    return entry


def last_submit(desk: Desk) -> m.Submit:
    return m.decode(desk.sent[-1], m.Submit)


def test_the_next_engine_gets_a_request_with_the_tokens_that_its_sink_has():
    desk = Desk()
    resumable(desk, 3, sequences=2)
    desk.requests.take(m.Event(3, 1, tokens=[9], finish="length"))
    desk.requests.engine_lost("rank 0 died")
    desk.requests.fail_new("rank 0 died")
    assert [event.finish for event in desk.ends[3]] == ["", "", "length"]
    desk.requests.engine_ready(LIMITS)
    submit = last_submit(desk)
    assert submit.sequences == [PROMPT] * 2
    assert submit.sent == [m.Sent(np.array([7, 8], "<i4").tobytes()), m.Sent(ended=True)]
    desk.requests.take(m.Event(submit.request, 0, tokens=[6], finish="length"))
    assert [token for event in desk.ends[3] for token in event.tokens] == [7, 8, 9, 6]
    assert desk.requests.resumed.requests == 1


def test_events_of_the_lost_engine_do_not_reach_a_resumed_request():
    """An engine that has forgotten the door and still runs reports the door's requests as cancelled."""
    desk = Desk()
    resumable(desk, 3)
    desk.requests.engine_lost("the engine had not heard from this model for a while")
    desk.requests.take(event(3, 0, "cancelled"))
    desk.requests.engine_ready(LIMITS)
    number = last_submit(desk).request
    desk.requests.take(event(3, 0, "cancelled"))
    assert len(desk.ends[3]) == 2 and number != 3
    desk.requests.cancel(3)
    assert desk.sent[-1] == m.Cancel(number)


def test_a_request_is_continued_once():
    desk = Desk()
    resumable(desk, 3)
    for text in ("rank 0 died", "rank 0 died again"):
        desk.requests.engine_lost(text)
        desk.requests.engine_ready(LIMITS)
    assert desk.texts(3) == ["", "", "rank 0 died again"]
    assert len(desk.sent) == 2


def test_a_request_that_declines_ends_with_its_engine():
    desk = Desk()
    resumable(desk, 3, within_s=0.0)
    desk.requests.engine_lost("rank 0 died")
    assert desk.texts(3)[-1] == "rank 0 died"


def test_a_request_that_is_cancelled_while_it_waits_is_not_continued():
    desk = Desk()
    resumable(desk, 3)
    desk.requests.engine_lost("rank 0 died")
    count = len(desk.sent)
    desk.requests.cancel(3)
    desk.requests.engine_ready(LIMITS)
    assert len(desk.sent) == count and len(desk.ends[3]) == 2


@pytest.mark.parametrize(("timeout_s", "waits_s"), [(0.0, 60.0), (300.0, 300.0), (2.0, 2.0)])
def test_a_request_waits_until_its_deadline_or_for_the_limit_of_the_setting(timeout_s, waits_s):
    desk = Desk()
    resumable(desk, 3, timeout_s=timeout_s)
    began = time.monotonic()
    desk.requests.engine_lost("rank 0 died")
    desk.requests.refuse_late(began + waits_s - 0.5)
    assert len(desk.ends[3]) == 2
    desk.requests.refuse_late(began + waits_s + 0.5)
    assert desk.texts(3)[-1] == "rank 0 died; no other engine was ready in time to continue the request"


def test_the_second_engine_gets_the_rest_of_the_time():
    desk = Desk()
    entry = resumable(desk, 3, timeout_s=300.0)
    entry.expires_at -= 100.0  # as if they had passed
    desk.requests.engine_lost("rank 0 died")
    desk.requests.engine_ready(LIMITS)
    assert last_submit(desk).timeout_s == pytest.approx(200.0, abs=1.0)


def test_an_engine_that_will_not_come_back_ends_those_that_wait():
    desk = Desk()
    resumable(desk, 3)
    desk.requests.engine_lost("rank 0 died")
    desk.requests.fail_all("the engine is failed: config.ini has no head_num")
    assert desk.texts(3)[-1] == "the engine is failed: config.ini has no head_num"


def test_a_prompt_of_which_nobody_knows_what_was_sent_ends_with_its_engine():
    desk = Desk()
    learned = LearnedPrompt(task=0)
    desk.requests.engine_ready(LIMITS)
    for number, one in ((1, PROMPT), (2, msgspec.structs.replace(PROMPT, learned=learned))):
        frame = m.encode(m.Submit(number, [one]))
        events = desk.ends.setdefault(number, [])
        desk.requests.submit(OpenRequest(number, frame, events.append, 1, 0.0, 0.0, 60.0))
        rows = m.EventExtra(context_logits=bytes(4 * LIMITS.vocab_size))
        desk.requests.take(m.Event(number, 0, extra=rows))
    desk.requests.engine_lost("rank 0 died")
    desk.requests.engine_ready(LIMITS)
    assert desk.texts(1) == [""] and desk.texts(2) == ["", "rank 0 died"]
    assert last_submit(desk).sent == [m.Sent(context_rows=1)]


def test_a_session_goes_to_the_next_engine_with_its_tokens_and_once():
    desk = Desk()
    begin, more = m.SessionRound(5, 100), m.SessionRound(5, 100, retained=[3])
    resumable(desk, 1, session=begin)
    desk.requests.take(event(1, 0, "length"))
    resumable(desk, 2, session=more, history=[[4, 5, 6]])
    assert not last_submit(desk).session.history, "the engine has the session"
    desk.requests.engine_lost("rank 0 died")
    desk.requests.engine_ready(LIMITS)
    wanted = [np.array([4, 5, 6], "<i4").tobytes()]
    assert (last_submit(desk).session.history, last_submit(desk).session.retained) == (wanted, [3])
    desk.requests.take(event(-2, 0, "length"))
    resumable(desk, 3, session=more, history=[[4, 5, 6]])
    assert not last_submit(desk).session.history
    desk.requests.take(event(3, 0, "length"))
    desk.requests.engine_lost("rank 0 died")  # between two rounds
    desk.requests.engine_ready(LIMITS)
    resumable(desk, 4, session=more, history=[[4, 5, 6]])
    assert last_submit(desk).session.history == wanted and not last_submit(desk).sent
    desk.requests.end_session(5)
    assert desk.sent[-1] == m.EndSession(5)
