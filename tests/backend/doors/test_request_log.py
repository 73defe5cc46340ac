"""The request log's lines, and that no reader of it can stop a door."""

from __future__ import annotations

import json
import logging
import os
import time

import pytest

from tests.waiting import wait_until
from tridecode.backend import log_format
from tridecode.backend.doors.request_log import RequestLine, RequestLog, line_of
from tridecode.backend.doors.request_times import GapCounts, RequestTimes
from tridecode.backend.messages import Event


def a_line(**others) -> RequestLine:
    fields = {"time": 1.5, "id": "a1", "outcome": "ok", "finish": "stop", "prompt_tokens": 3}
    fields |= {"output_tokens": 4, "sequences": 1, "queue_s": 0.25, "first_token_s": 0.5, "total_s": 1.0}
    return RequestLine(**{**fields, **others})


@pytest.fixture()
def pipe(monkeypatch):
    monkeypatch.setenv("TRIDECODE_REQUEST_LOG", "on")
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    for fd in (read, write):
        os.close(fd)


def text_of(fd: int) -> str:
    pieces = []
    while True:
        try:
            pieces.append(os.read(fd, 65536))
        except BlockingIOError:
            return b"".join(pieces).decode()


def test_a_text_line_stays_one_line_whatever_the_client_sent(pipe, monkeypatch):
    monkeypatch.setenv("TRIDECODE_LOG_FORMAT", "text")
    log = RequestLog("m", pipe[1]).start()
    log.put(a_line())
    log.put(a_line(id='x"\n2026 forged', outcome="invalid_arg", finish="", queue_s=None, error="bad\nvalue"))
    log.close()
    first, second = text_of(pipe[0]).splitlines()
    assert first == (
        '1970-01-01T00:00:01.500Z request model=m outcome=ok id="a1" finish=stop prompt_tokens=3 '
        "output_tokens=4 queue_s=0.2500 first_token_s=0.5000 total_s=1.0000"
    )
    assert r'id="x\"\n2026 forged"' in second and r'error="bad\nvalue"' in second and "queue_s" not in second


def test_a_json_line_is_an_object_with_every_field(pipe, monkeypatch):
    monkeypatch.setenv("TRIDECODE_LOG_FORMAT", "json")
    log = RequestLog("m", pipe[1]).start()
    log.put(a_line(first_token_s=None))
    log.close()
    assert json.loads(text_of(pipe[0])) == {
        "time": "1970-01-01T00:00:01.500Z", "event": "request", "model": "m", "id": "a1", "outcome": "ok",
        "finish": "stop", "prompt_tokens": 3, "output_tokens": 4, "sequences": 1, "queue_s": 0.25,
        "first_token_s": None, "total_s": 1.0,
    }  # fmt: skip


def test_a_log_that_nobody_reads_delays_nobody_and_what_is_left_out_is_counted(pipe):
    read, write = pipe
    log = RequestLog("m", write).start()
    line = a_line(outcome="invalid_arg", error="x" * 400)
    slowest, count = 0.0, 0
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        began = time.monotonic()
        for _ in range(100):
            log.put(line)
        slowest, count = max(slowest, (time.monotonic() - began) / 100), count + 100
        time.sleep(0.001)
    assert slowest < 0.005
    text = ""

    def drained() -> bool:
        nonlocal text
        text += text_of(read)
        return "requests_left_out" in text

    wait_until(drained, 5, "the summary")
    log.close()
    text += text_of(read)
    lines = text.splitlines()
    shown = sum(" request " in line for line in lines)
    left_out = sum(int(one.split("lines=")[1].split()[0]) for one in lines if "requests_left_out" in one)
    assert shown + left_out == count and shown <= 3000


def test_pieces_are_small_enough_that_a_pipe_keeps_them_whole(pipe):
    log = RequestLog("m", pipe[1]).start()
    times = RequestTimes(GapCounts())
    for text in ("\U0001f600" * 1000, '"' * 1000, "a" * 1000):
        for _ in range(15):
            log.put(line_of(times, text, "invalid_arg", None, 0, text))
    pieces = log._take(True)
    assert all(len(piece) <= 4096 and piece.endswith(b"\n") for piece in pieces)
    log.close()


def test_a_closed_log_ends_quietly(pipe):
    read, write = os.pipe()
    log = RequestLog("m", write).start()
    os.close(read)
    log.put(a_line())
    wait_until(lambda: not log._thread.is_alive(), 5, "the end of the thread")
    log.put(a_line())
    os.close(write)


def test_off_writes_nothing(pipe, monkeypatch):
    monkeypatch.setenv("TRIDECODE_REQUEST_LOG", "off")
    log = RequestLog("m", pipe[1]).start()
    log.put(a_line())
    log.close()
    assert text_of(pipe[0]) == ""


class Stopped:
    num_output_tokens = 2
    finish_reasons = ["stop"]


def test_the_answer_s_finish_reason_counts_before_the_engine_s():
    times = RequestTimes(GapCounts())
    times.deliver([(0, Event(1, 0, [5], finish="length"))])
    assert line_of(times, "", "ok", Stopped(), 1, "").finish == "stop"
    refused = line_of(times, "y" * 2000, "invalid_arg", None, 0, "z" * 2000)
    assert (len(refused.id), len(refused.error), refused.finish, refused.output_tokens) == (200, 400, "", 0)


def test_records_as_json_have_their_traceback():
    formatter = log_format.JsonFormatter("door_0")
    try:
        raise ValueError("broken")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("tridecode.door", logging.ERROR, "f", 1, "request %r", ("a",), info)
    line = json.loads(formatter.format(record))
    assert (line["level"], line["message"], line["process"]) == ("error", "request 'a'", "door_0")
    assert "ValueError: broken" in line["traceback"]
