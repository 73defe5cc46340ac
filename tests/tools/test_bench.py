"""The benchmarks' own truth: what the load generator reports of a server whose timings are known, that every
engine is asked the same, and that what is written can be read."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib import image
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.checkpoints import tiny_tokenizer
from tests.tools.fake_server import FakeModel, fake_server, text_responses
from tridecode.backend.config import read_engine_config
from tridecode.backend.engine.scheduler import Scheduler
from tridecode.backend.engine_config_file import checkpoint_dir, read_engine_parameters
from tridecode.backend.errors import ConfigError, EngineDownError
from tridecode.backend.models import family, read_model_config
from tridecode.model_repo_templates.pbtxt import parse_model_config
from tridecode.tools.bench import plots
from tridecode.tools.bench.commands import ratios, with_workload
from tridecode.tools.bench.engine import bench_engine
from tridecode.tools.bench.hf_config import hf_config
from tridecode.tools.bench.load import choose_processes, run_load
from tridecode.tools.bench.load_command import LoadPlan, _Target, _title
from tridecode.tools.bench.load_report import summarise
from tridecode.tools.bench.load_worker import LoadSpec, Record
from tridecode.tools.bench.measure import Job, measure, run_apart, timing
from tridecode.tools.bench.plots import plot_batches, plot_load
from tridecode.tools.bench.presets import PRESETS, preset, random_prompts
from tridecode.tools.bench.prompts import find_tokenizer, read_prompts, text_prompts
from tridecode.tools.bench.random_repo import toy_tokenizer, write_random_repository
from tridecode.tools.bench.report import command
from tridecode.tools.bench.server import compare_with_engine
from tridecode.tools.bench.transformers_bench import bench_transformers
from tridecode.tools.bench.vllm_bench import bench_vllm
from tridecode.tools.bench.workloads import workload_prompts
from tridecode.tools.cli import app

TEXT = ("text_input", "max_tokens")


def text_model(tokens: list[int], **options) -> FakeModel:
    return FakeModel("text", TEXT, text_responses([("x" * count, count) for count in tokens]), **options)


def load(server, **options):
    given = {"prompts": ["hello"], "output_tokens": 5, "num_requests": 1, **options}
    return run_load(LoadSpec(server.url, given.pop("model", "text"), **given))


# ---------------------------------------------------------------- the load generator


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
    assert [count for _, count in record.came] == [1, 1, 2, 1]
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
        Record(0, sent=10.0, ended=11.0, came=[(10.1, 1), (10.2, 1), (10.5, 3)]),
        Record(1, sent=10.5, ended=12.0, came=[(11.0, 2)]),
        Record(2, sent=10.0, ended=10.1, came=[(10.05, 1)], error="refused"),
    ]
    report = summarise(records)
    assert (report.requests, report.failed, report.output_tokens) == (3, 1, 7)
    assert (report.seconds, report.tokens_per_s, report.requests_per_s) == (2.0, 3.5, 1.0)
    assert report.first_token_ms["mean"] == pytest.approx(300)
    assert report.inter_token_ms["mean"] == pytest.approx(100)  # gaps 100 and, three times, 300 / 3
    assert report.token_ms["mean"] == pytest.approx(100)  # the second request has no gap
    assert report.request_ms["max"] == pytest.approx(1500)
    assert report.tokens_per_response == 1.75


# ---------------------------------------------------------------- prompts and repositories


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_text_prompts_have_exactly_the_tokens_that_were_asked_for(tokens, tmp_path) -> None:
    for name, tokenizer in {
        "plain": Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str()),
        "toy": toy_tokenizer(1024),
    }.items():
        texts = text_prompts(tokenizer, 5, tokens, seed=1)
        assert [len(tokenizer.encode(text).ids) for text in texts] == [tokens] * 5, name
        assert texts == text_prompts(tokenizer, 5, tokens, seed=1)
        assert tokens == 1 or len(set(texts)) > 1


def test_a_bos_that_the_tokenizer_adds_counts_as_a_prompt_token() -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizer(adds_bos=True).backend_tokenizer.to_str())
    assert len(tokenizer.encode("").ids) == 1
    (text,) = text_prompts(tokenizer, 1, 9, seed=1)
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == 8


def test_lines_of_a_file_are_prompts(tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    assert read_prompts(path, 2) == ["one", "two"]
    path.write_text('{"text": "one"}\n{"txt": "two"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)


def test_every_id_of_a_toy_tokenizer_decodes_to_a_text_of_its_own() -> None:
    tokenizer = toy_tokenizer(700)
    assert tokenizer.get_vocab_size() == 700
    fillers = [tokenizer.decode([token]) for token in range(256, 700)]
    assert len(set(fillers)) == 444 and all(text.strip() for text in fillers)
    text = "Grüße, 今日は 🙂\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text


def test_a_random_repository_is_complete_and_says_that_it_is_random(tmp_path) -> None:
    model = preset("toy").model
    write_random_repository(tmp_path / "r", model, {"data_type": "fp32", "max_sequences": 8})
    engine_dir = str(tmp_path / "r" / "fastertransformer")
    config = read_engine_config(read_engine_parameters(engine_dir), "config.pbtxt")
    assert (config.weights, config.data_type, config.max_sequences) == ("random", "fp32", 8)
    text = (tmp_path / "r" / "fastertransformer" / "config.pbtxt").read_text()
    assert text.count('"weights"') == 1
    assert read_model_config(checkpoint_dir(engine_dir)) == model
    names = set()
    for path in (tmp_path / "r").glob("*/config.pbtxt"):
        names.add(parse_model_config(path.read_text(), str(path)).name)
    assert {"fastertransformer", "fastertransformer_streaming", "tensorrt_llm_bls", "ensemble"} <= names
    assert find_tokenizer(tmp_path / "r").get_vocab_size() == model.vocab_size


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_has_as_many_parameters_as_transformers_model_of_it(name) -> None:
    model = preset(name).model
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(hf_config(model))
    specs = family(model.family).weight_specs(model)
    ours = sum(np.prod(spec.shape) for spec in specs)
    assert ours == sum(parameter.numel() for parameter in theirs.parameters())


# ---------------------------------------------------------------- engines


def test_a_step_is_the_time_of_all_tokens_less_the_first_over_the_rest() -> None:
    figures = timing(4, 11, one=[0.5, 0.4, 0.6], whole=[1.5, 9.0, 1.4])
    assert figures.first_token_ms == 500 and figures.step_ms == 100
    assert figures.tokens_per_s == 40 and figures.total_tokens_per_s == round(44 / 1.5, 2)


def test_every_engine_is_asked_the_same_prompts() -> None:
    asked: dict[str, list] = {"a": [], "b": []}

    def engine(name):
        def generate(prompts, tokens):
            asked[name].append((list(map(tuple, prompts)), tokens))
            return 0.1 + 0.01 * tokens

        return generate

    job = Job(preset="toy", batches=(1, 3), prompt_tokens=5, output_tokens=7, repeats=2)
    figures = [measure(engine(name), job, 1000, lambda text: None) for name in asked]
    assert asked["a"] == asked["b"] and figures[0] == figures[1]
    assert {(len(prompts), len(prompts[0]), tokens) for prompts, tokens in asked["a"][-2:]} == {
        (3, 5, 1),
        (3, 5, 7),
    }
    assert figures[0]["batches"][1]["step_ms"] == pytest.approx(10.0)


def test_the_engine_alone_is_measured_with_exact_lengths() -> None:
    job = Job(preset="toy", batches=(1, 5), prompt_tokens=24, output_tokens=9, repeats=1, device="cpu")
    result = bench_engine(job)
    assert (result["device"], result["dtype"], result["model"]) == ("cpu", "fp32", "toy")
    assert [row["batch"] for row in result["batches"]] == [1, 5]
    assert all(row["first_token_ms"] > 0 and row["all_tokens_s"][0] > 0 for row in result["batches"])


def test_prompts_of_a_file_run_a_few_at_a_time_through_each_engine() -> None:
    prompts = tuple(tuple(ids) for ids in random_prompts(5, 6, 1000, 0)) + ((7, 8, 9),)
    job = Job(preset="toy", batches=(2,), output_tokens=4, prompts=prompts, device="cpu")
    for bench in (bench_engine, bench_transformers):
        load = bench(job)["workload"]
        assert (load["requests"], load["prompt_tokens"], load["output_tokens"]) == (6, 33, 24)
        assert load["tokens_per_s"] == pytest.approx(24 / load["seconds"], rel=0.05)


def test_a_workload_has_lambadas_lengths_and_the_same_ids_every_time() -> None:
    prompts = workload_prompts("lambada", 1000)
    lengths = np.array([len(prompt) for prompt in prompts])
    assert (len(prompts), lengths.min(), lengths.max()) == (5153, 58, 222)
    assert lengths.mean() == pytest.approx(80.2, abs=0.01) and lengths.std() == pytest.approx(12.3, abs=0.01)
    assert lengths[:16].std() > 3  # of all lengths, not sorted
    ids = np.concatenate(prompts)
    assert ids.min() == 3 and ids.max() == 999
    assert workload_prompts("lambada", 1000, 20) == prompts[:20]
    assert workload_prompts("lambada", 1000, 20, seed=1) != prompts[:20]
    with pytest.raises(ConfigError, match="no workload 'squad'; there is lambada"):
        workload_prompts("squad", 1000)


def test_both_engines_answer_a_workload_and_the_ratio_is_of_their_rates(tmp_path) -> None:
    arguments = ["bench", "compare", "--preset", "toy", "--workload", "lambada", "--requests", "20"]
    arguments += ["--batches", "4", "--repeats", "2", "--device", "cpu", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "compare-toy-lambada.json").read_text())
    assert report["settings"]["workload"] == "lambada" and report["settings"]["prompts"] == []
    prompt_tokens = sum(map(len, workload_prompts("lambada", 1024, 20)))
    ours, theirs = (report["results"][name]["workload"] for name in ("tridecode", "transformers"))
    for load in (ours, theirs):
        assert (load["requests"], load["at_a_time"]) == (20, 4)
        assert (load["prompt_tokens"], load["output_tokens"]) == (prompt_tokens, 60)
        assert len(load["all_seconds"]) == 2
    ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
    assert report["results"]["ratios"]["transformers"]["4"] == pytest.approx(ratio, abs=1e-3)
    assert "tokens/s, times those of" in done.output


def test_the_engine_holds_as_many_sequences_of_a_workload_as_were_asked_for(monkeypatch) -> None:
    """As a server of so many places: whoever ends makes room for the next prompt."""
    plans = []
    plan = Scheduler.plan

    def recorded(scheduler):
        found = plan(scheduler)
        plans.append(0 if found is None else found.num_rows)
        return found

    monkeypatch.setattr(Scheduler, "plan", recorded)
    prompts = tuple(tuple(ids) for ids in random_prompts(11, 6, 1000, 0))
    bench_engine(Job(preset="toy", batches=(3,), output_tokens=4, prompts=prompts, device="cpu", repeats=1))
    assert max(plans) == 3
    # each of 3 prompts of the warm-up and of 11 is in 4 steps: one for its prompt, three that decode
    assert sum(plans) == 3 * 4 + 11 * 4


def test_prompts_of_a_file_or_workload_go_with_one_batch_size() -> None:
    job = Job(preset="toy", batches=(1, 8), output_tokens=4)
    with pytest.raises(ConfigError, match="--batches is 1, 8; wanted one number"):
        with_workload(job, "lambada", 5)
    with pytest.raises(ConfigError, match="2122 tokens; toy has 2048 positions"):
        with_workload(replace(job, batches=(4,), output_tokens=1900), "lambada", None)


def test_ratios_are_of_the_rates_with_prompts_included() -> None:
    rows = [{"batch": 1, "total_tokens_per_s": 30.0}, {"batch": 8, "total_tokens_per_s": 200.0}]
    found = ratios(
        {
            "tridecode": {"batches": rows},
            "transformers": {"batches": [{"batch": 1, "total_tokens_per_s": 20.0}]},
            "vLLM": {"error": "vllm is not installed"},
        }
    )
    assert found == {"transformers": {"1": 1.5}}


def test_an_engine_that_is_not_installed_says_so(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench_vllm(Job(preset="toy")) == {"error": "vllm is not installed"}


def test_an_engine_that_fails_in_its_process_is_an_error_with_its_text() -> None:
    result = run_apart("tridecode.tools.bench.engine", Job(preset="no-such-model"))
    assert "no preset 'no-such-model'" in result["error"]
    assert "No module named" in run_apart("tridecode.tools.bench.absent", Job(preset="toy"))["error"]


# ---------------------------------------------------------------- what is written


def ink(path) -> float:
    """The share of a picture's pixels that are not white."""
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return float((image.imread(path)[..., :3].min(axis=-1) < 0.9).mean())


def test_pictures_are_png_files_with_curves(tmp_path) -> None:
    rows = [{"batch": batch, "step_ms": 3.0 + batch, "tokens_per_s": 300.0 * batch} for batch in (1, 8, 64)]
    empty = plot_batches(tmp_path / "empty.png", "", {"none": []})
    drawn = plot_batches(tmp_path / "batches.png", "decoding", {"ours": rows, "theirs": rows[:2]})
    assert ink(drawn) > ink(empty) > 0
    records = [Record(n, 0.0, 1.0, [(0.1 * n, 1), (0.5 + 0.1 * n, 2)]) for n in range(3)]
    assert ink(plot_load(tmp_path / "sub" / "load.png", "load", {"3 at a time": records})) > 0.01


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


def test_a_report_says_the_command_without_this_machines_folders() -> None:
    typed = ["/opt/x/tridecode/tools/cli.py", "bench", "engine", "--output", "/tmp/a b", "--preset", "toy"]
    assert command(typed) == "tridecode bench engine --output 'a b' --preset toy"
    assert command(["tools/bench/gpu_report.py", "--name", "h200"]) == "tools/bench/gpu_report.py --name h200"


def test_load_is_drawn_on_logarithmic_axes_with_what_was_measured_in_its_title(tmp_path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, title, path: drawn.append((figure, title)) or path)
    records = [Record(n, 0.0, 1.0, [(0.1 * n, 1), (0.1 * n, 2), (0.5 + 0.1 * n, 2)]) for n in range(1, 4)]
    plots.plot_load(tmp_path / "x.png", "a title", {"3 at a time": records})
    ((figure, title),) = drawn
    axes = figure.axes
    assert title == "a title" and [one.get_xscale() for one in axes] == ["log", "log"]
    assert min(axes[1].lines[0].get_xdata()) > 0  # merged responses have gaps of 0
    repository = write_random_repository(tmp_path / "models", preset("toy").model, {"device": "cpu"})
    plan = LoadPlan("localhost:8001", None, False, (1,), (), None, 48, 7, None, None, 0, True, None, 9, 9, 0)
    target = _Target("tensorrt_llm_bls", "INT32", repository)
    told = _title(plan, target)
    assert "toy" in told and f"({os.cpu_count()} cores)" in told
    assert "prompts of 48 tokens, 7 new tokens" in told
    assert "server there:8001" in _title(replace(plan, url="there:8001"), replace(target, repository=None))


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


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        (b"{", "line 1: wanted a JSON object"),
        (b'{"text": 3}', "line 1: wanted a JSON object"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b"[" * 100_000, "line 1: wanted a JSON object"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_read_is_named(tmp_path, content, told) -> None:
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"p.jsonl.*{told}"):
        read_prompts(path)


def test_ctrl_c_ends_a_load_without_a_traceback_of_any_process(tmp_path) -> None:
    with fake_server(text_model([1], never_ends=True)) as server:
        (tmp_path / "p.jsonl").write_text('{"text": "hello"}\n')
        command = [sys.executable, "-m", "tridecode.tools.cli", "bench", "load", "--url", server.url]
        command += ["--model", "text", "--prompts", str(tmp_path / "p.jsonl"), "--output", str(tmp_path)]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True)
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


@pytest.mark.server
def test_a_server_is_measured_beside_the_engine_alone() -> None:
    job = Job(preset="toy", batches=(2,), prompt_tokens=16, output_tokens=8, repeats=1, device="cpu")
    for tokens_in in (False, True):
        result = compare_with_engine(job, tokens_in=tokens_in)
        assert result["engine"]["batches"][0]["batch"] == result["server"]["batches"][0]["batch"] == 2
        assert result["overhead"][0]["batch"] == 2
