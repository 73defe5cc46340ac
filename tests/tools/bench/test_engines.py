"""Every engine measures the same job, and the ratios follow from the rates."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.tools.bench import engines
from tridecode.tools.bench.compare import compare_with_engine, ratios
from tridecode.tools.bench.engines import BenchEngine, engines_of, ours, run_apart
from tridecode.tools.bench.engines.ctranslate2 import bench_ctranslate2
from tridecode.tools.bench.engines.ours import bench_engine
from tridecode.tools.bench.engines.transformers import bench_transformers
from tridecode.tools.bench.engines.vllm import bench_vllm
from tridecode.tools.bench.load.workloads import (
    MIX_OUTPUT,
    MIX_PROMPT,
    MIX_SIGMA,
    mix_requests,
    workload_prompts,
)
from tridecode.tools.bench.measure import Job, Run, Step, latencies, measure, steady_gaps, timing
from tridecode.tools.bench.shapes.presets import random_prompts
from tridecode.tools.cli import app


def test_a_step_is_the_time_of_all_tokens_less_the_first_over_the_rest() -> None:
    figures = timing(4, 11, one=[0.5, 0.4, 0.6], whole=[1.5, 9.0, 1.4])
    assert figures.first_token_ms == 500 and figures.step_ms == 100
    assert figures.tokens_per_s == 40 and figures.total_tokens_per_s == round(44 / 1.5, 2)


def test_a_steady_step_is_between_two_that_all_sequences_decode_in() -> None:
    steps = [
        Step(0.0, 0, 30),
        Step(0.5, 2, 0),
        Step(0.6, 2, 0),
        Step(1.0, 2, 9),
        Step(1.1, 2, 0),
        Step(1.3, 2, 0),
    ]
    gaps = steady_gaps([*steps, Step(9.0, 1, 0)], 2)
    assert gaps == pytest.approx([0.1, 0.2])
    assert timing(2, 11, [0.5], [1.5], gaps).steady_step_ms == pytest.approx(150)
    assert timing(2, 11, [0.5], [1.5]).steady_step_ms is None


def test_latencies_are_of_requests_from_their_arrival_and_of_steps_by_their_kind() -> None:
    steps = [Step(1.0, 0, 40), Step(1.5, 1, 20), Step(1.7, 2, 0), Step(1.8, 2, 0)]
    found = latencies([Run([0.0, 1.0], [[1.0, 1.5, 1.7], [1.5, 1.7, 1.8]], steps)], slots=4)
    assert found["first_token_p50_ms"] == 750 and found["token_gap_p50_ms"] == pytest.approx(200)
    assert (found["mixed_steps"], found["decode_steps"]) == (1, 2)
    assert found["mixed_step_ms"] == 500 and found["decode_step_ms"] == pytest.approx(150)
    assert found["prompt_tokens_per_mixed_step"] == 30 and found["decoding_share"] == 5 / 16


def test_the_mix_has_the_lengths_it_is_said_to_have() -> None:
    prompts, outputs = mix_requests(1024, 4000)
    lengths = np.array([len(prompt) for prompt in prompts])
    for found, (median, least, most) in ((lengths, MIX_PROMPT), (np.array(outputs), MIX_OUTPUT)):
        assert np.median(found) == pytest.approx(median, rel=0.05)
        assert least <= found.min() and found.max() == most
        inner = np.log(
            found[(found > least) & (found < most)]
        )  # the middle half of a normal distribution spans 1.349 deviations
        assert np.subtract(*np.percentile(inner, [75, 25])) == pytest.approx(1.349 * MIX_SIGMA, rel=0.1)
    assert mix_requests(1024, 50, 1) == mix_requests(1024, 50, 1) != mix_requests(1024, 50, 2)


@pytest.mark.parametrize("rate", [pytest.param("0", marks=pytest.mark.nightly), "200"])
def test_the_mix_is_answered_with_the_lengths_that_each_request_wants(rate, tmp_path) -> None:
    arguments = ["bench", "mix", "--preset", "toy", "--requests", "12", "--slots", "3", "--rate", rate]
    arguments += ["--repeats", "1", "--device", "cpu", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "mix-toy.json").read_text())
    load, (prompts, outputs) = report["results"]["tridecode"]["workload"], mix_requests(1024, 12)
    assert (load["prompt_tokens"], load["output_tokens"]) == (sum(map(len, prompts)), sum(outputs))
    assert 0 < load["decoding_share"] <= 1 and load["first_token_p95_ms"] >= load["first_token_p50_ms"] > 0
    assert load["mixed_steps"] > 0 and load["decode_steps"] > 0


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


def test_the_cache_may_have_8_bits(tmp_path) -> None:
    arguments = ["bench", "engine", "--preset", "toy", "--batches", "2", "--output-tokens", "9"]
    arguments += ["--prompt-tokens", "24", "--repeats", "1", "--device", "cpu", "--kv-cache-dtype", "int8"]
    done = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "engine-int8-cache-toy.json").read_text())
    assert report["settings"]["kv_cache_dtype"] == "int8"


def test_prompts_of_a_file_run_a_few_at_a_time_through_each_engine() -> None:
    prompts = tuple(tuple(ids) for ids in random_prompts(5, 6, 1000, 0)) + ((7, 8, 9),)
    # outputs shorter than a warm-up's 4 tokens: the engine is sized for the job's sequences
    job = Job(preset="toy", batches=(2,), output_tokens=2, prompts=prompts, device="cpu")
    for bench in (bench_engine, bench_transformers):
        load = bench(job)["workload"]
        assert (load["requests"], load["prompt_tokens"], load["output_tokens"]) == (6, 33, 12)
        assert load["tokens_per_s"] == pytest.approx(12 / load["seconds"], rel=0.05)


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
    assert "tokens/s over those of" in done.output


def test_the_engine_holds_as_many_sequences_of_a_workload_as_were_asked_for(monkeypatch) -> None:
    """A sequence that ends makes room for the next prompt, as in a server with that number of slots."""
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
    # each of the 3 warm-up prompts and of the 11 others takes 4 steps: one prefill, three decode
    assert sum(plans) == 3 * 4 + 11 * 4


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


def test_every_command_has_its_engines_ours_first() -> None:
    names = {command: [engine.name for engine in engines_of(command)] for command in ("compare", "beside")}
    assert names["compare"] == ["tridecode", "transformers", "vLLM"]
    assert names["beside"] == ["behind Triton", "tridecode", "ctranslate2", "transformers"]


def test_a_file_with_an_engine_is_all_that_another_engine_needs(tmp_path, monkeypatch) -> None:
    text = "from tridecode.tools.bench.engines import BenchEngine\n"
    text += "ENGINE = BenchEngine('another', ('compare',), lambda job: {'batches': []})\n"
    (tmp_path / "another_engine.py").write_text(text)
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    assert [engine.name for engine in engines_of("compare")][:2] == ["tridecode", "another"]


@pytest.mark.parametrize(("bench", "name"), [(bench_vllm, "vllm"), (bench_ctranslate2, "ctranslate2")])
def test_an_engine_that_is_not_installed_says_so(monkeypatch, bench, name) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench(Job(preset="toy")) == {"error": f"{name} is not installed"}


def test_an_engine_that_fails_in_its_process_is_an_error_with_its_text() -> None:
    result = run_apart(ours.ENGINE, Job(preset="no-such-model"))
    assert "no preset 'no-such-model'" in result["error"]
    absent = BenchEngine("absent", (), pytest.fail)  # no file of the package defines it
    assert "No module named" in run_apart(absent, Job(preset="toy"))["error"]


@pytest.mark.nightly
@pytest.mark.server
def test_a_server_is_measured_beside_the_engine_alone() -> None:
    job = Job(preset="toy", batches=(2,), prompt_tokens=16, output_tokens=8, repeats=1, device="cpu")
    for tokens_in in (False, True):
        result = compare_with_engine(job, tokens_in=tokens_in)
        assert result["engine"]["batches"][0]["batch"] == result["server"]["batches"][0]["batch"] == 2
        assert result["overhead"][0]["batch"] == 2
        least, median, most = result["server"]["batches"][0]["responses_per_stream"]
        assert 1 <= least <= median <= most <= 8
