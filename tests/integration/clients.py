"""Requests as FasterTransformer's and TensorRT-LLM's clients make them, over the real tritonclient."""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import np_to_triton_dtype

TEXT = object  # numpy's dtype of strings


def fill(module: Any, arrays: dict[str, np.ndarray]) -> list:
    inputs = []
    for name, array in arrays.items():
        inputs.append(module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def infer(protocol: str, url: str, model: str, arrays: dict[str, np.ndarray], **options: Any):
    """One plain call over "http" or "grpc"."""
    module = httpclient if protocol == "http" else grpcclient
    with module.InferenceServerClient(url) as client:
        return client.infer(model, fill(module, arrays), **options)


def post(url: str, path: str, body: dict) -> tuple[int, str]:
    """Status and text of a POST to /v2/models/<path>, the HTTP generate endpoint."""
    request = urllib.request.Request(f"http://{url}/v2/models/{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def stream(
    url: str, model: str, arrays: dict[str, np.ndarray], timeout_s: float = 60.0, **options: Any
) -> Iterator:
    """Each response of one request over a gRPC stream; raises an error that the server sends."""
    answers: queue.Queue = queue.Queue()
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            model, fill(grpcclient, arrays), enable_empty_final_response=True, **options
        )
        while True:
            result, error = answers.get(timeout=timeout_s)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                yield result
            if response.parameters["triton_final_response"].bool_param:
                return


def token_inputs(prompts: list[list[int]], lengths: list[int], **extra: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs that every FasterTransformer client sends: padded ids, lengths, output lengths."""
    width = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), width), np.uint32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    return {
        "input_ids": ids,
        "input_lengths": np.array([[len(prompt)] for prompt in prompts], np.uint32),
        "request_output_len": np.array([[length] for length in lengths], np.uint32),
        **extra,
    }


def standard_inputs(prompts: list[list[int]], lengths: list[int]) -> dict[str, np.ndarray]:
    """The sixteen inputs of FasterTransformer's identity test, with its end id 50256 for any model."""
    rows = len(prompts)

    def column(value: float, kind: type) -> np.ndarray:
        return np.full((rows, 1), value, kind)

    empty_words = np.tile(np.array([[[0], [-1]]], np.int32), (rows, 1, 1))
    return token_inputs(
        prompts,
        lengths,
        runtime_top_k=column(1, np.uint32),
        runtime_top_p=column(0.0, np.float32),
        beam_search_diversity_rate=column(0.0, np.float32),
        temperature=column(1.0, np.float32),
        len_penalty=column(1.0, np.float32),
        repetition_penalty=column(1.0, np.float32),
        random_seed=column(0, np.uint64),
        is_return_log_probs=column(True, bool),
        beam_width=column(1, np.uint32),
        start_id=column(50256, np.uint32),
        end_id=column(50256, np.uint32),
        bad_words_list=empty_words,
        stop_words_list=empty_words,
    )


def text_inputs(text: str, max_tokens: int, **extra: Any) -> dict[str, np.ndarray]:
    """The inputs of TensorRT-LLM's ensemble, as genai-perf sends them."""
    arrays = {
        "text_input": np.array([[text]], TEXT),
        "max_tokens": np.array([[max_tokens]], np.int32),
    }
    return {**arrays, **{name: np.array([[value]]) for name, value in extra.items()}}
