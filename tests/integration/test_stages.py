"""Pipeline stages in the real tritonserver, with and without tensor ranks, give transformers' greedy
tokens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.backend.engine.offline_models import hf_greedy
from tests.checkpoints import save, tiny_gpt2
from tests.integration.clients import infer, standard_inputs, stream
from tests.integration.engines import FIRST, add_engine
from tests.reliability.service import Service
from tests.waiting import wait_until
from tridecode.backend.supervisor import processes, state_file
from tridecode.tools.build_repo.build import build_repo

pytestmark = [pytest.mark.server, pytest.mark.slow]

SQUARE = "square"  # tensor_para_size 2 x pipeline_para_size 2; the first engine has 2 stages
RANKS = {FIRST: 2, SQUARE: 4}
PROMPTS = [[5, 9, 11], [7, 8, 4, 20, 3, 17], [2]]
COUNT = 24


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_gpt2(n_head=4, n_embd=48, n_layer=4, n_positions=256)


@pytest.fixture(scope="module")
def service(model, tmp_path_factory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("stages")
    repository = build_repo(
        str(save(model, folder / "hf")), folder / "repo", pipeline_para_size=2,
        engine_settings={"cache_bytes": "4194304", "max_sequences": "8", "num_threads": "1", "device": "cpu"},
    )  # fmt: skip
    add_engine(repository, SQUARE, 2, 2)
    held = Service(repository)
    yield held
    held.close()


def wanted(model: torch.nn.Module, row: list[int]) -> list[int]:
    return [*row, *hf_greedy(model, row, COUNT)[0]]


def states(service: Service) -> dict[str, state_file.StateFile]:
    """Return the state of each engine by its model."""
    found = [state_file.read(folder) for folder in service.engine_folders()]
    return {Path(content.engine_dir).name: content for content in found if content is not None}


@pytest.mark.parametrize("name", RANKS)
def test_greedy_tokens_over_stages_are_those_of_transformers(name, service: Service, model) -> None:
    wait_until(lambda: states(service)[name].state.phase == "ready", 60, f"the engine of {name}")
    lines = [processes.command_line(process.pid) for process in service.processes()]
    ranks = [line for line in lines if "--rank" in line and any(part.endswith(f"/{name}") for part in line)]
    assert sorted(int(line[line.index("--rank") + 1]) for line in ranks) == list(range(RANKS[name]))

    def ask(row: list[int]) -> list[int]:
        answer = infer("http", service.server.http_url, name, standard_inputs([row], [COUNT]))
        return answer.as_numpy("output_ids")[0, 0].tolist()

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, PROMPTS)) == [wanted(model, row) for row in PROMPTS]


def test_a_stream_over_stages_ends_with_the_tokens_of_transformers(service: Service, model) -> None:
    answers = list(
        stream(service.grpc, "fastertransformer_streaming", standard_inputs([PROMPTS[1]], [COUNT]))
    )
    assert answers[-1].as_numpy("output_ids")[0, 0].tolist() == wanted(model, PROMPTS[1])
