"""Recorded requests of unmodified public clients, and all calls of tritonclient.

client_requests.json has the requests that FasterTransformer's programs, genai-perf and perf_analyzer sent to
a served SmolLM2; docs/guides/clients.md has the commands. If all elements of a tensor are equal, the file has
the value once.
"""

from __future__ import annotations

import asyncio
import json
import queue
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio

from tests.backend.engine.offline_models import hf_greedy
from tests.checkpoints import TINY_VOCAB, save, tiny_gpt2
from tests.clients.replay import arrays, recorded, responses
from tests.integration.clients import fill, infer, standard_inputs, stream, text_inputs
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.serve.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.server, pytest.mark.slow]

RECORDED = recorded()
FT = "FasterTransformer "
TRT = "TensorRT-LLM "
CONTRACTS = ["fastertransformer", "tensorrt_llm", "tensorrt_llm_tokens"]
OURS = "tensorrt_llm_tokens_"  # prefix of names that FasterTransformer's models keep
VOCABULARY = 30_000  # above the ids that the clients send and below their end id, like SmolLM2's


@dataclass
class Stack:
    server: ServerProcess
    model: torch.nn.Module

    @property
    def grpc(self) -> str:
        return self.server.grpc_url

    @property
    def http(self) -> str:
        return self.server.http_url

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return hf_greedy(self.model, prompt, count)[0]


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("clients")
    model = tiny_gpt2(vocab_size=VOCABULARY, n_positions=256)
    with torch.no_grad():  # answers only have ids of the tokenizer, so that they have text
        model.get_input_embeddings().weight[TINY_VOCAB:] *= 0.2
    settings = {"cache_bytes": "67108864"}
    repository = build_repo(
        str(save(model, folder / "hf")),
        folder / "repo",
        parity=False,
        engine_settings=settings,
        unbatched_text=True,
        contracts=CONTRACTS,
        owners=CONTRACTS,
    )
    with running_server(repository) as server:
        yield Stack(server, model)


# ---------------------------------------------------------------- recorded requests


def replay(stack: Stack, client: str, model: str, to: str = "") -> list[dict[str, np.ndarray]]:
    """Return the outputs of each response to a recorded request, without empty final responses.

    to: the model that gets the request, if not the one that the client names."""
    entry = RECORDED[client, model]
    entry = {**entry, "model": to or model}
    answers = list(responses(stack.grpc, entry))
    if entry["stream"] and entry["parameters"].get("triton_enable_empty_final_response"):
        finals = [answer.parameters["triton_final_response"].bool_param for answer in answers]
        assert finals == [False] * (len(answers) - 1) + [True]
    return [arrays(answer) for answer in answers if answer.outputs]


def sent(client: str, model: str, name: str) -> np.ndarray:
    (tensor,) = [tensor for tensor in RECORDED[client, model]["inputs"] if tensor["name"] == name]
    return np.array(tensor["data"]).reshape(tensor["shape"])


def text(answer: dict[str, np.ndarray], name: str = "text_output") -> str:
    return answer[name].reshape(-1)[0].decode()


def test_fastertransformers_identity_test(stack: Stack) -> None:
    client = FT + "identity_test.py"
    (answer,) = replay(stack, client, "fastertransformer")
    prompts = sent(client, "fastertransformer", "input_ids").tolist()
    assert answer["output_ids"].shape == (8, 1, 8 + 24)
    for prompt, row in zip(prompts, answer["output_ids"][:, 0].tolist()):
        assert row == prompt + stack.greedy(prompt, 24)


def test_fastertransformers_streaming_request_sender(stack: Stack) -> None:
    client = FT + "issue_request.py, sample_request_stream.json"
    answers = replay(stack, client, "fastertransformer_streaming")
    prompts = sent(client, "fastertransformer_streaming", "input_ids").tolist()
    wanted = stack.greedy(prompts[0], 40)
    for count, answer in enumerate(answers, start=1):
        length = answer["sequence_length"][0, 0]
        assert length == 8 + count and answer["cum_log_probs"][0, 0] < 0
        assert answer["output_ids"][0, 0, :length].tolist() == prompts[0] + wanted[:count]
    assert len(answers) == 40


def test_an_empty_stop_word_of_a_sample_request_stops_nothing(stack: Stack) -> None:
    client = FT + "issue_request.py, sample_request_single.json"
    (answer,) = replay(stack, client, "fastertransformer")
    assert answer["sequence_length"].tolist() == [[8 + 128]]


def test_fastertransformers_end_to_end_test_agrees_with_itself(stack: Stack) -> None:
    client = FT + "end_to_end_test.py"
    (whole,) = replay(stack, client + ", ensemble", "ensemble")
    (tokens,) = replay(stack, client + ", preprocessing", "preprocessing")
    rows = len(tokens["INPUT_ID"])

    def column(value: float, kind: type) -> np.ndarray:
        return np.full((rows, 1), value, kind)

    inputs = {
        "input_ids": tokens["INPUT_ID"],
        "input_lengths": tokens["REQUEST_INPUT_LEN"],
        "request_output_len": tokens["REQUEST_OUTPUT_LEN"],
        "bad_words_list": tokens["BAD_WORDS_IDS"],
        "stop_words_list": tokens["STOP_WORDS_IDS"],
        "start_id": column(220, np.uint32),
        "end_id": column(50256, np.uint32),
        "is_return_log_probs": column(True, bool),
    }
    ids = infer("http", stack.http, "fastertransformer", inputs)
    inputs = {
        "TOKENS_BATCH": ids.as_numpy("output_ids"),
        "RESPONSE_INPUT_LENGTHS": ids.as_numpy("response_input_lengths"),
    }
    texts = infer("http", stack.http, "postprocessing", inputs).as_numpy("OUTPUT")
    assert texts.shape == (8,) and texts.tolist() == whole["OUTPUT_0"].tolist()
    assert whole["sequence_length"].tolist() == ids.as_numpy("sequence_length").tolist()
    assert np.allclose(whole["cum_log_probs"], ids.as_numpy("cum_log_probs"), atol=1e-4)
    prompts = sent(client + ", ensemble", "ensemble", "INPUT_0").reshape(-1)
    assert all(text.decode().startswith(prompt) for text, prompt in zip(texts, prompts))


def test_genai_perf_streaming_gets_as_many_tokens_as_it_wants(stack: Stack) -> None:
    options = " --streaming --output-tokens-mean-deterministic"
    answers = replay(stack, "genai-perf --backend tensorrtllm" + options, "tensorrt_llm_bls")
    assert sum(int(answer["num_output_tokens"].sum()) for answer in answers) == 16
    (whole,) = replay(stack, "genai-perf --backend tensorrtllm", "tensorrt_llm_bls_plain")
    assert "".join(map(text, answers)) == text(whole) != ""


def test_perf_analyzers_streams_and_plain_calls_agree(stack: Stack) -> None:
    pieces = replay(stack, "perf_analyzer --streaming, text", "tensorrt_llm_bls")
    (whole,) = replay(stack, "perf_analyzer, text", "tensorrt_llm_bls_plain")
    prompt = "Once upon a time"
    assert text(whole) == prompt + "".join(map(text, pieces))
    (ensemble,) = replay(stack, "perf_analyzer, ensemble", "ensemble")
    assert text(ensemble, "OUTPUT_0") == text(whole)


def test_perf_analyzer_streams_token_ids(stack: Stack) -> None:
    client = "perf_analyzer --streaming, token ids"
    answers = replay(stack, client, "fastertransformer_streaming")
    prompt = sent(client, "fastertransformer_streaming", "input_ids")[0].tolist()
    lengths = [int(answer["sequence_length"][0, 0]) for answer in answers]
    assert lengths == list(range(5, 5 + len(answers))) and 1 <= len(answers) <= 16
    row = answers[-1]["output_ids"][0, 0, : lengths[-1]].tolist()
    assert row == prompt + stack.greedy(prompt, len(answers))


def test_litellm_reads_the_text_from_the_first_output(stack: Stack) -> None:
    def tensor(name: str, datatype: str, value: object) -> dict:
        return {"name": name, "shape": [1], "datatype": datatype, "data": [value]}

    inputs = [tensor("text_input", "BYTES", "the cat"), tensor("max_tokens", "INT32", 8)]
    body = json.dumps({"inputs": inputs}).encode()
    url = f"http://{stack.http}/v2/models/tensorrt_llm_bls_unbatched/infer"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        first = json.loads(answer.read())["outputs"][0]
    whole = infer("http", stack.http, "tensorrt_llm_bls_plain", text_inputs("the cat", 8))
    assert "".join(first["data"]) == whole.as_numpy("text_output")[0].decode()


# ---------------------------------------------------------------- TensorRT-LLM's token programs


def test_inflight_batcher_llm_client_gets_whole_rows_and_streams(stack: Stack) -> None:
    client = TRT + "inflight_batcher_llm_client.py"
    prompt = sent(client, "tensorrt_llm", "input_ids")[0].tolist()
    wanted = stack.greedy(prompt, 16)
    (whole,) = replay(stack, client, "tensorrt_llm")
    assert whole["output_ids"].tolist() == [[prompt + wanted]] and whole["sequence_length"].tolist() == [[21]]
    for _ in range(5):  # a busy machine may merge all 16 tokens into one response
        parts = replay(stack, client + " --streaming", "tensorrt_llm", "tensorrt_llm_streaming")
        assert sum((part["output_ids"][0, 0].tolist() for part in parts), []) == wanted
        if len(parts) > 1:
            break
    assert len(parts) > 1


def test_gpt_client_py_gets_the_log_probs_that_its_older_name_asks_for(stack: Stack) -> None:
    (answer,) = replay(stack, TRT + "gpt/client.py", "tensorrt_llm")
    prompt = sent(TRT + "gpt/client.py", "tensorrt_llm", "input_ids")[0].tolist()
    tokens, logits = hf_greedy(stack.model, prompt, 16)
    wanted = torch.from_numpy(logits).double().log_softmax(-1)[range(16), tokens].numpy()
    assert answer["output_ids"][0, 0].tolist() == prompt + tokens
    np.testing.assert_allclose(answer["output_log_probs"][0, 0], wanted, atol=1e-4)
    np.testing.assert_allclose(answer["cum_log_probs"], [[wanted.sum()]], atol=1e-3)


def test_benchmark_core_model_gets_rows_of_exact_length_and_an_error_for_its_random_ids(stack: Stack) -> None:
    client = TRT + "benchmark_core_model.py"
    (answer,) = replay(stack, client, "tensorrt_llm")
    assert next(iter(answer)) == "output_ids" and answer["output_ids"].shape == (1, 1, 21)
    with pytest.raises(grpc.RpcError, match="token id 2013345011; wanted ids below 30,000"):
        replay(stack, client + " token-norm-dist", "tensorrt_llm")


def test_end_to_end_test_py_agrees_with_itself_and_with_transformers(stack: Stack) -> None:
    client = TRT + "end_to_end_test.py, preprocessing"
    (tokens,) = replay(stack, client, "preprocessing", OURS + "preprocessing")
    true = np.array([[True]])
    wanted = {"return_log_probs": true, "return_context_logits": true, "return_generation_logits": true}
    names = {
        "input_ids": "INPUT_ID", "decoder_input_ids": "DECODER_INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN", "request_output_len": "REQUEST_OUTPUT_LEN",
        "end_id": "OUT_END_ID", "pad_id": "OUT_PAD_ID",
    }  # fmt: skip
    inputs = {**{name: tokens[output] for name, output in names.items()}, **wanted}
    ids = infer("grpc", stack.grpc, "tensorrt_llm", inputs)
    inputs = {
        "TOKENS_BATCH": ids.as_numpy("output_ids"), "SEQUENCE_LENGTH": ids.as_numpy("sequence_length")
    }  # fmt: skip
    texts = infer("http", stack.http, OURS + "postprocessing", inputs).as_numpy("OUTPUT")
    words = np.array([[b""]], object)
    query = sent(client, "preprocessing", "QUERY")[0, 0]
    ensemble = text_inputs(query, 16) | {"bad_words": words, "stop_words": words, **wanted}
    whole = infer("grpc", stack.grpc, OURS + "ensemble", ensemble)
    assert texts.tolist() == whole.as_numpy("text_output").tolist() and texts[0].decode().startswith(query)
    for name in ("cum_log_probs", "output_log_probs", "context_logits", "generation_logits"):
        np.testing.assert_array_equal(ids.as_numpy(name), whole.as_numpy(name))
    prompt = tokens["INPUT_ID"]
    with torch.no_grad():
        reference = stack.model(torch.tensor(prompt)).logits.numpy()
    np.testing.assert_allclose(ids.as_numpy("context_logits"), reference, atol=1e-3)
    count = ids.as_numpy("generation_logits").shape[2]
    _, logits = hf_greedy(stack.model, prompt[0].tolist(), count)
    np.testing.assert_allclose(ids.as_numpy("generation_logits")[0, 0], logits, atol=1e-3)


def test_beams_of_the_token_model_are_those_of_transformers(stack: Stack) -> None:
    with torch.no_grad():
        reference = stack.model.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, 4, dtype=torch.long), max_new_tokens=8,
            num_beams=3, num_return_sequences=3, do_sample=False, length_penalty=1.0, early_stopping=True,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    inputs = {"input_ids": np.array([PROMPT], np.int32), "input_lengths": np.array([[4]], np.int32)}
    inputs |= {"request_output_len": np.array([[8]], np.int32), "beam_width": np.array([[3]], np.int32)}
    inputs |= {"len_penalty": np.array([[1.0]], np.float32), "end_id": np.array([[-1]], np.int32)}
    answer = infer("grpc", stack.grpc, "tensorrt_llm", inputs)
    assert answer.as_numpy("output_ids")[0].tolist() == reference.tolist()
    assert answer.as_numpy("sequence_length").tolist() == [[12, 12, 12]]


def stopped_tokens(stack: Stack) -> list[int]:
    """Return the tokens of a request for 200 that a second request stops after the first of them."""

    def ids(*values: int) -> np.ndarray:
        return np.array([values], np.int32)

    answers: queue.Queue = queue.Queue()
    running = {"input_ids": ids(*PROMPT), "input_lengths": ids(4), "request_output_len": ids(200)}
    running |= {"streaming": np.array([[True]]), "end_id": ids(-1)}
    stop = {"input_ids": ids(0), "input_lengths": ids(0), "request_output_len": ids(0)}
    stop |= {"stop": np.array([[True]])}
    tokens: list[int] = []
    with grpcclient.InferenceServerClient(stack.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for inputs in (running, stop):
            client.async_stream_infer("tensorrt_llm_streaming", fill(grpcclient, inputs), request_id="mine")
            if inputs is running:
                tokens += ids_of(answers.get(timeout=60)[0])
        client.stop_stream()
    while not answers.empty():
        result, error = answers.get()
        assert error is None
        if result.as_numpy("output_ids") is not None:
            tokens += ids_of(result)
    return tokens


def test_a_stop_request_of_the_token_model_ends_the_running_one(stack: Stack) -> None:
    wanted = stack.greedy(PROMPT, 200)
    for _ in range(20):  # a tiny model may end before it is stopped
        tokens = stopped_tokens(stack)
        assert tokens and tokens == wanted[: len(tokens)]
        if len(tokens) < 200:
            return
    raise AssertionError("no request was stopped")


# ---------------------------------------------------------------- calls of tritonclient

PROMPT = [5, 9, 11, 3]


def ids_of(result) -> list[int]:
    return result.as_numpy("output_ids")[0, 0].tolist()


def test_asynchronous_calls_with_a_callback(stack: Stack) -> None:
    answers: queue.Queue = queue.Queue()
    wanted = PROMPT + stack.greedy(PROMPT, 5)
    with grpcclient.InferenceServerClient(stack.grpc) as client:
        inputs = fill(grpcclient, standard_inputs([PROMPT], [5]))
        for _ in range(4):
            client.async_infer(
                "fastertransformer", inputs, callback=lambda result, error: answers.put((result, error))
            )
        for _ in range(4):
            result, error = answers.get(timeout=60)
            assert error is None and ids_of(result) == wanted


def test_asynchronous_calls_over_http(stack: Stack) -> None:
    wanted = PROMPT + stack.greedy(PROMPT, 5)
    with httpclient.InferenceServerClient(stack.http, concurrency=4) as client:
        inputs = fill(httpclient, standard_inputs([PROMPT], [5]))
        waiting = [client.async_infer("fastertransformer", inputs) for _ in range(4)]
        assert [ids_of(one.get_result()) for one in waiting] == [wanted] * 4


def test_coroutines_over_both_protocols(stack: Stack) -> None:
    wanted = PROMPT + stack.greedy(PROMPT, 5)

    async def ask() -> list[list[int]]:
        arrays = standard_inputs([PROMPT], [5])
        async with grpcaio.InferenceServerClient(stack.grpc) as client:
            calls = [client.infer("fastertransformer", fill(grpcaio, arrays)) for _ in range(4)]
            answers = await asyncio.gather(*calls)
        async with httpaio.InferenceServerClient(stack.http) as client:
            answers.append(await client.infer("fastertransformer", fill(httpaio, arrays)))
        return [ids_of(answer) for answer in answers]

    assert asyncio.run(ask()) == [wanted] * 5


def test_a_coroutines_stream(stack: Stack) -> None:
    async def ask() -> list[list[int]]:
        async def requests():
            yield {
                "model_name": "fastertransformer_streaming",
                "inputs": fill(grpcaio, standard_inputs([PROMPT], [5])),
            }

        async with grpcaio.InferenceServerClient(stack.grpc) as client:
            seen = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                seen.append(ids_of(result)[: int(result.as_numpy("sequence_length")[0, 0])])
            return seen

    wanted = PROMPT + stack.greedy(PROMPT, 5)
    assert asyncio.run(ask()) == [wanted[: 4 + count] for count in range(1, 6)]


def test_a_stream_that_is_cancelled_leaves_the_next_one_whole(stack: Stack) -> None:
    answers: queue.Queue = queue.Queue()
    with grpcclient.InferenceServerClient(stack.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        inputs = text_inputs("the cat", 200, stream=True)
        client.async_stream_infer("tensorrt_llm_bls", fill(grpcclient, inputs))
        answers.get(timeout=60)
        client.stop_stream(cancel_requests=True)
    seen = list(stream(stack.grpc, "fastertransformer_streaming", standard_inputs([PROMPT], [5])))
    assert ids_of(seen[-1]) == PROMPT + stack.greedy(PROMPT, 5)
