"""Conversations through the real server and engine, over two tensor ranks, together with plain requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tritonclient.utils import InferenceServerException

from tests.backend.engine.offline_models import hf_greedy
from tests.checkpoints import save, tiny_gpt2
from tests.integration.clients import infer, standard_inputs
from tests.waiting import wait_until
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.serve.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.server, pytest.mark.slow]
MODEL = "interactive_fastertransformer"
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "interactive.md"


@dataclass
class Stack:
    server: ServerProcess
    repository: Path
    model: torch.nn.Module

    def round(self, protocol: str, rows: list[list[int]], count: int, **sequence) -> np.ndarray:
        """output_ids (B, W) of a round."""
        arrays = {name: array[None] for name, array in standard_inputs(rows, [count] * len(rows)).items()}
        if sequence.get("sequence_start"):
            arrays["session_len"] = np.full((1, len(rows), 1), 60, np.uint32)
        url = self.server.http_url if protocol == "http" else self.server.grpc_url
        return infer(protocol, url, MODEL, arrays, **sequence).as_numpy("output_ids")[0, :, 0]

    def processes(self, argument: str) -> list[psutil.Process]:
        """Return this repository's processes with the argument on their command line."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if argument in line and str(self.repository) in line:
                found.append(process)
        return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("gpt2")
    model = tiny_gpt2(n_head=4, n_embd=48)
    repository = build_repo(
        str(save(model, folder / "hf")), folder / "repo", tensor_para_size=2,
        contracts=["fastertransformer", "interactive"], owners=["fastertransformer"],
        engine_settings={"cache_bytes": "1048576", "max_sequences": "8"},
    )  # fmt: skip
    with running_server(repository) as server:
        yield Stack(server, repository, model)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_rounds_are_transformers_answers_to_the_whole_history(stack: Stack, protocol: str) -> None:
    histories = [[5, 9, 11], [7, 8, 4]]
    with ThreadPoolExecutor(2) as beside:
        plain = [
            beside.submit(
                infer, "grpc", stack.server.grpc_url, "fastertransformer", standard_inputs([[3, 6]], [20])
            )
            for _ in range(4)
        ]
        for turn, new in enumerate(([], [[21], [22]], [[23, 24], [25, 26]])):
            histories = [[*row, *more] for row, more in zip(histories, new)] if turn else histories
            ids = stack.round(
                protocol,
                new or histories,
                6,
                sequence_id=41,
                sequence_start=turn == 0,
                sequence_end=turn == 2,
            )
            histories = [[*row, *hf_greedy(stack.model, row, 6)[0]] for row in histories]
            assert ids.tolist() == histories
        wanted = [3, 6, *hf_greedy(stack.model, [3, 6], 20)[0]]
        assert all(one.result().as_numpy("output_ids")[0, 0].tolist() == wanted for one in plain)


def test_the_example_of_the_guide(stack: Stack, capsys) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    text = (
        code[1].replace("localhost:8000", stack.server.http_url).replace('"fastertransformer"', f'"{MODEL}"')
    )
    exec(compile(text.replace("200", "60"), str(PAGE), "exec"), {})
    first = [5, 9, 11, *hf_greedy(stack.model, [5, 9, 11], 4)[0]]
    assert capsys.readouterr().out == f"{first}\n{[*first, 6, *hf_greedy(stack.model, [*first, 6], 4)[0]]}\n"


def test_a_session_of_a_killed_engine_continues(stack: Stack) -> None:
    first = stack.round("grpc", [[5, 9]], 3, sequence_id=42, sequence_start=True)
    for rank in stack.processes("tridecode.backend.engine"):
        rank.kill()
    answers: list[list] = []

    def answered() -> bool:
        try:
            answers.append(stack.round("grpc", [[6]], 3, sequence_id=42).tolist())
        except InferenceServerException as error:
            assert error.status() == "StatusCode.UNAVAILABLE", error
        return bool(answers)

    wait_until(answered, 60, "an answer of the next engine")
    whole = [*first[0].tolist(), 6]
    assert answers == [[[*whole, *hf_greedy(stack.model, whole, 3)[0]]]]
    ids = stack.round("grpc", [[5, 9]], 3, sequence_id=42, sequence_start=True, sequence_end=True)
    assert ids.tolist() == [[5, 9, *hf_greedy(stack.model, [5, 9], 3)[0]]]


def test_a_session_of_a_killed_door_is_gone_and_can_be_started_again(stack: Stack) -> None:
    stack.round("grpc", [[5, 9]], 3, sequence_id=43, sequence_start=True)
    (door,) = [
        p for p in stack.processes("triton_python_backend_stub") if f"/{MODEL}/" in " ".join(p.cmdline())
    ]
    door.kill()
    with pytest.raises(InferenceServerException):
        stack.round("grpc", [[6]], 3, sequence_id=43)

    def starts_again() -> bool:
        try:
            ids = stack.round("grpc", [[5, 9]], 3, sequence_id=43, sequence_start=True)
        except InferenceServerException:
            return False
        return ids.tolist() == [[5, 9, *hf_greedy(stack.model, [5, 9], 3)[0]]]

    wait_until(starts_again, 60)
