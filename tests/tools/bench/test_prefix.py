"""`tridecode bench prefix`: its loads, what must be computed of them, and its report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.backend.engine.toy_device import limits
from tests.checkpoints import save, tiny_gpt2
from tests.tools.bench.pictures import ink
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.prefix.figures import Played, PlayedStep
from tridecode.tools.bench.prefix.index_bench import measure_index
from tridecode.tools.bench.prefix.prediction import cost_of, predicted_rate
from tridecode.tools.bench.prefix.server_player import ServerPlayer
from tridecode.tools.bench.prefix.traffic import LOADS, Conversation, Traffic, Turn, make_traffic
from tridecode.tools.bench.studies.step_model import LLAMA, StepCost
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.cli import app
from tridecode.tools.serve.server_process import running_server

BLOCK = 8


def least_by_search(load: str, seed: int) -> int:
    """Prompt tokens outside the full blocks that earlier requests had in the cache, one request after the
    other: each prompt is compared with every sequence before it."""
    traffic = make_traffic(load, 5000, 20, 3, 21, seed)
    random, cached, total = np.random.default_rng(seed + 1), [], 0
    for one in traffic.conversations:
        for number, turn in enumerate(one.turns):
            prompt = one.prompt(number).tolist()
            answer = random.integers(5000, 9000, turn.answer).tolist()
            found = max((_common(prompt[:-1], other) // BLOCK * BLOCK for other in cached), default=0)
            total += len(prompt) - found
            cached.append((prompt + answer)[:-1])
            one.answered(answer)
    return total


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("load", LOADS)
def test_the_least_that_must_be_computed_is_that_of_a_search(load: str) -> None:
    assert make_traffic(load, 5000, 20, 3, 21, 7).least_computed(BLOCK) == least_by_search(load, 7)


@pytest.mark.parametrize("load", LOADS)
def test_a_load_follows_from_its_seed(load: str) -> None:
    one, same, other = (make_traffic(load, 500, 4, 2, 30, seed) for seed in (1, 1, 2))
    ids = [
        [turn.ids.tolist() for talk in one.conversations for turn in talk.turns] for one in (one, same, other)
    ]
    assert ids[0] == ids[1] != ids[2]
    assert one.longest >= max(len(talk.prompt(0)) for talk in one.conversations)


def test_bench_prefix_computes_the_least_and_writes_a_report_and_a_picture(tmp_path: Path) -> None:
    load = "--conversations 3 --rounds 2 --common 70 --repeats 1"
    arguments = ["bench", "prefix", "--preset", "toy", "--device", "cpu", *load.split()]
    arguments += ["--output", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "prefix-conversations-toy.json").read_text())["results"]
    (on,), (off,) = report["on"], report["off"]
    assert report["computed_over_least"] == 1.0 and on["computed"] == report["least_computed"]
    assert on["computed"] + on["cached"] == off["computed"] and off["cached"] == 0
    assert on["hits"] == 5 and on["misses"] == 1 and off["hits"] == 0
    assert ink(tmp_path / "prefix-conversations-toy.png") > 0.01


def test_a_server_without_its_metrics_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "prefix", "--url", "localhost:1"])
    assert result.exit_code != 0 and "--metrics" in result.output


def test_an_indexed_block_takes_at_most_256_bytes() -> None:
    assert measure_index(tokens=1024, blocks=20_000)["bytes_per_block"] <= 256


def test_a_prediction_is_the_sum_of_its_steps() -> None:
    """Send a prompt of 1,000 tokens twice: it is computed, then found except for its last 8 tokens."""
    cost = StepCost(weights=3.0, token=0.02, cached_token=1e-3, step=0.5, prompt_step=0.25)
    sizes = limits(num_blocks=400, block_tokens=8, max_sequence_tokens=1100, max_step_tokens=2000)
    turn = Turn(np.arange(1000, dtype=np.int32) % 50, 2)
    rates = {
        use: predicted_rate(Traffic([Conversation([turn, turn], cycle=1)], 1002), sizes, cost, use)
        for use in ("on", "off")
    }
    prompt, hit, decode = 0.75 + 20.0, 0.75 + 3.0, 0.5 + 3.0 + 1.001
    assert rates["off"] == pytest.approx(4000 / (2 * prompt + 2 * decode))
    assert rates["on"] == pytest.approx(4000 / (prompt + hit + 2 * decode))


def test_costs_of_steps_are_known_for_whole_weights_only() -> None:
    assert cost_of(Job(preset="llama-3-8b"), "NVIDIA H200") == LLAMA
    slower = cost_of(Job(preset="llama-3-8b"), "NVIDIA H100 80GB HBM3")
    assert slower is not None and (slower.weights > LLAMA.weights, slower.token) == (True, LLAMA.token)
    assert cost_of(Job(preset="llama-3-8b"), "") is None
    for job in (
        Job(preset="llama-3-8b", quantization="int8"),
        Job(preset="llama-3-8b", tensor_para_size=2),
        Job(preset="toy"),
    ):
        assert cost_of(job, "NVIDIA H200") is None


def test_steps_with_copies_are_compared_with_those_without() -> None:
    """Steps of 4 decode rows take 5 ms, 6 with copies in and 7 with copies out; others are ignored."""
    played, now = Played(seconds=1.0), 0.0
    for decodes, prompts, ins, outs, ms in (
        *[(4, 0, 0, 0, 5)] * 4, (4, 0, 2, 0, 6), (4, 0, 0, 0, 6), *[(4, 0, 0, 0, 5)] * 2, (5, 0, 0, 0, 50),
        (4, 0, 0, 0, 50), (4, 9, 0, 0, 80), (4, 0, 0, 0, 50), (4, 0, 0, 1, 7), (4, 0, 0, 0, 7),
        (4, 0, 0, 1, 7), (4, 0, 1, 0, 50),
    ):  # fmt: skip
        now += ms / 1000
        played.steps.append(PlayedStep(now, decodes, prompts, ins, outs))
    found = played.figures()
    assert (found["decodes"], found["plain_steps"], found["ins_steps"], found["outs_steps"]) == (4, 5, 2, 3)
    assert (found["plain_ms"], found["ins_ms"], found["outs_ms"]) == pytest.approx((5, 6, 7))


@pytest.mark.server
@pytest.mark.slow
def test_a_server_computes_the_least_of_the_same_load(tmp_path: Path) -> None:
    settings = {"cache_bytes": "67108864", "block_tokens": str(BLOCK)}
    repository = build_repo(
        str(save(tiny_gpt2(), tmp_path / "hf")), tmp_path / "repo", engine_settings=settings
    )
    with running_server(repository) as server:
        player = ServerPlayer(server.grpc_url, f"127.0.0.1:{server.metrics_port}")
        shape = ("long", 90, 1, 6, 90, 0)
        played = {use: player.play(make_traffic(*shape), use, "a salt") for use in ("on", "off")}
    traffic = make_traffic(*shape)
    assert played["on"].computed == traffic.least_computed(BLOCK)
    assert played["off"].computed == played["on"].computed + played["on"].cached and not played["off"].cached
    assert len(played["on"].first_ms) == traffic.requests
