"""Sends one streamed request over tritonclient's gRPC, and explains the client's error texts."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tridecode.backend.base.errors import EngineDownError

_REASON_S = 5.0  # longest wait for gRPC's reason of a failed stream

#: explanations of error texts, by a part of the text, if the peer is absent or not Triton
NO_SERVER = {
    "refused": "connection refused",
    "resolution failed": "the host name is unknown",
    "errors resolving": "the host name is unknown",
    "Name or service": "the host name is unknown",
    "no HTTP": "not HTTP: is it the port of gRPC?",
    "HTTP/2": "not gRPC: is it the port of HTTP?",
    "http1.x": "not gRPC: is it the port of HTTP?",
    "decoding the response": "an HTTP server that is not Triton",
    "Socket closed": "it closes the connection: is it the port of HTTP?",
    "failed to connect": "no connection",
}


def tensor(name: str, value: np.ndarray) -> grpc_client.InferInput:
    made = grpc_client.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    made.set_data_from_numpy(value)
    return made


def plain_reason(text: str) -> str:
    """Return NO_SERVER's explanation of an error text, else the text on one line."""
    return next((words for part, words in NO_SERVER.items() if part in text), " ".join(text.split()))


def stream_results(
    client: grpc_client.InferenceServerClient,
    model: str,
    inputs: list[grpc_client.InferInput],
    timeout_s: float | None,
    request_id: str = "",
) -> Iterator[grpc_client.InferResult]:
    """Yield the responses that have outputs. Closing the iterator cancels the request on the server.

    timeout_s: longest wait for a response. Raises EngineDownError after it, InferenceServerException with the
    server's text.
    """
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    try:
        try:
            client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)
        except InferenceServerException as refusal:  # the stream has failed; the callback gets the reason
            raise (_next(answers, model, _REASON_S)[1] or refusal) from None
        while True:
            result, error = _next(answers, model, timeout_s)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                yield result
            final = response.parameters.get("triton_final_response")
            if final is None or final.bool_param:  # a model that is not decoupled may omit it
                return
    finally:
        client.stop_stream(cancel_requests=True)


def _next(answers: queue.Queue, model: str, timeout_s: float | None) -> tuple[Any, Any]:
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        raise EngineDownError(f"{model} has been silent for {timeout_s:g} s") from None
