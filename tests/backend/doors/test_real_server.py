"""Doors in the real tritonserver with the real client packages; only the engine is a fake."""

from __future__ import annotations

import contextlib
import json
import queue
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.backend.doors.real_server import ANSWER, ANSWER_IDS, EOS, RealServer, real_server
from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.fake_engine import FakeEngine, toy_log_prob
from tests.integration.clients import post, standard_inputs
from tests.waiting import wait_until
from tridecode.model_repo_templates.repository import repository_models

pytestmark = pytest.mark.server
TEXT = "tensorrt_llm_bls"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = repository_models(contracts=("fastertransformer", "tensorrt_llm", "vllm", "llmapi"))
    with real_server(tmp_path_factory.mktemp("server"), models, step_s=0.004) as server:
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


def test_the_identity_test_of_streams_gets_a_response_for_each_position(client):
    """identity_test.py -d expects output_len responses to its sixteen inputs, each at full width, the
    last one final. Rows with fewer tokens are padded with their end id."""
    batch, width, count = 8, 8, 24
    arrays = standard_inputs([[9] * width] * batch, [count] * (batch - 1) + [5])
    stream = Streaming(client)
    stream.ask("fastertransformer_streaming", arrays)
    results = stream.all()
    assert len(results) == count
    fill = int(arrays["end_id"][0, 0])
    for position, result in enumerate(results, start=1):
        assert result.as_numpy("output_ids").shape == (batch, 1, width + count)
        assert is_final(result) == (position == count)
        for row, most in ((0, count), (batch - 1, 5)):
            said = [*ANSWER_IDS, *[EOS] * count][
                : min(position, most)
            ]  # 50256 is not an end id of this engine
            wanted = [9] * width + said + [fill] * (count - len(said))
            assert result.as_numpy("output_ids")[row, 0].tolist() == wanted
            assert result.as_numpy("sequence_length")[row, 0] == width + len(said)


def test_a_stream_that_ends_early_has_a_response_for_each_of_its_tokens(server, client):
    stream = Streaming(client)
    stream.ask("fastertransformer_streaming", token_request(200))
    results = stream.all()
    assert len(results) == len(ANSWER_IDS) + 1 and is_final(results[-1])
    last = results[-1].as_numpy("output_ids")[0, 0].tolist()
    assert last == [5, 6, 7, *ANSWER_IDS, EOS] + [EOS] * (200 - len(ANSWER_IDS) - 1)


def test_an_error_after_streaming_began_is_the_last_response(server, client):
    """The engine fails one of two streams after three tokens; the other one continues."""
    usual = server.engine.next_token

    def failing(history: list[int], generated: int, params, vocab_size: int) -> int:
        return -1 if history[0] == 77 and generated == 3 else usual(history, generated, params, vocab_size)

    server.engine.next_token = failing
    try:
        one, other = {}, token_request(9)
        for name, array in token_request(9).items():
            one[name] = array.copy()
        one["input_ids"][0, 0] = 77
        stream = Streaming(client)
        stream.ask("fastertransformer_streaming", one, "one")
        stream.ask("fastertransformer_streaming", other, "other")
        seen, errors = defaultdict(list), []
        while not errors or not seen["other"] or not is_final(seen["other"][-1]):
            try:
                result = stream.next()
                seen[result.get_response().id].append(result)
            except InferenceServerException as error:
                errors.append(error)
    finally:
        server.engine.next_token = usual
    assert [r.as_numpy("sequence_length")[0, 0] for r in seen["one"]] == [4, 5, 6]
    assert len(errors) == 1 and "the toy model failed" in errors[0].message()
    assert [r.as_numpy("sequence_length")[0, 0] for r in seen["other"]] == list(range(4, 13))
    client.stop_stream()


def test_logits_come_over_the_wire_with_the_last_response(client):
    flags = {name: np.ones((2, 1), bool) for name in ("return_context_logits", "return_generation_logits")}
    stream = Streaming(client)
    stream.ask("fastertransformer_streaming", token_request(4, **flags))
    *before, last = stream.all()
    assert len(before) == 3 and all(r.as_numpy("context_logits") is None for r in before)
    assert last.as_numpy("context_logits").shape == (2, 3, 600)
    assert last.as_numpy("context_logits")[:, :, 1].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert last.as_numpy("generation_logits")[1, 0, :, 1].tolist() == [-token for token in ANSWER_IDS[:4]]
    whole = client.infer("fastertransformer", tensors(token_request(4, **flags)))
    for name in ("context_logits", "generation_logits"):
        assert np.array_equal(whole.as_numpy(name), last.as_numpy(name))


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
    request = {**ensemble_request(texts, 5), "add_special_tokens": np.full((3, 1), False)}
    result = client.infer("ensemble", tensors(request))
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
        ({"beam_width": np.full((2, 1), 65, np.uint32)}, "INVALID_ARGUMENT", "beam_width is 65"),
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
    stream, before = Streaming(client), len(server.engine.cancels)
    server.engine.next_token = lambda history, generated, params, vocab_size: 300
    try:
        stream.ask(TEXT, text_request(450, stream=True))
        stream.next()
        client.stop_stream(cancel_requests=True)
        wait_until(lambda: len(server.engine.cancels) > before and server.engine.running == 0)
    finally:
        server.engine.next_token = lambda h, generated, p, v: [*ANSWER_IDS, EOS][generated]


@contextlib.contextmanager
def serving_again(server: RealServer, engine: FakeEngine) -> Iterator[None]:
    """Give the doors their first engine back, also where the body fails: later tests use it."""
    before = len(engine.hellos)
    try:
        yield
    finally:
        engine.step_s = 0.004
        server.supervisor.set_ready(engine)
        wait_until(lambda: len(engine.hellos) >= before + server.doors, 20, "every door at its first engine")
        wait_until(lambda: "ready" in generate(server, "tridecode_health/generate")[1])


def test_an_engine_that_dies_ends_streams_that_decline_and_serves_again_when_rebuilt(server, client):
    stream = Streaming(client)
    first = server.engine
    first.step_s = 0.2
    stream.ask(TEXT, text_request(stream=True, resume=False))
    stream.next()
    server.supervisor.set_phase("down", "rank 0 was killed by signal 9")
    began = time.monotonic()
    with pytest.raises(InferenceServerException, match="rank 0 was killed by signal 9"):
        stream.all()
    assert time.monotonic() - began < 2  # the rest of its steps takes longer
    with pytest.raises(InferenceServerException, match="killed by signal 9") as caught:
        client.infer("tridecode_health", [])
    assert "UNAVAILABLE" in caught.value.status()
    rebuilt = FakeEngine(
        epoch=first.epoch + 1, limits=first.limits, next_token=first.next_token, step_s=0.004
    )
    with rebuilt, serving_again(server, first):
        server.supervisor.set_ready(rebuilt)
        wait_until(lambda: len(rebuilt.hellos) >= server.doors)
        wait_until(lambda: "ready" in generate(server, "tridecode_health/generate")[1])
        assert client.infer("tridecode_health", []).as_numpy("READY").tolist() == [True]
        result = client.infer("fastertransformer", tensors(token_request(2)))
        assert result.as_numpy("output_ids")[0, 0, 3:].tolist() == ANSWER_IDS[:2]


def test_a_stream_is_unbroken_when_its_engine_dies(server, client):
    stream = Streaming(client)
    first = server.engine
    stream.ask(TEXT, text_request(stream=True))
    wanted = [result.as_numpy("text_output")[0] for result in stream.all() if result.get_response().outputs]
    first.step_s = 0.1
    stream.ask(TEXT, text_request(stream=True))
    results = [stream.next(), stream.next()]
    server.supervisor.set_phase("down", "rank 0 was killed by signal 9")
    time.sleep(0.3)
    second = FakeEngine(epoch=first.epoch + 1, limits=first.limits, next_token=first.next_token, step_s=0.004)
    with second, serving_again(server, first):
        server.supervisor.set_ready(second)
        results += stream.all()
        found = [result.as_numpy("text_output")[0] for result in results if result.get_response().outputs]
        assert b"".join(found) == b"".join(wanted) and len(second.submits) == 1


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


NOBODY = {
    "fastertransformer": {
        "input_ids": np.zeros((0, 0), np.uint32),
        "input_lengths": np.zeros((0, 1), np.uint32),
        "request_output_len": np.zeros((0, 0), np.uint32),
    },
    "postprocessing": {"TOKENS_BATCH": np.zeros((0, 0, 2), np.uint32)},
    "preprocessing": {
        "REQUEST_OUTPUT_LEN": np.zeros((0, 0), np.uint32),
        **{name: np.zeros((0, 0), object) for name in ("QUERY", "BAD_WORDS_DICT", "STOP_WORDS_DICT")},
    },
    "ensemble": {
        "INPUT_1": np.zeros((0, 0), np.uint32),
        **{name: np.zeros((0, 0), object) for name in ("INPUT_0", "INPUT_2", "INPUT_3")},
    },
    "tensorrt_llm_bls_plain": {
        "text_input": np.zeros((0, 1), object),
        "max_tokens": np.zeros((0, 1), np.int32),
    },
}


@pytest.mark.parametrize("model", NOBODY)
def test_a_request_without_rows_is_refused_or_answered_without_rows(client, model):
    """Triton's python backend neither executes nor ends one whose bytes its core accepts."""
    try:
        answer = client.infer(model, tensors(NOBODY[model]), client_timeout=5)
    except InferenceServerException as error:
        assert "INVALID_ARGUMENT" in str(error.status()), error
        assert any(name in error.message() for name in NOBODY[model])
    else:
        assert model == "postprocessing" and answer.as_numpy("OUTPUT").size == 0


# ---------------------------------------------------------------- models without a batch axis


def test_vllms_generate_takes_sampling_parameters_as_request_parameters(server):
    sent = {"text_input": "Hello", "parameters": {"stream": False, "temperature": 0, "max_tokens": 3}}
    status, body = generate(server, "vllm_model/generate", **sent)
    assert status == 200 and json.loads(body)["text_output"] == "Hello" + byte_level().decode(ANSWER_IDS[:3])
    params = server.engine.submits[-1].sequences[0].params
    assert (params.max_tokens, params.top_k) == (3, 1)
    status, body = generate(server, "vllm_model/generate", text_input="Hello", topk=3)
    assert status == 400 and json.loads(body)["error"].endswith("did you mean top_k?")


def test_a_stream_of_vllms_client_has_deltas_and_log_probs(server, client):
    sampling = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100", "logprobs": 1}
    arrays = {
        "text_input": np.array([b"Hello"], object),
        "sampling_parameters": np.array([json.dumps(sampling).encode()], object),
        **{name: np.array([True]) for name in ("stream", "exclude_input_in_output", "return_logprobs")},
    }
    stream = Streaming(client)
    stream.ask("vllm_model", arrays)
    text, tokens = "", 0
    for result in stream.all():
        if result.as_numpy("text_output") is not None:
            text += result.as_numpy("text_output")[0].decode()
            tokens += len(json.loads(result.as_numpy("logprobs")[0]))
    assert text == ANSWER and tokens == len(ANSWER_IDS) + 1


def test_the_llm_apis_model_answers_several_texts_in_one_response(server, client):
    arrays = {
        "text_input": np.array([b"Hello", b"fox"], object),
        "sampling_param_max_tokens": np.array([3], np.int32),
        "return_cumulative_logprob": np.array([True]),
    }
    result = client.infer("tensorrt_llm", tensors(arrays))
    first = byte_level().decode(ANSWER_IDS[:3])
    assert [text.decode() for text in result.as_numpy("text_output")] == ["Hello" + first, "fox" + first]
    log_prob = sum(map(toy_log_prob, ANSWER_IDS[:3]))
    assert result.as_numpy("cumulative_logprob").tolist() == [log_prob, log_prob]
