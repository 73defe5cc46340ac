"""Generator, real tritonserver, real engine and real clients, from a checkpoint to streamed text."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from tests.backend.engine.beam_oracle import competition
from tests.backend.engine.offline_models import hf_greedy
from tests.backend.engine.test_beams import logits_of
from tests.checkpoints import save, tiny_bloom, tiny_gpt2, tiny_llama
from tests.integration.clients import infer, post, standard_inputs, stream, text_inputs, token_inputs
from tests.waiting import wait_until
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.serve.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.server, pytest.mark.slow]

MAKERS = {"gpt2": tiny_gpt2, "bloom": tiny_bloom, "llama": tiny_llama}
PROMPTS = [[5, 9, 11, 3], [7], [4, 4, 8, 12, 9, 30, 21], [13, 2]]


@dataclass
class Stack:
    server: ServerProcess
    repository: Path
    model: object  # the Hugging Face model that was converted

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return hf_greedy(self.model, prompt, count)[0]


@pytest.fixture(scope="module", params=MAKERS)
def stack(request, tmp_path_factory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = MAKERS[request.param]()
    repository = build_repo(
        str(save(model, folder / "hf")), folder / "repo", engine_settings={"cache_bytes": "67108864"}
    )
    assert json.loads((repository / "PARITY.json").read_text())["passed"]
    with running_server(repository) as server:
        yield Stack(server, repository, model)


#: for what doors, supervisor and scheduler do, which no family changes
one_family = pytest.mark.parametrize("stack", ["gpt2"], indirect=True, scope="module")


def url_of(server: ServerProcess, protocol: str) -> str:
    return server.http_url if protocol == "http" else server.grpc_url


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_identity_clients_request_gets_transformers_tokens(stack: Stack, protocol: str) -> None:
    answer = infer(
        protocol, url_of(stack.server, protocol), "fastertransformer", standard_inputs(PROMPTS, [6] * 4)
    )
    ids, lengths = answer.as_numpy("output_ids"), answer.as_numpy("sequence_length")
    assert ids.shape == (4, 1, 7 + 6) and ids.dtype == np.uint32
    for row, prompt in enumerate(PROMPTS):
        end = len(prompt) + 6
        assert lengths[row].tolist() == [end]
        assert ids[row, 0, :end].tolist() == prompt + stack.greedy(prompt, 6)
        assert (ids[row, 0, end:] == 50256).all()
    assert answer.as_numpy("response_input_lengths").tolist() == [[4], [1], [7], [2]]
    log_probs, total = answer.as_numpy("output_log_probs"), answer.as_numpy("cum_log_probs")
    assert (
        log_probs.shape == (4, 1, 6)
        and np.allclose(log_probs.sum(-1), total, atol=1e-4)
        and (total < 0).all()
    )


def test_the_streaming_door_sends_one_response_a_token(stack: Stack) -> None:
    seen = list(
        stream(stack.server.grpc_url, "fastertransformer_streaming", standard_inputs(PROMPTS[:1], [9]))
    )
    assert len(seen) == 9
    wanted = stack.greedy(PROMPTS[0], 9)
    for count, answer in enumerate(seen, start=1):
        assert answer.as_numpy("sequence_length").tolist() == [[4 + count]]
        assert answer.as_numpy("output_ids")[0, 0, : 4 + count].tolist() == PROMPTS[0] + wanted[:count]


def test_beams_equal_a_search_by_the_book_whole_and_streamed(stack: Stack) -> None:
    inputs = {**standard_inputs(PROMPTS, [6] * 4), "beam_width": np.full((4, 1), 3, np.uint32)}
    inputs["len_penalty"] = np.full((4, 1), 1.0, np.float32)
    answer = infer("http", stack.server.http_url, "fastertransformer", inputs)
    streamed = list(stream(stack.server.grpc_url, "fastertransformer_streaming", inputs))
    params = SamplingParams(max_tokens=6, beam_width=3, len_penalty=1.0)
    for row, prompt in enumerate(PROMPTS):
        history = competition(logits_of(stack.model), prompt, params)
        assert len(streamed) == len(history) == 6
        for step, beams in zip([*streamed, answer], [*history, history[-1]]):
            ids, cum = step.as_numpy("output_ids"), step.as_numpy("cum_log_probs")
            assert ids.shape == (4, 3, 7 + 6)
            for k, text in enumerate(beams):
                end = len(prompt) + len(text.tokens)
                assert ids[row, k, :end].tolist() == prompt + text.tokens
                assert step.as_numpy("sequence_length")[row, k] == end
                assert cum[row, k] == pytest.approx(text.cum, abs=1e-3)


def test_samples_and_beams_of_a_text_come_apart_and_together(stack: Stack) -> None:
    def texts(model: str, **others) -> dict[int, str]:
        asked = text_inputs("the cat sat", 8, exclude_input_in_output=True)
        asked.update({name: np.array([[value]]) for name, value in others.items()})
        found = {}
        for answer in stream(stack.server.grpc_url, model, asked):
            numbers = answer.as_numpy("sequence_index").flatten().tolist()
            pieces = answer.as_numpy("text_output").flatten().tolist()
            found.update({number: piece.decode() for number, piece in zip(numbers, pieces)})
        return found

    seed, hot, many = np.uint64(5), np.float32(0.9), np.int32(3)
    alone = [texts("tensorrt_llm_bls", seed=seed + np.uint64(i), top_p=hot)[0] for i in range(3)]
    for model in ("tensorrt_llm_bls", "tensorrt_llm_bls_plain"):
        together = texts(model, seed=seed, top_p=hot, num_return_sequences=many)
        assert together == dict(enumerate(alone))
    beams = [texts(f"tensorrt_llm_bls{end}", beam_width=many) for end in ("", "_plain")]
    assert beams[0] == beams[1] and len(set(beams[0].values())) == 3
    inputs = {
        "INPUT_0": np.array([["the cat sat"]], object),
        "INPUT_1": np.array([[8]], np.uint32),
        "INPUT_2": np.array([[""]], object),
        "INPUT_3": np.array([[""]], object),
        "beam_width": np.array([[3]], np.uint32),
    }
    whole = infer("http", stack.server.http_url, "ensemble", inputs).as_numpy("OUTPUT_0").flatten().tolist()
    assert len(whole) == 3 and len(set(whole)) == 3
    assert all(text.decode().startswith("the cat sat") for text in whole)


@pytest.mark.parametrize("model", ["ensemble", "ensemble_streaming"])
def test_the_ensembles_text_is_the_tokenizers_decoding_of_prompt_and_answer(stack: Stack, model: str) -> None:
    inputs = {
        "INPUT_0": np.array([["the cat sat"]], object),
        "INPUT_1": np.array([[5]], np.uint32),
        "INPUT_2": np.array([[""]], object),
        "INPUT_3": np.array([[""]], object),
        "is_return_log_probs": np.array([[True]]),
    }
    if model == "ensemble":
        answers = [infer("http", stack.server.http_url, model, inputs)]
    else:
        answers = list(stream(stack.server.grpc_url, model, inputs))
        assert len(answers) == 5
    plain = infer("grpc", stack.server.grpc_url, "tensorrt_llm_bls_plain", text_inputs("the cat sat", 5))
    texts = [answer.as_numpy("OUTPUT_0").flatten()[0].decode() for answer in answers]
    assert texts[-1] == plain.as_numpy("text_output").flatten()[0].decode()
    assert texts[-1].startswith("the cat sat") and len(texts[-1]) > len("the cat sat")


def test_streamed_pieces_make_the_one_shot_text_over_every_door(stack: Stack) -> None:
    body = {"text_input": "the cat", "max_tokens": 24, "exclude_input_in_output": True}
    status, whole = post(stack.server.http_url, "tensorrt_llm_bls/generate", {**body, "stream": False})
    assert status == 200
    text = json.loads(whole)["text_output"]
    status, events = post(stack.server.http_url, "tensorrt_llm_bls/generate_stream", {**body, "stream": True})
    pieces = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    assert "".join(piece["text_output"] for piece in pieces) == text
    assert sum(piece["num_output_tokens"] for piece in pieces) == 24
    inputs = text_inputs("the cat", 24, exclude_input_in_output=True)
    for model in ("tensorrt_llm_bls", "tensorrt_llm_bls_plain"):  # not streaming: exactly one response
        answers = list(stream(stack.server.grpc_url, model, inputs))
        assert [answer.as_numpy("text_output").flatten()[0].decode() for answer in answers] == [text]


@one_family
@pytest.mark.parametrize(
    "changes, text",
    [
        ({"input_lengths": np.array([[9]], np.uint32)}, "input_lengths"),
        (
            {"input_ids": np.array([[5, 70000, 1]], np.uint32), "input_lengths": np.array([[3]], np.uint32)},
            "70000",
        ),
        ({"request_output_len": np.array([[2**31]], np.uint32)}, "request_output_len|tokens"),
        ({"temperature": np.array([[-1]], np.float32)}, "temperature"),
        ({"temperature": np.array([[np.nan]], np.float32)}, "temperature"),
        ({"repetition_penalty": np.array([[0]], np.float32)}, "repetition_penalty"),
        ({"beam_width": np.array([[65]], np.uint32)}, "beam_width"),
        ({"bad_words_list": np.array([[[5, 6], [9, -1]]], np.int32)}, "bad_words_list"),
        ({"prompt_learning_task_name_ids": np.array([[3]], np.uint32)}, "prompt_learning_task_name_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bad_input_gets_an_error_that_names_it_and_the_server_lives(
    stack: Stack, changes: dict, text: str
) -> None:
    inputs = {**token_inputs([[5, 9, 11]], [4]), **changes}
    for model, call in (("fastertransformer", infer), ("fastertransformer_streaming", None)):
        with pytest.raises(InferenceServerException, match=text):
            if call is not None:
                call("grpc", stack.server.grpc_url, model, inputs)
            else:
                list(stream(stack.server.grpc_url, model, inputs))
    good = infer("grpc", stack.server.grpc_url, "fastertransformer", standard_inputs([[5, 9, 11]], [4]))
    assert good.as_numpy("output_ids")[0, 0].tolist() == [5, 9, 11, *stack.greedy([5, 9, 11], 4)]


def test_sixty_four_streams_at_once_each_end_once_with_their_own_tokens(stack: Stack) -> None:
    generator = np.random.default_rng(5)
    prompts = [generator.integers(3, 60, generator.integers(1, 12)).tolist() for _ in range(64)]
    answers: list = [None] * 64

    def run(i: int) -> None:
        seen = list(
            stream(stack.server.grpc_url, "fastertransformer_streaming", standard_inputs([prompts[i]], [10]))
        )
        lengths = [int(answer.as_numpy("sequence_length")[0, 0]) - len(prompts[i]) for answer in seen]
        answers[i] = (lengths, seen[-1].as_numpy("output_ids")[0, 0].tolist())

    threads = [threading.Thread(daemon=True, target=run, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for prompt, (lengths, ids) in zip(prompts, answers):
        assert ids == prompt + stack.greedy(prompt, 10)
        assert lengths == sorted(set(lengths))  # tokens may be merged: two cores have 640 to send in no time
        assert (lengths[0], lengths[-1]) == (1, 10)


def engine_pid(repository: Path) -> int:
    """Rank 0 of the engine, found by the repository on its command line."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []  # of a zombie: nothing
        if "tridecode.backend.engine" in line and any(str(repository) in part for part in line):
            return process.pid
    raise AssertionError("no engine process found")


def health(server: ServerProcess) -> tuple[bool, str]:
    """Return whether the health model is ready, and the error of its probe."""
    try:
        answer = infer("http", server.http_url, "tridecode_health", {"PROBE": np.array([True])})
    except InferenceServerException as error:
        return False, str(error)
    return bool(answer.as_numpy("READY").flatten()[0]), ""


class Load:
    """Clients that send one request after the other until `stop`. texts: the last ids of each answer."""

    def __init__(self, stack: Stack, clients: int, resume: bool):
        self._stack, self._stopping = stack, False
        self._inputs = {**standard_inputs([[5, 9]], [50]), "resume": np.array([[resume]])}
        self.texts: list[list[int]] = []
        self.requests: list[tuple[float, float, str]] = []  # start, end, error or ""
        self._threads = [threading.Thread(daemon=True, target=self._run) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stopping:
            start, failure = time.monotonic(), ""
            try:
                *_, last = stream(self._stack.server.grpc_url, "fastertransformer_streaming", self._inputs)
                self.texts.append(last.as_numpy("output_ids")[0, 0].tolist())
            except (InferenceServerException, queue.Empty) as error:
                failure = str(error) or "no answer came"
            self.requests.append((start, time.monotonic(), failure))
            if failure:
                time.sleep(0.1)

    @property
    def errors(self) -> list[str]:
        return [error for _, _, error in list(self.requests) if error]

    def stop(self) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join(90)  # longer than `stream` waits for an answer


@one_family
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_engine_under_load_is_a_pause_of_every_stream(stack: Stack, blow: int) -> None:
    load = Load(stack, clients=8, resume=True)
    wait_until(lambda: len(load.requests) >= 8, 30, "answers")
    before = len(load.texts)
    os.kill(engine_pid(stack.repository), blow)
    wait_until(lambda: not health(stack.server)[0], 60, "health to notice")
    wait_until(lambda: health(stack.server)[0], 60, "the engine's return")
    wait_until(lambda: len(load.texts) >= before + 16, 60, "answers of the next engine")
    load.stop()
    known = ("the engine is not ready", "the engine is down")  # of requests that came meanwhile
    others = [error for error in load.errors if not any(text in error for text in known)]
    assert not others, others[0]
    wanted = [5, 9, *stack.greedy([5, 9], 50)]
    assert all(text == wanted for text in load.texts)


@one_family
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_engine_under_load_is_an_error_within_five_seconds_and_comes_back(
    stack: Stack, blow: int
) -> None:
    server_pid = stack.server.server_pid
    load = Load(stack, clients=8, resume=False)
    wait_until(lambda: len(load.requests) >= 8, 30, "answers")
    assert not load.errors
    struck = time.monotonic()
    os.kill(engine_pid(stack.repository), blow)
    wait_until(lambda: len(load.errors) >= 8, 60, "errors of all that was under way")
    assert not health(stack.server)[0]
    wait_until(lambda: health(stack.server)[0], 60, "the engine's return")
    load.stop()
    failed = [end - max(start, struck) for start, end, error in load.requests if error]
    assert max(failed) < 5.0, "a request was left hanging"
    wanted = "killed by signal 9" if blow == signal.SIGKILL else "silent for"
    assert wanted in load.errors[0], load.errors[0]
    assert stack.server.server_pid == server_pid
    good = infer("grpc", stack.server.grpc_url, "fastertransformer", standard_inputs([[5, 9, 11]], [4]))
    assert good.as_numpy("output_ids")[0, 0].tolist() == [5, 9, 11, *stack.greedy([5, 9, 11], 4)]
