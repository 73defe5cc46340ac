"""Asks a running server LAMBADA's questions: token ids or text over gRPC, one response or a stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tridecode.backend.base.errors import RequestError, TridecodeError
from tridecode.model_repo_templates.contracts_in import with_advice
from tridecode.model_repo_templates.pbtxt import data_type_name
from tridecode.tools.client.generate import connected
from tridecode.tools.client.triton_stream import stream_results, tensor
from tridecode.tools.evaluate.lambada import Question

#: models of a repository, the recommended one first
MODELS = ("fastertransformer", "fastertransformer_streaming", "tensorrt_llm_bls", "ensemble")


@dataclass(frozen=True)
class ServedModel:
    """A model of the server. takes: "tokens" or "text". decoupled: it answers with a stream.
    add_special_tokens: whether it adds them when it tokenises. whole_type: Triton's type of max_tokens.
    """

    name: str
    takes: str
    decoupled: bool
    add_special_tokens: bool = True
    whole_type: str = "INT32"


def find_model(url: str, name: str | None) -> ServedModel:
    """The model `name`, or the first of MODELS that is ready.

    Raises EngineDownError if no server answers, RequestError if it has no such model.
    """
    with connected(url) as client:
        names = [name] if name is not None else [one for one in MODELS if client.is_model_ready(one)]
        if not names:
            raise RequestError(f"{url} has none of the models {', '.join(MODELS)} ready; wanted one: --model")
        config = client.get_model_config(names[0]).config
    inputs = {tensor.name: tensor.data_type for tensor in config.input}
    takes = "tokens" if "input_ids" in inputs else "text" if "text_input" in inputs else ""
    if not takes:
        raise RequestError(f"model {names[0]} has neither input_ids nor text_input; wanted one of them")
    setting = config.parameters["add_special_tokens"].string_value if takes == "text" else "true"
    whole = data_type_name(inputs["max_tokens"]) if inputs.get("max_tokens") else "INT32"
    return ServedModel(
        names[0],
        takes,
        config.model_transaction_policy.decoupled,
        setting.strip().lower() in ("true", "yes", "on", "1"),
        whole,
    )


def ask(
    url: str,
    model: ServedModel,
    questions: Sequence[Question],
    concurrency: int,
    progress: Callable[[int], None],
    timeout_s: float | None = None,
) -> list[bool]:
    """Return, per question, whether the server's answer is right. Equal requests are sent once.

    concurrency: requests in flight. progress: called with the number of questions answered. timeout_s:
    longest wait for a response. Raises TridecodeError with the server's text if a request fails.
    """
    shared: dict[tuple, list[int]] = {}
    for index, question in enumerate(questions):
        asked = question.prompt if model.takes == "tokens" else question.prompt_text
        shared.setdefault((asked, len(question.target)), []).append(index)
    right, done, lock = [False] * len(questions), 0, threading.Lock()
    failed = threading.Event()

    def work(indices: list[int]) -> None:
        nonlocal done
        if failed.is_set():
            return
        try:
            answer = _answer(clients.get(), model, questions[indices[0]], timeout_s)
        except InferenceServerException as error:
            failed.set()
            where = f"{model.name} at {url}, item {questions[indices[0]].item}"
            raise TridecodeError(f"{where}: {with_advice(error.message() or '')}") from None
        except BaseException:
            failed.set()
            raise
        with lock:
            for index in indices:
                right[index] = _is_right(answer, questions[index])
            done += len(indices)
            progress(done)

    with connected(url):
        pass  # an absent server is one clear error
    clients = _Clients(url)
    with ThreadPoolExecutor(max(1, concurrency)) as pool:
        futures = [pool.submit(partial(work, indices)) for indices in shared.values()]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        except BaseException:
            failed.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            clients.close()
    return right


class _Clients:
    """A client for each thread: a stream belongs to one client."""

    def __init__(self, url: str):
        self._url, self._local, self._all = url, threading.local(), list[Any]()

    def get(self) -> triton.InferenceServerClient:
        if not hasattr(self._local, "client"):
            self._local.client = triton.InferenceServerClient(self._url)
            self._all.append(self._local.client)
        return self._local.client

    def close(self) -> None:
        for client in self._all:
            client.close()


def _answer(
    client: triton.InferenceServerClient, model: ServedModel, question: Question, timeout_s: float | None
) -> tuple[int, ...] | str:
    """The answer's tokens, or its text."""
    inputs = _token_inputs(question) if model.takes == "tokens" else _text_inputs(question, model)
    if model.decoupled:
        results = list(stream_results(client, model.name, inputs, timeout_s))
    else:
        results = [client.infer(model.name, inputs, client_timeout=timeout_s)]
    if model.takes == "text":
        parts = [result.as_numpy("text_output") for result in results]
        joined = b"".join(b"".join(part.reshape(-1).tolist()) for part in parts if part is not None)
        return joined.decode("utf-8", errors="replace")
    if not results:
        return ()
    # a response has the whole row so far: the last one is complete
    row = results[-1].as_numpy("output_ids").reshape(-1)
    length = int(results[-1].as_numpy("sequence_length").reshape(-1)[0])
    return tuple(row[len(question.prompt) : length].tolist())


def _is_right(answer: tuple[int, ...] | str, question: Question) -> bool:
    return answer == (question.target_text if isinstance(answer, str) else question.target)


def _token_inputs(question: Question) -> list[triton.InferInput]:
    return [
        tensor("input_ids", np.array([question.prompt], np.uint32)),
        tensor("input_lengths", np.array([[len(question.prompt)]], np.uint32)),
        tensor("request_output_len", np.array([[len(question.target)]], np.uint32)),
    ]


def _text_inputs(question: Question, model: ServedModel) -> list[triton.InferInput]:
    whole = np.uint32 if model.whole_type == "UINT32" else np.int32
    return [
        tensor("text_input", np.array([[question.prompt_text.encode()]], np.object_)),
        tensor("max_tokens", np.array([[len(question.target)]], whole)),
        tensor("stream", np.array([[model.decoupled]])),
        tensor("exclude_input_in_output", np.array([[True]])),
    ]
