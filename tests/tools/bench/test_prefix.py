"""`tridecode bench prefix`: its loads, what must be computed of them, and its report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.checkpoints import save, tiny_gpt2
from tests.tools.bench.pictures import ink
from tridecode.tools.bench.prefix.index_bench import measure_index
from tridecode.tools.bench.prefix.server_player import ServerPlayer
from tridecode.tools.bench.prefix.traffic import LOADS, make_traffic
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
