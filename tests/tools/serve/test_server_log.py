"""What `serve` prints of tritonserver's log; the lines are those of the server in the wheel."""

from __future__ import annotations

import io
import json
import os
import re

import pytest

from tests.waiting import wait_until
from tridecode.tools.serve.server_log import LogFilter, ServerLog, as_json
from tridecode.tools.serve.serving import _failures
from tridecode.tools.serve.triton_http import ModelState

LOADED = """I1126 10:23:02.308786 13252 model_lifecycle.cc:839] "successfully loaded 'ensemble'\""""
NO_DRIVER = 'E1126 10:22:44.053316 13252 server.cc:241] "CudaDriverHelper has not been initialized."'
NO_STREAM = (
    'E1126 10:23:02.308732 13252 ensemble_scheduler.cc:1468] "unable to create stream for ensemble: CUDA '
    'driver version is insufficient for CUDA runtime version"'
)
TABLE = [
    "I1126 10:23:02.309118 13252 server.cc:631] ",
    "+---------+------+",
    "| Backend | Path |",
    "+---------+------+",
    "| python  | /tmp |",
    "+---------+------+",
    "",
]
FAILED = [
    'I1126 10:33:42.066207 17445 pb_stub.cc:366] "Failed to initialize Python stub: no device"',
    'E1126 10:29:30.416825 5512 backend_model.cc:692] "ERROR: Failed to create instance: no device"',
    "E1126 10:29:30.416982 5512 model_lifecycle.cc:642] \"failed to load 'echo' version 1: no device\"",
    "E1126 10:29:30.798995 5512 model_repository_manager.cc:703] \"Invalid argument: ensemble 'e' depends on "
    "'echo' which has no loaded version. Model 'echo' loading failed\"",
    'E1126 10:29:30.799374 5512 tritonserver.cc:2607] "Internal: failed to load all models"',
]
CRASH = 'E1126 10:29:31.000000 5512 http_server.cc:1] "failed to start HTTP service: Unavailable"'


def shown(lines: list[str], **options) -> list[str]:
    chosen = LogFilter(**{"has_gpu": False, **options})
    return [line for line in lines if chosen.shown(line)]


def test_tables_go_and_the_lines_around_them_stay():
    assert shown([LOADED, *TABLE, *TABLE, LOADED, ""]) == [LOADED, LOADED, ""]


def test_errors_that_are_none_without_a_gpu_go_on_such_a_machine_only():
    assert shown([NO_DRIVER, NO_STREAM, CRASH]) == [CRASH]
    assert shown([NO_DRIVER, NO_STREAM], has_gpu=True) == [NO_DRIVER, NO_STREAM]


def test_failures_to_load_are_held_while_serve_reports_them():
    chosen = LogFilter(has_gpu=False)
    assert [line for line in [*FAILED, CRASH] if chosen.shown(line)] == [CRASH]
    assert chosen.held == FAILED
    chosen.starting = False
    assert all(map(chosen.shown, FAILED))


@pytest.mark.parametrize("reported", [True, False])
def test_what_was_held_is_printed_where_nobody_reported_it(reported):
    out = io.StringIO()
    with ServerLog((), out) as log:
        with open(log.arguments[0].partition("=")[2], "a") as server:
            server.write("\n".join([*FAILED, LOADED]) + "\n")
        wait_until(lambda: out.getvalue(), 60, "the log")
        log.started(reported)
        with open(log.arguments[0].partition("=")[2], "a") as server:
            server.write(f"{FAILED[0]}\nan end without a newline")
    lines = out.getvalue().splitlines()
    assert lines == [LOADED, *([] if reported else FAILED), FAILED[0], "an end without a newline"]


def test_memory_of_what_was_read_is_given_back():
    out = io.StringIO()
    with ServerLog((), out) as log:
        path = log.arguments[0].partition("=")[2]
        for _ in range(8):
            with open(path, "a") as server:
                server.write((LOADED + "\n") * 10_000)
            before = out.tell()
            wait_until(lambda start=before: out.tell() > start, 60, "the log")
        size = 8 * 10_000 * (len(LOADED) + 1)
        wait_until(lambda: out.tell() == size, 60, "the whole log")
        status = os.stat(path)
        assert status.st_size == size and status.st_blocks * 512 < 3 << 20 < size


def test_a_log_that_the_user_chooses_is_left_to_triton():
    for argument in ("--log-verbose=1", "--log-file=/tmp/x", "--log-info=false"):
        with ServerLog((argument,)) as log:
            assert log.arguments == []
    with ServerLog(("--exit-timeout-secs=3",)) as log:
        assert re.fullmatch(r"--log-file=/proc/\d+/fd/\d+", log.arguments[0])


def test_one_reason_is_said_once_with_every_model_that_has_it():
    device = "rank 0: parameter device is cuda, but torch finds no CUDA device"
    raised = f"Internal: TritonModelException: {device}\n\nAt:\n  /door.py(6): initialize\n"
    rows = [
        ModelState("a", "UNAVAILABLE", raised),
        ModelState("ensemble", "", ""),
        ModelState("b", "UNAVAILABLE", raised),
        ModelState("c", "UNAVAILABLE", "no such weights"),
        ModelState("d", "READY", ""),
    ]
    assert _failures(rows) == [
        "model ensemble could not be loaded: a model that it needs could not be",
        f"models a, b could not be loaded: {device}",
        "model c could not be loaded: no such weights",
    ]


def test_lines_of_triton_are_json_objects_where_that_is_the_format():
    line = 'W1126 10:01:44.4 11963 http_server.cc:471] "a \\"word\\""'
    found = json.loads(as_json(line))
    assert (found["level"], found["logger"]) == ("warning", "tritonserver")
    assert found["message"] == 'http_server.cc:471] "a \\"word\\""'
    assert json.loads(as_json("Signal (15) received."))["message"] == "Signal (15) received."
