"""Triton's dynamic batcher before the doors, in the real server: requests that it merges into one execution,
ragged ones too, come back in order, each row as if it had been alone, and a bad one among them ends alone.
"""

from __future__ import annotations

import queue
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.backend.engine.offline_models import hf_greedy
from tests.checkpoints import TINY_VOCAB, save, tiny_gpt2
from tests.integration.clients import fill, token_inputs
from tests.integration.test_refusals import POSITIONS, REFUSED
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.serve.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.server, pytest.mark.slow]

BATCHER = "dynamic_batching { max_queue_delay_microseconds: 50000 }"
#: as in the config.pbtxt of FasterTransformer's gpt
RAGGED = """batch_input [ {
  kind: BATCH_ITEM_SHAPE target_name: [ "input_ids_item_shape" ] data_type: TYPE_INT32
  source_input: [ "input_ids" ]
} ]"""
Arrays = dict[str, np.ndarray]


@dataclass
class Stack:
    server: ServerProcess
    model: torch.nn.Module

    def ask_all(self, requests: list[Arrays]) -> list[Arrays | InferenceServerException]:
        """The outputs, or the error, of requests that are sent at once, in their order."""
        answers: queue.Queue = queue.Queue()
        with grpcclient.InferenceServerClient(self.server.grpc_url) as client:
            for number, arrays in enumerate(requests):
                client.async_infer(
                    "fastertransformer",
                    fill(grpcclient, arrays),
                    lambda result, error, number=number: answers.put((number, result, error)),
                )
            found = dict(
                (number, error or outputs(result)) for number, result, error in _taken(answers, len(requests))
            )
        return [found[number] for number in range(len(requests))]

    def counts(self) -> tuple[int, int]:
        """Requests (rows) and executions of the model so far."""
        with grpcclient.InferenceServerClient(self.server.grpc_url) as client:
            (stats,) = client.get_inference_statistics("fastertransformer").model_stats
            return stats.inference_count, stats.execution_count


def _taken(answers: queue.Queue, count: int) -> list:
    return [answers.get(timeout=60) for _ in range(count)]


def outputs(result: grpcclient.InferResult) -> Arrays:
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def batched(repository: Path) -> Path:
    """The repository with FasterTransformer's dynamic batching of ragged ids."""
    path = repository / "fastertransformer" / "config.pbtxt"
    text = path.read_text()
    ids = text.index('name: "input_ids"')
    end = text.index("}", ids)
    path.write_text(f"{text[:end]} allow_ragged_batch: true {text[end:]}\n{BATCHER}\n{RAGGED}\n")
    return repository


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("batching")
    model = tiny_gpt2(n_positions=POSITIONS)
    repository = build_repo(
        str(save(model, folder / "hf")),
        folder / "repo",
        parity=False,
        engine_settings={"cache_bytes": "16777216", "max_bad_word_tokens": "1024", "batch_invariant": "true"},
    )
    with running_server(batched(repository)) as server:
        yield Stack(server, model)


def requests_of(count: int, seed: int) -> list[Arrays]:
    """Make requests of one to three rows with different widths, lengths and parameters, but the same
    inputs."""
    draw = np.random.default_rng(seed)
    requests = []
    for _ in range(count):
        rows = int(draw.integers(1, 4))
        prompts = [draw.integers(1, TINY_VOCAB, int(draw.integers(1, 10))).tolist() for _ in range(rows)]

        def column(values: list, kind: type, rows: int = rows) -> np.ndarray:
            return draw.choice(values, rows).astype(kind)[:, None]

        requests.append(
            token_inputs(
                prompts,
                draw.integers(1, 9, rows).tolist(),
                runtime_top_k=column([0, 1, 1, 5], np.uint32),
                runtime_top_p=column([0.0, 0.6, 0.9], np.float32),
                temperature=column([0.7, 1.0, 2.0], np.float32),
                repetition_penalty=column([1.0, 1.3], np.float32),
                random_seed=column([1, 7, 2**63], np.uint64),
                is_return_log_probs=column([True, False], bool),
            )
        )
    return requests


def assert_same(found: Arrays | InferenceServerException, wanted: Arrays) -> None:
    assert not isinstance(found, InferenceServerException), found
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert np.array_equal(found[name], array), name


def test_merged_requests_come_back_in_order_and_as_if_alone(stack: Stack) -> None:
    requests = requests_of(20, seed=1)
    alone = [stack.ask_all([request])[0] for request in requests]
    rows, executions = stack.counts()
    together = stack.ask_all(requests)
    more_rows, more_executions = stack.counts()
    assert more_rows - rows == sum(len(request["input_ids"]) for request in requests)
    assert more_executions - executions < len(requests), "Triton merged nothing"
    for request, found, wanted in zip(requests, together, alone, strict=True):
        assert not isinstance(wanted, InferenceServerException), wanted
        assert_same(found, wanted)
        rows, width = request["input_ids"].shape
        assert wanted["output_ids"].shape == (rows, 1, width + int(request["request_output_len"].max()))
        assert wanted["response_input_lengths"].tolist() == request["input_lengths"].tolist()


def test_greedy_rows_of_merged_requests_are_transformers(stack: Stack) -> None:
    prompts = [[[5, 9, 11], [7]], [[4] * 8], [[30, 2], [8, 8, 8, 8], [21]]]
    together = stack.ask_all([token_inputs(rows, [6] * len(rows)) for rows in prompts])
    for rows, found in zip(prompts, together, strict=True):
        assert not isinstance(found, InferenceServerException), found
        for row, prompt in enumerate(rows):
            wanted = hf_greedy(stack.model, prompt, 6)[0]
            new = wanted.index(0) + 1 if 0 in wanted else 6  # 0 ends a text
            length = int(found["sequence_length"][row, 0])
            assert found["output_ids"][row, 0, :length].tolist() == prompt + wanted[:new]


def test_a_bad_request_in_a_merged_batch_ends_alone(stack: Stack) -> None:
    """Every refusal of tests/integration/test_refusals.py, with control requests at the same time."""
    controls = requests_of(2, seed=2)
    base = token_inputs([[5, 9, 11], [7, 4]], [4, 4])
    alone = [stack.ask_all([request])[0] for request in controls]
    for name, (changes, _, text) in REFUSED.items():
        first, bad, second = stack.ask_all([controls[0], {**base, **changes}, controls[1]])
        assert isinstance(bad, InferenceServerException), name
        assert re.search(text, bad.message()), f"{name}: {bad.message()}"
        for found, wanted in zip((first, second), alone):
            assert not isinstance(wanted, InferenceServerException)
            assert_same(found, wanted)


def test_logits_of_a_served_request_are_transformers(stack: Stack) -> None:
    prompts, flags = [[5, 9, 11], [7, 4]], ("return_context_logits", "return_generation_logits")
    request = token_inputs(prompts, [4, 4], **{name: np.ones((2, 1), bool) for name in flags})
    (found,) = stack.ask_all([request])
    assert not isinstance(found, InferenceServerException), found
    for row, prompt in enumerate(prompts):
        length = int(found["sequence_length"][row, 0])
        tokens = found["output_ids"][row, 0, :length].tolist()
        with torch.inference_mode():
            theirs = stack.model(torch.tensor([tokens])).logits[0].numpy()
        context, generation = found["context_logits"][row], found["generation_logits"][row, 0]
        assert np.allclose(context[: len(prompt)], theirs[: len(prompt)], atol=2e-4)
        assert not context[len(prompt) :].any()
        new = length - len(prompt)
        assert np.allclose(generation[:new], theirs[len(prompt) - 1 : -1], atol=2e-4)
