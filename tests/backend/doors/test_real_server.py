"""Doors in the real tritonserver with the real client packages; only the engine is a fake."""

from __future__ import annotations

import json
import queue
import time
import urllib.request
from collections import defaultdict

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.backend.doors.real_server import ANSWER, ANSWER_IDS, EOS, RealServer, real_server
from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.fake_engine import FakeEngine, toy_log_prob
from tests.integration.clients import post
from tests.waiting import wait_until
from tridecode.model_repo_templates.repository import repository_models

pytestmark = pytest.mark.server
TEXT = "tensorrt_llm_bls"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with real_server(tmp_path_factory.mktemp("server"), repository_models(), step_s=0.004) as server:
        yield server


@pytest.fixture()
def client(server):
    client = grpcclient.InferenceServerClient(server.grpc)
    yield client
    client.close()


def generate(server: RealServer, path: str, **body) -> tuple[int, str]:
    return post(server.http, path, body)


def tensors(arrays: dict[str, np.ndarray]) -> list[grpcclient.InferInput]:
    inputs = []
    for name, array in arrays.items():
        inputs.append(grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def text_request(max_tokens: int = 100, **others) -> dict[str, np.ndarray]:
    arrays = {"text_input": np.array([["Hello"]], object), "max_tokens": np.array([[max_tokens]], np.int32)}
    return {**arrays, **{name: np.array([[value]]) for name, value in others.items()}}


def token_request(output_len: int, **others) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.array([[5, 6, 7], [8, 9, 0]], np.uint32),
        "input_lengths": np.array([[3], [2]], np.uint32),
        "request_output_len": np.full((2, 1), output_len, np.uint32),
        **others,
    }


class Streaming:
    """A gRPC stream: the responses up to the final one of a request, or its error."""

    def __init__(self, client: grpcclient.InferenceServerClient):
        self.client, self._queue = client, queue.Queue()
        client.start_stream(lambda result, error: self._queue.put((result, error)))

    def ask(self, model: str, arrays: dict[str, np.ndarray], request_id: str = "") -> None:
        self.client.async_stream_infer(
            model, tensors(arrays), request_id=request_id, enable_empty_final_response=True
        )

    def next(self):
        result, error = self._queue.get(timeout=20)
        if error is not None:
            raise error
        return result

    def all(self) -> list:
        results = [self.next()]
        while not is_final(results[-1]):
            results.append(self.next())
        return results


def is_final(result) -> bool:
    return result.get_response().parameters["triton_final_response"].bool_param


# ---------------------------------------------------------------- text


def test_generate_gets_exactly_one_response_from_a_decoupled_model(server):
    status, body = generate(server, f"{TEXT}/generate", text_input="Hello", max_tokens=100)
    assert status == 200
    answer = json.loads(body)
    assert answer["text_output"] == "Hello" + ANSWER
    assert answer["num_output_tokens"] == len(ANSWER_IDS) + 1


def test_generate_stream_sends_pieces_of_the_answer(server):
    status, body = generate(
        server, f"{TEXT}/generate_stream", text_input="Hello", max_tokens=100, stream=True
    )
    assert status == 200
    pieces = [json.loads(line[len("data: ") :]) for line in body.splitlines() if line.startswith("data: ")]
    assert "".join(piece["text_output"] for piece in pieces) == ANSWER
    assert sum(piece["num_output_tokens"] for piece in pieces) == len(ANSWER_IDS) + 1
    assert len(pieces) > 5


def test_a_streams_last_data_response_is_its_final_one(client):
    stream = Streaming(client)
    stream.ask(TEXT, text_request(stream=True))
    results = stream.all()
    assert "".join(r.as_numpy("text_output")[0].decode() for r in results) == ANSWER


def test_requests_of_litellm_are_served(server):
    parameters = {"max_tokens": 4, "bad_words": [""], "stop_words": [""], "temperature": 0.5}
    status, body = generate(
        server, f"{TEXT}/generate", text_input="Hello", parameters=parameters, stream=False
    )
    assert status == 200 and json.loads(body)["num_output_tokens"] == 4


def test_a_misspelt_field_is_refused(server):
    status, body = generate(server, f"{TEXT}/generate", text_input="Hello", max_tokens=4, topk=3)
    assert status == 400 and "did you mean the input top_k?" in body


def test_a_stop_word_ends_the_generation_in_the_engine(server):
    status, body = generate(
        server,
        f"{TEXT}/generate",
        text_input="Hello",
        max_tokens=400,
        stop_words=["streaming"],
        exclude_input_in_output=True,
    )
    assert (status, json.loads(body)["text_output"]) == (200, ANSWER[: ANSWER.index("streaming")])
    wait_until(lambda: server.engine.running == 0)


# ---------------------------------------------------------------- FasterTransformer


def test_fastertransformer_answers_in_its_types_and_shapes(client):
    result = client.infer("fastertransformer", tensors(token_request(6)))
    found = {o.name: (o.datatype, list(o.shape)) for o in result.get_response().outputs}
    assert found == {
        "output_ids": ("UINT32", [2, 1, 9]),
        "sequence_length": ("UINT32", [2, 1]),
        "response_input_lengths": ("INT32", [2, 1]),
        "cum_log_probs": ("FP32", [2, 1]),
        "output_log_probs": ("FP32", [2, 1, 6]),
    }
    assert result.as_numpy("output_ids")[:, 0].tolist() == [
        [5, 6, 7, *ANSWER_IDS[:6]],
        [8, 9, *ANSWER_IDS[:6], EOS],
    ]


def test_prompts_without_any_width_start_from_the_start_id(client):
    arrays = token_request(3)
    arrays["input_ids"], arrays["input_lengths"] = np.zeros((2, 0), np.uint32), np.zeros((2, 1), np.uint32)
    result = client.infer("fastertransformer", tensors(arrays))
    assert result.as_numpy("output_ids").tolist() == [[ANSWER_IDS[:3]]] * 2


def test_a_token_stream_has_one_response_for_each_token(client):
    stream = Streaming(client)
    stream.ask("fastertransformer_streaming", token_request(9))
    results = stream.all()
    assert [r.as_numpy("sequence_length").tolist() for r in results] == [
        [[3 + n], [2 + n]] for n in range(1, 10)
    ]


def test_token_streams_that_overload_the_server_are_merged_and_complete(server, client):
    """96 streams with all tokens at once are more responses than the server can send in that time."""
    count, rows = len(ANSWER_IDS) + 1, [*ANSWER_IDS, EOS]
    stream, lengths = Streaming(client), defaultdict(list)
    server.engine.step_s, paced = 0.0, server.engine.step_s
    try:
        for number in range(96):
            request = token_request(200, is_return_log_probs=np.full((2, 1), bool(number % 2)))
            stream.ask("fastertransformer_streaming", request, str(number))
        ended = 0
        while ended < 96:
            result = stream.next()
            number = int(result.get_response().id)
            length = int(result.as_numpy("sequence_length")[0, 0]) - 3
            wanted = [toy_log_prob(token) for token in rows[:length]] if number % 2 else []
            assert result.as_numpy("output_ids")[0, 0, 3:].tolist() == rows[:length] + [EOS] * (200 - length)
            assert result.as_numpy("output_log_probs")[1, 0].tolist() == wanted + [0.0] * (200 - len(wanted))
            assert result.as_numpy("response_input_lengths").tolist() == [[3], [2]]
            lengths[number].append(length)
            ended += is_final(result)
    finally:
        server.engine.step_s = paced
    for number in range(96):
        assert lengths[number][0] == 1 and lengths[number][-1] == count
        assert lengths[number] == sorted(set(lengths[number]))
    assert sum(map(len, lengths.values())) < 0.9 * 96 * count


def ensemble_request(texts: list[str], output_len: int) -> dict[str, np.ndarray]:
    words = np.array([["Hawks, Hawks"]] + [[""]] * (len(texts) - 1), object)
    return {
        "INPUT_0": np.array([[text] for text in texts], object),
        "INPUT_1": np.full((len(texts), 1), output_len, np.uint32),
        "INPUT_2": words,
        "INPUT_3": words,
        "is_return_log_probs": np.full((len(texts), 1), True),
    }


def test_the_ensemble_gives_a_flat_array_of_whole_texts(client):
    texts = ["Hello", "the quick brown fox", ""]
    result = client.infer("ensemble", tensors(ensemble_request(texts, 5)))
    said = byte_level().decode(ANSWER_IDS[:5])
    assert [item.decode() for item in result.as_numpy("OUTPUT_0")] == [text + said for text in texts]
    lengths = [len(byte_level().encode(text).ids) + 5 for text in texts]
    assert result.as_numpy("sequence_length").tolist() == [[length] for length in lengths]
    assert result.as_numpy("cum_log_probs").shape == (3, 1)


def test_the_ensemble_streams(client):
    stream = Streaming(client)
    stream.ask("ensemble_streaming", ensemble_request(["Hello"], 5))
    texts = [r.as_numpy("OUTPUT_0")[0].decode() for r in stream.all()]
    assert texts == ["Hello" + byte_level().decode(ANSWER_IDS[:n]) for n in range(1, 6)]


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"beam_width": np.full((2, 1), 2, np.uint32)}, "UNIMPLEMENTED", "beam_width is 2"),
        ({"temperature": np.full((2, 1), -1, np.float32)}, "INVALID_ARGUMENT", "temperature is -1.0"),
        (
            {"request_output_len": np.full((2, 1), 10**6, np.uint32)},
            "INVALID_ARGUMENT",
            "max_sequence_tokens",
        ),
        (
            {"input_lengths": np.array([[4], [1]], np.uint32)},
            "INVALID_ARGUMENT",
            "input_lengths of row 0 is 4",
        ),
    ],
)
def test_a_bad_request_gets_its_status_and_a_text(client, change, status, text):
    with pytest.raises(InferenceServerException, match=text) as caught:
        client.infer("fastertransformer", tensors({**token_request(2), **change}))
    assert status in caught.value.status()


def test_a_missing_required_input_is_named_though_the_number_of_inputs_is_right(client):
    arrays = token_request(2, temperature=np.ones((2, 1), np.float32))
    del arrays["input_lengths"]
    with pytest.raises(InferenceServerException, match="input_lengths is missing"):
        client.infer("fastertransformer", tensors(arrays))


# ---------------------------------------------------------------- life


def test_a_client_that_cancels_frees_the_engine(server, client):
    stream = Streaming(client)
    server.engine.next_token = lambda history, generated, params, vocab_size: 300
    try:
        stream.ask(TEXT, text_request(450, stream=True))
        stream.next()
        client.stop_stream(cancel_requests=True)
        wait_until(lambda: server.engine.running == 0, 1.5)  # 450 steps would take longer
    finally:
        server.engine.next_token = lambda h, generated, p, v: [*ANSWER_IDS, EOS][generated]


def test_an_engine_that_dies_ends_streams_at_once_and_serves_again_when_rebuilt(server, client):
    stream = Streaming(client)
    first = server.engine
    first.step_s = 0.1
    stream.ask(TEXT, text_request(stream=True))
    stream.next()
    server.supervisor.set_phase("down", "rank 0 was killed by signal 9")
    began = time.monotonic()
    with pytest.raises(InferenceServerException, match="rank 0 was killed by signal 9"):
        stream.all()
    assert time.monotonic() - began < 1
    with pytest.raises(InferenceServerException, match="killed by signal 9") as caught:
        client.infer("tridecode_health", [])
    assert "UNAVAILABLE" in caught.value.status()
    rebuilt = FakeEngine(
        epoch=first.epoch + 1, limits=first.limits, next_token=first.next_token, step_s=0.004
    )
    with rebuilt:
        server.supervisor.set_ready(rebuilt)
        wait_until(lambda: len(rebuilt.hellos) >= len(first.hellos))
        wait_until(lambda: "ready" in generate(server, "tridecode_health/generate")[1])
        assert client.infer("tridecode_health", []).as_numpy("READY").tolist() == [True]
        result = client.infer("fastertransformer", tensors(token_request(2)))
        assert result.as_numpy("output_ids")[0, 0, 3:].tolist() == ANSWER_IDS[:2]
        first.step_s = 0.004
        server.supervisor.set_ready(first)
        wait_until(lambda: "ready" in generate(server, "tridecode_health/generate")[1])


def test_the_metrics_page_counts_requests(server, client):
    def counted() -> float:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        wanted = 'tridecode_output_tokens_total{model="fastertransformer"} '
        return sum(float(line[len(wanted) :]) for line in lines if line.startswith(wanted))

    time.sleep(1.5)  # metrics of earlier tests are published within a second
    before = counted()
    for _ in range(5):
        client.infer("fastertransformer", tensors(token_request(4)))
    wait_until(lambda: counted() == before + 5 * 2 * 4)


def test_a_wrong_setting_fails_the_load_with_the_engines_text(tmp_path):
    models = [model for model in repository_models() if model.name in ("preprocessing", "fastertransformer")]
    with pytest.raises(AssertionError, match="config.ini: section .gpt. has no head_num"):
        with real_server(tmp_path, models, failure="config.ini: section [gpt] has no head_num"):
            pass
