"""The request log's lines, and that no reader of it can stop a door."""

from __future__ import annotations

import json
import logging
import os
import time

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import running
from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.fake_engine import LIMITS, FakeEngine
from tests.waiting import wait_until
from tridecode.backend.base import log_format
from tridecode.backend.doors import text
from tridecode.backend.doors.monitoring.request_lines import line_of
from tridecode.backend.doors.monitoring.request_times import GapCounts, RequestTimes
from tridecode.backend.service.monitoring.request_log import RequestLine, RequestLog, as_json
from tridecode.backend.wire.messages import Event


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
    found = ""

    def drained() -> bool:
        nonlocal found
        found += text_of(read)
        return "requests_left_out" in found

    wait_until(drained, 60, "the summary")
    log.close()
    found += text_of(read)
    lines = found.splitlines()
    shown = sum(" request " in line for line in lines)
    left_out = sum(int(one.split("lines=")[1].split()[0]) for one in lines if "requests_left_out" in one)
    assert shown + left_out == count and shown <= 3000


def test_pieces_are_small_enough_that_a_pipe_keeps_them_whole(pipe):
    log = RequestLog("m", pipe[1]).start()
    times = RequestTimes(GapCounts())
    for said in ("\U0001f600" * 1000, '"' * 1000, "a" * 1000):
        for _ in range(15):
            log.put(line_of(times, said, "invalid_arg", None, 0, said))
    pieces = log._take(True)
    assert all(len(piece) <= 4096 and piece.endswith(b"\n") for piece in pieces)
    log.close()


def test_a_closed_log_ends_quietly(pipe):
    read, write = os.pipe()
    log = RequestLog("m", write).start()
    os.close(read)
    log.put(a_line())
    wait_until(lambda: not log._thread.is_alive(), 60, "the end of the thread")
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


SECRET = "tell nobody of the purple elephant"
#: mistakes of a client: inputs or, as parameters, fields that HTTP's generate endpoint hands over
MISTAKES = {
    "no mistake": {},
    "too long": {"text_input": SECRET * 100},
    "not UTF-8": {"text_input": SECRET.encode() + b"\xff"},
    "a decoder's text": {"decoder_text_input": SECRET},
    "a wrong length": {"max_tokens": -5},
    "messages": {"messages": SECRET},
    "prompt": {"prompt": SECRET},
    "a misspelt field": {"text_inputs": SECRET},
    "two texts": {"text_input": [SECRET, SECRET]},
    "as a number": {"text_input": 5, "query": SECRET},
}


@pytest.mark.parametrize("as_parameters", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_no_line_has_text_of_a_prompt(tmp_path, monkeypatch, mistake, as_parameters):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    written: list[str] = []
    monkeypatch.setattr(RequestLog, "put", lambda log, line: written.append(as_json("m", line)))
    inputs = {"text_input": "TYPE_STRING", "max_tokens": "TYPE_INT32"}
    settings = {"tokenizer_dir": str(tmp_path)}
    config = fake_triton.model_config("text", inputs, {"text_output": "TYPE_STRING"}, settings)
    limits = msgspec.structs.replace(LIMITS, vocab_size=600)
    sent = {"text_input": SECRET, "max_tokens": 3, **MISTAKES[mistake]}
    extra = {name: sent.pop(name) for name in list(sent) if as_parameters and name not in inputs}
    arrays = {}
    for name, value in sent.items():
        row = value if isinstance(value, list) else [value]
        arrays[name] = np.array([row], np.int32 if isinstance(value, int) else object)
    with running(text.TritonPythonModel, config, FakeEngine(limits=limits), str(tmp_path)) as door:
        fake_triton.ask(door, fake_triton.InferenceRequest(arrays, parameters=extra))
        wait_until(lambda: written)
    assert len(written) == 1
    for word in ("nobody", "purple", "elephant"):
        assert word not in written[0]
