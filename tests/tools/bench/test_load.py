"""The load generator: what it sends, and what it reports of a server whose timings are known."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.tools.bench.pictures import ink
from tests.tools.fake_server import FakeModel, fake_server, text_responses
from tridecode.backend.base.errors import EngineDownError
from tridecode.tools.bench.load.generator import choose_processes, run_load
from tridecode.tools.bench.load.summary import summarise
from tridecode.tools.bench.load.worker import LoadSpec, Record
from tridecode.tools.bench.shapes.random_repo import toy_tokenizer
from tridecode.tools.cli import app

TEXT = ("text_input", "max_tokens")


def text_model(tokens: list[int], **options) -> FakeModel:
    return FakeModel("text", TEXT, text_responses([("x" * count, count) for count in tokens]), **options)


def load(server, **options):
    given = {"prompts": ["hello"], "output_tokens": 5, "num_requests": 1, **options}
    return run_load(LoadSpec(server.url, given.pop("model", "text"), **given))


def test_times_are_those_of_the_server() -> None:
    with fake_server(text_model([1] * 11, first_s=0.2, gap_s=0.05)) as server:
        report = summarise(load(server, num_requests=8, concurrency=4, processes=2))
    assert (report.requests, report.failed, report.output_tokens) == (8, 0, 88)
    assert report.first_token_ms["min"] >= 200 and report.first_token_ms["p50"] < 300
    assert 49 <= report.inter_token_ms["mean"] < 75
    assert 49 <= report.token_ms["p50"] < 75
    assert report.request_ms["min"] >= 700 and report.request_ms["p50"] < 1100
    assert 1.4 <= report.seconds < 2.4  # two rounds of four
    assert report.tokens_per_s == pytest.approx(88 / report.seconds, rel=1e-3)
    assert report.requests_per_s == pytest.approx(8 / report.seconds, rel=1e-2)


def test_a_response_with_several_tokens_counts_as_several() -> None:
    with fake_server(text_model([2, 4, 4], gap_s=0.2)) as server:
        report = summarise(load(server, output_tokens=10))
    assert report.output_tokens == 10 and report.tokens_counted
    assert report.tokens_per_response == pytest.approx(10 / 3, abs=1e-3)
    assert 49 <= report.inter_token_ms["mean"] < 75  # 200 ms for 4 tokens
    assert 49 <= report.token_ms["mean"] < 75


def test_tokens_of_fastertransformers_stream_are_counted_from_its_lengths() -> None:
    steps = [
        {"output_ids": np.zeros((1, 1, 8), np.uint32), "sequence_length": np.array([[length]], np.uint32)}
        for length in (4, 5, 7, 8)
    ]
    prompt = np.array([11, 12, 13], np.int32)
    with fake_server(FakeModel("fastertransformer_streaming", (), steps)) as server:
        (record,) = load(server, model="fastertransformer_streaming", prompts=[prompt], tokens_in=True)
        request = server.requests[0]
    assert [count for _, count in record.responses] == [1, 1, 2, 1]
    sent = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents))
    assert np.frombuffer(sent["input_ids"], np.uint32).tolist() == [11, 12, 13]
    assert np.frombuffer(sent["request_output_len"], np.uint32).tolist() == [5]
    assert np.frombuffer(sent["min_length"], np.uint32).tolist() == [5]


def test_a_server_without_counts_is_told_of() -> None:
    outputs = [{"text_output": np.array([[b"x"]], object)}] * 3
    with fake_server(FakeModel("text", TEXT, outputs)) as server:
        report = summarise(load(server))
    assert report.output_tokens == 3 and not report.tokens_counted


def test_a_failed_request_is_counted_and_spares_the_others() -> None:
    with fake_server(text_model([1] * 3, error_after=1, error="no memory now")) as server:
        report = summarise(load(server, num_requests=6, concurrency=2))
    assert (report.requests, report.failed, report.errors) == (6, 6, {"no memory now": 6})
    assert report.first_token_ms == {} and report.output_tokens == 0


def test_a_request_without_an_end_fails_at_its_timeout() -> None:
    with fake_server(text_model([1], never_ends=True)) as server:
        report = summarise(load(server, timeout_s=0.3))
    assert report.errors == {"no end within 0.3 s": 1}


def test_requests_at_a_rate_do_not_wait_for_each_other() -> None:
    with fake_server(text_model([1, 1], first_s=0.5)) as server:
        report = summarise(load(server, num_requests=30, concurrency=8, request_rate=60.0, seed=3))
        arrived = np.sort(server.arrived)
    assert report.failed == 0
    assert 0.3 < arrived[-1] - arrived[0] < 0.9  # 29 gaps of 1/60 s on average
    assert report.seconds < 1.5  # one after another they would take 15 s
    assert np.diff(arrived).std() > 0.005  # not evenly spaced


def test_no_server_is_an_error_that_names_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineDownError, match=url):
        run_load(LoadSpec(url, "text", ["hello"], 1, 1, connect_s=0.5))


def test_processes_leave_half_the_cores_to_the_server() -> None:
    assert [choose_processes(streams, cores=16) for streams in (1, 16, 17, 64, 1000)] == [1, 1, 2, 4, 8]
    assert choose_processes(1000, cores=1) == 1


def test_statistics_of_records_worked_out_by_hand() -> None:
    records = [
        Record(0, sent=10.0, ended=11.0, responses=[(10.1, 1), (10.2, 1), (10.5, 3)]),
        Record(1, sent=10.5, ended=12.0, responses=[(11.0, 2)]),
        Record(2, sent=10.0, ended=10.1, responses=[(10.05, 1)], error="refused"),
    ]
    report = summarise(records)
    assert (report.requests, report.failed, report.output_tokens) == (3, 1, 7)
    assert (report.seconds, report.tokens_per_s, report.requests_per_s) == (2.0, 3.5, 1.0)
    assert report.first_token_ms["mean"] == pytest.approx(300)
    assert report.inter_token_ms["mean"] == pytest.approx(100)  # gaps 100 and, three times, 300 / 3
    assert report.token_ms["mean"] == pytest.approx(100)  # the second request has no gap
    assert report.request_ms["max"] == pytest.approx(1500)
    assert report.tokens_per_response == 1.75


def test_bench_load_prints_a_table_and_writes_json_and_picture(tmp_path) -> None:
    toy_tokenizer(512).save(str(tmp_path / "tokenizer.json"))
    model = FakeModel("tensorrt_llm_bls", TEXT, text_responses([("x", 1)] * 4), gap_s=0.01)
    with fake_server(model) as server:
        arguments = ["bench", "load", "--url", server.url, "--tokenizer", str(tmp_path)]
        arguments += ["--concurrency", "1,2", "--prompt-tokens", "12", "--output-tokens", "4"]
        done = CliRunner().invoke(app, [*arguments, "--requests", "3", "--output", str(tmp_path / "out")])
        texts = [request.raw_input_contents[0][4:] for request in server.requests]
    assert done.exit_code == 0, done.output
    assert all(len(text) == 12 for text in texts) and len(texts) == 6
    report = json.loads((tmp_path / "out" / "load.json").read_text())
    assert report["results"]["2 at a time"]["output_tokens"] == 12
    environment = report["environment"]
    assert environment["cpu"] and environment["cores"]
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert ink(tmp_path / "out" / "load.png") > 0.01


def test_bench_load_starts_no_request_after_its_seconds_and_says_so(tmp_path) -> None:
    model = FakeModel("tensorrt_llm_bls", TEXT, text_responses([("x", 1)] * 3), first_s=0.4)
    with fake_server(model) as server:
        (tmp_path / "p.jsonl").write_text('{"text": "hello"}\n')
        arguments = ["bench", "load", "--url", server.url, "--prompts", str(tmp_path / "p.jsonl")]
        arguments += ["--concurrency", "1,2", "--requests", "100", "--max-seconds", "2"]
        started = time.monotonic()
        done = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path)])
        took = time.monotonic() - started
    assert done.exit_code == 0, done.output
    assert took < 30  # 80 s without the limit
    results = json.loads((tmp_path / "load.json").read_text())["results"]
    assert 1 <= results["1 at a time"]["requests"] < 100 and results["2 at a time"]["failed"] == 0
    assert "of 100 requests were sent; --max-seconds 2 ended the run" in done.output


def test_the_load_generator_sends_the_types_that_the_model_declares(tmp_path) -> None:
    dtypes = {"text_input": "STRING", "max_tokens": "UINT32"}
    model = FakeModel("ensemble", TEXT, text_responses([("x", 1)]), dtypes=dtypes)
    with fake_server(model) as server:
        (tmp_path / "p.jsonl").write_text('{"text": "hello"}\n')
        arguments = ["bench", "load", "--url", server.url, "--prompts", str(tmp_path / "p.jsonl")]
        done = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path), "--natural-ends"])
        types = {tensor.name: tensor.datatype for tensor in server.requests[0].inputs}
    assert done.exit_code == 0, done.output
    assert types["max_tokens"] == "UINT32"


def test_ctrl_c_ends_a_load_without_a_traceback_of_any_process(tmp_path) -> None:
    with fake_server(text_model([1], never_ends=True)) as server:
        (tmp_path / "p.jsonl").write_text('{"text": "hello"}\n')
        command = [sys.executable, "-m", "tridecode.tools.cli", "bench", "load", "--url", server.url]
        command += ["--model", "text", "--prompts", str(tmp_path / "p.jsonl"), "--output", str(tmp_path)]
        pipe = subprocess.PIPE
        # a shell's background job, which the tests may be, ignores SIGINT and hands that on
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        child = subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True, preexec_fn=heed)
        deadline = time.monotonic() + 60
        while not server.requests and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGINT)
        _, told = child.communicate(timeout=30)
    assert child.returncode == 130
    assert b"Traceback" not in told


def test_bench_load_fails_where_requests_fail(tmp_path) -> None:
    model = FakeModel("tensorrt_llm_bls", TEXT, text_responses([("x", 1)]), error_after=0, error="full")
    with fake_server(model) as server:
        (tmp_path / "p.jsonl").write_text('{"text": "hello"}\n')
        arguments = ["bench", "load", "--url", server.url, "--output", str(tmp_path)]
        done = CliRunner().invoke(app, [*arguments, "--prompts", str(tmp_path / "p.jsonl")])
    assert done.exit_code == 1
    assert "4 requests failed: full" in done.output
