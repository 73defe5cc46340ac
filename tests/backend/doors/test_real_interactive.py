"""Conversations through the real tritonserver with the real client packages; only the engine is a fake."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, triton_to_np_dtype

from tests.backend.doors.real_server import ANSWER, ANSWER_IDS, EOS, real_server
from tests.clients.replay import recorded, refusal
from tridecode.model_repo_templates.repository import repository_models

pytestmark = pytest.mark.server
MODEL = "fastertransformer"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = repository_models(contracts=["interactive"])
    with real_server(tmp_path_factory.mktemp("server"), models) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def ask(request, server):
    """infer of one of the two clients: (model, arrays, **sequence) -> {output: array}."""
    module = {"http": httpclient, "grpc": grpcclient}[request.param]
    client = module.InferenceServerClient(getattr(server, request.param))

    def infer(model: str, arrays: dict[str, np.ndarray], **sequence) -> dict[str, np.ndarray]:
        result = client.infer(model, tensors(module, arrays), **sequence)
        response = result.get_response()
        outputs = response["outputs"] if isinstance(response, dict) else response.outputs
        names = [output["name"] if isinstance(output, dict) else output.name for output in outputs]
        return {name: result.as_numpy(name) for name in names}

    yield infer
    client.close()


def tensors(module, arrays: dict[str, np.ndarray]) -> list:
    inputs = []
    for name, array in arrays.items():
        inputs.append(module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def identity_test(**changes: int) -> dict[str, np.ndarray]:
    """Return the first round of interactive_text_generation/identity_test.py, with ids of this model."""
    entry = recorded()["FasterTransformer interactive_text_generation/identity_test.py", MODEL]
    arrays = {}
    for tensor in entry["inputs"]:
        values = np.array(tensor["data"], triton_to_np_dtype(tensor["datatype"]))
        arrays[tensor["name"]] = (
            np.broadcast_to(values, np.prod(tensor["shape"])).reshape(tensor["shape"])
            if len(values) == 1
            else values.reshape(tensor["shape"])
        )
    arrays["input_ids"] = arrays["input_ids"] % 500
    for name in ("start_id", "end_id"):
        arrays[name] = np.full((1, 8, 1), 599, np.uint32)
    return {**arrays, **{name: np.full((1, 8, 1), value, np.uint32) for name, value in changes.items()}}


@pytest.mark.parametrize("key", [77, "a conversation"])
def test_the_calls_of_the_public_identity_test(ask, key):
    first = identity_test()
    one = ask(MODEL, first, sequence_id=key, sequence_start=True)
    assert one["output_ids"].shape == (1, 8, 1, 32)
    later = {name: array for name, array in first.items() if name not in ("session_len", "memory_len")}
    two = ask(MODEL, later, sequence_id=key, sequence_end=True)
    assert two["output_ids"].shape == (1, 8, 1, 64)
    assert two["sequence_length"].tolist() == [[[64]] * 8]
    answer = (ANSWER_IDS + [EOS] * 24)[:24]
    for row in range(8):
        ids = two["output_ids"][0, row, 0].tolist()
        new = first["input_ids"][0, row].tolist()
        assert ids == [*new, *answer, *new, *answer]
    assert one["cum_log_probs"].shape == (1, 8, 1) and one["output_log_probs"].shape == (1, 8, 1, 24)
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        ask(MODEL, later, sequence_id=key)


def test_the_request_that_the_public_identity_test_made(server):
    entry = dict(recorded()["FasterTransformer interactive_text_generation/identity_test.py", MODEL])
    smaller = {"input_ids": 500, "start_id": 599, "end_id": 599}  # this model's vocabulary
    entry["inputs"] = [
        {**one, "data": [value % smaller[one["name"]] for value in one["data"]]}
        if one["name"] in smaller
        else one
        for one in entry["inputs"]
    ]
    assert refusal(server.grpc, entry) == ""


def test_the_steps_of_the_public_end_to_end_test(ask):
    """preprocessing, generator and postprocessing one by one, then the ensemble: two rounds of each."""
    texts = np.array([[[b"Hello"], [b"Hi"]]], object)
    words = np.array([[[b""], [b""]]], object)
    count = np.full((1, 2, 1), len(ANSWER_IDS), np.uint32)
    asked = {"QUERY": texts, "BAD_WORDS_DICT": words, "STOP_WORDS_DICT": words, "REQUEST_OUTPUT_LEN": count}
    sequence = {"sequence_id": 5, "sequence_start": True}
    for wanted in ("Hello" + ANSWER, "Hello" + ANSWER + "Hello" + ANSWER):
        prepared = ask("preprocessing", asked)
        arrays = {
            "input_ids": prepared["INPUT_ID"], "input_lengths": prepared["REQUEST_INPUT_LEN"],
            "request_output_len": prepared["REQUEST_OUTPUT_LEN"], "bad_words_list": prepared["BAD_WORDS_IDS"],
            "stop_words_list": prepared["STOP_WORDS_IDS"],
        }  # fmt: skip
        if "sequence_start" in sequence:
            arrays["session_len"] = np.full((1, 2, 1), 300, np.uint32)
        answer = ask(MODEL, arrays, **sequence)
        found = ask("postprocessing", {"TOKENS_BATCH": answer["output_ids"]})["OUTPUT"]
        assert found.reshape(-1)[0].decode() == wanted
        sequence = {"sequence_id": 5, "sequence_end": True}
    whole = {"INPUT_0": texts, "INPUT_1": count, "INPUT_2": words, "INPUT_3": words}
    first = {**whole, "session_len": np.full((1, 2, 1), 300, np.uint32)}
    assert ask("ensemble", first, sequence_id=6, sequence_start=True)["OUTPUT_0"].reshape(-1)[1].decode() == (
        "Hi" + ANSWER
    )
    second = ask("ensemble", whole, sequence_id=6, sequence_end=True)
    assert second["OUTPUT_0"].reshape(-1)[1].decode() == "Hi" + ANSWER + "Hi" + ANSWER
    assert second["sequence_length"].shape == (1, 2, 1)


def plain_round(new: list[int], count: int, first: bool) -> dict[str, np.ndarray]:
    arrays = {
        "input_ids": np.array([[new]], np.uint32),
        "input_lengths": np.array([[[len(new)]]], np.uint32),
        "request_output_len": np.array([[[count]]], np.uint32),
    }
    return {**arrays, "session_len": np.array([[[200]]], np.uint32)} if first else arrays


@pytest.mark.parametrize(("model", "responses"), [(MODEL, 1), (f"{MODEL}_streaming", 4)])
def test_rounds_that_a_grpc_stream_sends_at_once_are_answered_in_order(server, model, responses):
    client = grpcclient.InferenceServerClient(server.grpc)
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for turn in range(3):
        client.async_stream_infer(
            model, tensors(grpcclient, plain_round([40 + turn], 4, turn == 0)), request_id=str(turn),
            sequence_id=9, sequence_start=turn == 0, sequence_end=turn == 2,
        )  # fmt: skip
    history: list[int] = []
    for turn in range(3):
        history += [40 + turn, *ANSWER_IDS[:4]]
        for _ in range(responses):
            result, error = answers.get(timeout=20)
            assert error is None and result.get_response().id == str(turn)
        assert result.as_numpy("output_ids")[0, 0, 0].tolist() == history
    client.close()


def test_sixty_conversations_at_once(server):
    wrong = []

    def talk(number: int) -> None:
        client, history = grpcclient.InferenceServerClient(server.grpc), []
        for turn in range(3):
            history += [number + turn, *ANSWER_IDS[:2]]
            arrays = plain_round([number + turn], 2, turn == 0)
            result = client.infer(
                MODEL, tensors(grpcclient, arrays),
                sequence_id=1000 + number, sequence_start=turn == 0, sequence_end=turn == 2,
            )  # fmt: skip
            if result.as_numpy("output_ids")[0, 0, 0].tolist() != history:
                wrong.append((number, turn))
        client.close()

    threads = [threading.Thread(daemon=True, target=talk, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_wrong_rounds_are_refused_by_name(ask):
    with pytest.raises(InferenceServerException, match="session_len is missing"):
        ask(MODEL, plain_round([5], 2, first=False), sequence_id=3, sequence_start=True)
    with pytest.raises(InferenceServerException, match="session 3 is gone: its first round failed"):
        ask(MODEL, plain_round([5], 2, first=False), sequence_id=3)
    with pytest.raises(InferenceServerException, match="beam_width is 2"):
        beams = {**plain_round([5], 2, first=True), "beam_width": np.array([[[2]]], np.uint32)}
        ask(MODEL, beams, sequence_id=4, sequence_start=True)
    ask(MODEL, plain_round([5], 2, first=True), sequence_id=4, sequence_start=True, sequence_end=True)
