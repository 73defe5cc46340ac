"""Streams, sender threads and the poll for cancelled streams, without an engine."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests import fake_triton
from tests.waiting import wait_until
from tridecode.backend.base.errors import CapacityError, RequestError
from tridecode.backend.doors.answers.senders import Senders, SenderThread
from tridecode.backend.doors.answers.stream import Stream
from tridecode.backend.wire.messages import Event


class Link:
    """Records cancelled requests."""

    def __init__(self):
        self.cancelled: list[int] = []

    def cancel(self, request: int) -> None:
        self.cancelled.append(request)


class Echo:
    """Makes one response per event; ends with the event that has a finish."""

    def __init__(self):
        self.finished, self.num_output_tokens = False, 0

    def take(self, events):
        self.num_output_tokens += len(events)
        self.finished = any(event.finish for _, event in events)
        return [
            [fake_triton.Tensor("X", np.array(event.tokens, np.int32))] for _, event in events if event.tokens
        ]


@pytest.fixture()
def ended():
    return []


@pytest.fixture()
def senders(ended):
    senders = Senders(Link(), 3, lambda stream, outcome: ended.append((stream.label, outcome))).start()
    yield senders
    senders.close(RequestError("closing"))


def open_stream(senders, label=""):
    request = fake_triton.InferenceRequest({})
    stream = senders.open(request.get_response_sender(), label)
    stream.answer, stream.requests = Echo(), [7]
    return request, stream


def test_the_last_data_response_carries_the_final_flag(senders, ended):
    request, stream = open_stream(senders, "a")
    for token in range(5):
        stream.put(Event(7, 0, [token], finish="length" if token == 4 else ""))
    assert request.sender.wait(60)
    assert [s.outputs["X"].item() for s in request.sender.sent] == [0, 1, 2, 3, 4]
    assert [s.final for s in request.sender.sent] == [False] * 4 + [True]
    wait_until(lambda: ended == [("a", "ok")])


def test_an_end_without_data_sends_the_flag_alone(senders):
    request, stream = open_stream(senders)
    stream.put(Event(7, 0, [1]))
    wait_until(lambda: request.sender.sent)
    stream.put(Event(7, 0, finish="end_id"))
    assert request.sender.wait(60)
    assert len(request.sender.sent) == 1


def test_an_error_ends_the_stream_once_and_cancels_its_requests(senders, ended):
    request, stream = open_stream(senders, "a")
    stream.fail(CapacityError("full"))
    stream.fail(RequestError("too late"))
    stream.put(Event(7, 0, [1]))
    assert request.sender.wait(60)
    wait_until(lambda: ended)
    time.sleep(0.02)
    (sent,) = request.sender.sent
    assert (sent.error.code(), sent.error.message()) == (
        fake_triton.TritonError.UNAVAILABLE,
        "full (request 'a')",
    )
    assert senders.link.cancelled == [7]
    assert ended == [("a", "unavailable")]


def test_tokens_before_an_error_of_the_engine_are_sent(senders):
    request, stream = open_stream(senders)
    stream.put(Event(7, 0, [1]))
    stream.put(Event(7, 0, finish="error", error="out of blocks", code="UNAVAILABLE"))
    assert request.sender.wait(60)
    first, last = request.sender.sent
    assert first.outputs["X"].tolist() == [1]
    assert last.error.message() == "out of blocks"


def test_an_answer_that_fails_ends_its_stream_only(senders):
    request, stream = open_stream(senders)
    other, healthy = open_stream(senders)

    def fail(events):
        raise ValueError("broken")

    stream.answer.take = fail
    stream.put(Event(7, 0, [1]))
    healthy.put(Event(7, 0, [2], finish="length"))
    assert request.sender.wait(60) and other.sender.wait(60)
    assert request.sender.sent[0].error.code() == fake_triton.TritonError.INTERNAL
    message = request.sender.sent[0].error.message()
    assert "the door failed: ValueError" in message and "broken" not in message  # details are only in the log
    assert other.sender.sent[0].error is None


def test_a_server_that_accepts_no_responses_ends_the_generation(senders, ended):
    request, stream = open_stream(senders, "a")

    def refuse():
        raise fake_triton.TritonModelException("shared memory is full")

    request.sender.before_send = refuse
    stream.put(Event(7, 0, [1]))
    wait_until(lambda: ended == [("a", "internal")])
    assert senders.link.cancelled == [7]


def test_order_is_kept_while_many_threads_put(senders):
    streams = [open_stream(senders) for _ in range(16)]

    def feed(stream):
        for token in range(200):
            stream.put(Event(7, 0, [token], finish="length" if token == 199 else ""))

    threads = [threading.Thread(daemon=True, target=feed, args=(stream,)) for _, stream in streams]
    for thread in threads:
        thread.start()
    for request, _ in streams:
        assert request.sender.wait(60)
        assert [s.outputs["X"].item() for s in request.sender.sent] == list(range(200))


def test_a_slow_stream_does_not_hold_up_streams_of_other_senders(senders):
    slow_request, slow = open_stream(senders)
    gate = threading.Event()
    slow_request.sender.before_send = lambda: gate.wait(60)
    slow.put(Event(7, 0, [1], finish="length"))
    request, stream = open_stream(senders)
    stream.put(Event(7, 0, [1], finish="length"))
    assert request.sender.wait(60)
    gate.set()


def one_sender(behind_s: float) -> tuple[SenderThread, Stream]:
    """Return a sender that is not started, and the stream that it serves."""
    senders = Senders(Link(), 1, behind_s=behind_s)
    return senders.assign(), open_stream(senders)[1]


def test_a_sender_is_behind_when_pending_responses_would_take_too_long():
    sender, stream = one_sender(behind_s=0.02)
    for _ in range(200):
        sender.measure(0.001)
    assert not stream.behind(19) and stream.behind(21)
    for other in (object(), object(), object()):  # three more streams that wait
        sender.inbox.put(other)
    assert not stream.behind(4) and stream.behind(6)


def test_one_long_pause_does_not_put_a_sender_behind_but_slowness_does():
    sender, stream = one_sender(behind_s=0.02)
    for _ in range(200):
        sender.measure(0.0002)
    sender.measure(30.0)
    assert not stream.behind(40)
    for _ in range(100):
        sender.measure(0.005)
    assert stream.behind(5)
    for _ in range(100):
        sender.measure(0.0002)
    assert not stream.behind(40)


def test_sending_is_measured(senders):
    request, stream = open_stream(senders)
    request.sender.before_send = lambda: time.sleep(0.003)
    for token in range(150):
        stream.put(Event(7, 0, [token], finish="length" if token == 149 else ""))
    assert request.sender.wait(60)
    assert stream._thread.response_s > 0.002


def test_cancelled_streams_are_found_within_a_fraction_of_a_second(senders, ended):
    streams = [open_stream(senders, str(i)) for i in range(40)]
    for request, _ in streams[::2]:
        request.cancel()
    started = time.monotonic()
    for request, _ in streams[::2]:
        assert request.sender.wait(60)
        assert request.sender.sent[0].error.code() == fake_triton.TritonError.CANCELLED
    assert time.monotonic() - started < 1
    assert not any(request.sender.sent for request, _ in streams[1::2])


def test_closing_ends_every_open_stream(ended):
    senders = Senders(Link(), 2, lambda stream, outcome: ended.append(outcome)).start()
    streams = [open_stream(senders) for _ in range(10)]
    senders.close(CapacityError("unloading"))
    assert ended == ["unavailable"] * 10
    assert all(request.sender.wait(0) for request, _ in streams)


def test_streams_that_end_during_a_cancellation_query_do_not_crash_the_server(senders, monkeypatch):
    monkeypatch.setattr("tridecode.backend.doors.answers.senders._SWEEP_S", 0.0)
    monkeypatch.setattr("tridecode.backend.doors.answers.senders._SWEEP_SHARE", 1.0)
    for _ in range(30):
        streams = [open_stream(senders) for _ in range(20)]
        for _, stream in streams:
            stream.put(Event(7, 0, [1], finish="length"))
        assert all(request.sender.wait(60) for request, _ in streams)
    assert fake_triton.ResponseSender.crashes == []


# ---------------------------------------------------------------- memory of a client that does not read


class Full:
    """Like a stream of the token door: every response has all tokens, in an array of the full width."""

    def __init__(self, stream, width):
        self.finished, self.num_output_tokens = False, 0
        self._stream, self._tokens, self._width, self._sent = stream, [], width, 0

    def take(self, events):
        for _, event in events:
            self._tokens += event.tokens
            self.finished = self.finished or bool(event.finish)
        while self._sent < len(self._tokens):
            waiting = len(self._tokens) - self._sent
            self._sent += waiting if self._sent and self._stream.behind(waiting) else 1
            array = np.full(self._width, -1, np.int32)
            array[: self._sent] = self._tokens[: self._sent]
            yield [fake_triton.Tensor("X", array)]


def stream_full(senders, count: int, width: int) -> list[int]:
    """Return the number of tokens in each response to a request of `count` tokens, generated one by one."""
    request, stream = open_stream(senders)
    stream.answer = Full(stream, width)
    for token in range(count):
        stream.put(Event(7, 0, [token], finish="length" if token == count - 1 else ""))
        if token % 8 == 0:
            wait_until(lambda: senders._threads[0].inbox.empty())
    assert request.sender.wait(60)
    held = [(sent.outputs["X"] >= 0).sum() for sent in request.sender.sent]
    assert request.sender.sent[-1].outputs["X"][:count].tolist() == list(range(count))
    return held


@pytest.fixture()
def budgeted():
    """One sender; 400,000 bytes per request, 800,000 for all."""
    senders = Senders(Link(), 1, request_bytes=400_000, door_bytes=800_000).start()
    yield senders
    senders.close(RequestError("closing"))


def test_the_responses_of_one_request_are_bounded_in_bytes(budgeted):
    width = 3000  # 12,000 bytes per response, so 33 responses
    held = stream_full(budgeted, 3000, width)
    assert 4 * width * len(held) <= 400_000 + 2 * 4 * width
    assert held[:16] == list(range(1, 17))  # one response per token in the first half of the budget
    assert held == sorted(held) and held[-1] == 3000


def test_a_request_within_its_budget_is_answered_token_by_token(budgeted):
    assert stream_full(budgeted, 100, 300) == list(range(1, 101))


def test_open_requests_share_the_budget_of_a_door(budgeted):
    alone = len(stream_full(budgeted, 400, 400))
    others = [open_stream(budgeted) for _ in range(7)]  # an eighth of 800,000 bytes remains
    shared = len(stream_full(budgeted, 400, 400))
    assert alone > 100 and shared * (4 * 400 + 600) <= 100_000 + 2 * (4 * 400 + 600)
    for _, stream in others:
        stream.put(Event(7, 0, [1], finish="length"))
    assert all(request.sender.wait(60) for request, _ in others)


def test_an_end_is_sent_even_beyond_the_budget(budgeted):
    request, stream = open_stream(budgeted)
    stream.answer = Full(stream, 90_000)  # 360,000 bytes: two responses exceed the budget
    for token in range(50):
        stream.put(Event(7, 0, [token]))
        wait_until(lambda: budgeted._threads[0].inbox.empty())
    time.sleep(0.05)
    assert len(request.sender.sent) <= 3
    stream.fail(CapacityError("the engine has no room"))
    assert request.sender.wait(60)
    assert request.sender.sent[-1].error.message() == "the engine has no room"


def test_a_stream_whose_end_fails_leaves_its_sender_to_the_others():
    senders = Senders(Link(), 1).start()
    broken, stream = open_stream(senders)
    request, healthy = open_stream(senders)
    cancel, senders.link.cancel = senders.link.cancel, lambda request: 1 / 0
    stream.fail(CapacityError("full"))
    assert broken.sender.wait(60)
    assert broken.sender.sent[0].error.message() == "full"
    senders.link.cancel = cancel
    healthy.put(Event(7, 0, [1], finish="length"))
    assert request.sender.wait(60) and request.sender.sent[0].error is None
    senders.close(RequestError("closing"))


def test_text_of_many_streams_is_not_held_back():
    senders = Senders(Link(), 2).start()
    streams = [open_stream(senders) for _ in range(64)]
    request, stream = streams[0]
    for token in range(2000):
        stream.put(Event(7, 0, [token], finish="length" if token == 1999 else ""))
    assert request.sender.wait(60)
    assert len(request.sender.sent) == 2000
    senders.close(RequestError("closing"))
