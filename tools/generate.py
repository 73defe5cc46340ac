"""A client of the text models: what they write, piece by piece, over tritonclient's gRPC stream."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import typer
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tridecode.backend.errors import BY_CODE, EngineDownError, RequestError, TridecodeError

#: names that a text model may have in a repository, the one we recommend first
TEXT_MODELS = (
    "tensorrt_llm_bls",
    "tensorrt_llm_bls_streaming",
    "tensorrt_llm_bls_plain",
    "ensemble",
    "ensemble_streaming",
    "ensemble_plain",
)
#: what a request may set: tensor of the text models -> its dtype (object: texts)
SAMPLING = {
    "max_tokens": np.int32,
    "min_tokens": np.int32,
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "top_p_decay": np.float32,
    "top_p_min": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "seed": np.uint64,
    "end_id": np.int32,
    "stop_words": np.object_,
    "bad_words": np.object_,
    "priority": np.int32,
}


@dataclass(frozen=True)
class Piece:
    """What one response added: its text and how many tokens that is."""

    text: str
    tokens: int


@dataclass(frozen=True)
class TextModel:
    """A text model that the server has. decoupled: it answers with a stream."""

    name: str
    decoupled: bool


def find_text_model(url: str, name: str | None = None, streaming: bool = True) -> TextModel:
    """The text model to talk to: `name`, or the first of TEXT_MODELS that the server has, one that streams
    before one that does not (streaming=False: the other way round).

    url: host:port of gRPC. Raises EngineDownError where no server answers, RequestError where it has no such
    model.
    """
    with _client(url) as client:
        if name is not None:
            return _named(client, name)
        ready = _ready_models(client)
        found = [_describe(client, model) for model in TEXT_MODELS if model in ready]
    fitting = [model for model in found if model is not None]
    if not fitting:
        names = ", ".join(TEXT_MODELS)
        raise RequestError(f"{url} has no text model that is ready; looked for {names}")
    return next((model for model in fitting if model.decoupled == streaming), fitting[0])


def stream_text(
    url: str,
    model: str | None,
    prompt: str,
    *,
    timeout_s: float | None = None,
    **sampling: Any,
) -> Iterator[Piece]:
    """The pieces of text that `model` (None: the first text model there is) writes after `prompt`.

    sampling: keys of SAMPLING. timeout_s: the longest silence that is put up with. Closing the iterator, and
    Ctrl-C, cancel the request on the server. Raises TridecodeError with the server's text where the request
    fails, RequestError for a key that does not exist.
    """
    inputs = _inputs(prompt, {"stream": True, **sampling})
    with _client(url) as client:
        found = _named(client, model) if model else find_text_model(url)
        answers: queue.Queue = queue.Queue()
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        try:
            client.async_stream_infer(
                found.name, inputs, request_id=uuid.uuid4().hex, enable_empty_final_response=True
            )
            yield from _pieces(answers, found, timeout_s)
        finally:
            client.stop_stream(cancel_requests=True)


def infer_text(url: str, model: str | None, prompt: str, **sampling: Any) -> Piece:
    """The whole answer at once, over a plain infer where the model gives one response, else over a stream.

    Raises as stream_text does.
    """
    found = find_text_model(url, model, streaming=False)
    if found.decoupled:
        pieces = list(stream_text(url, found.name, prompt, stream=False, **sampling))
        return Piece("".join(piece.text for piece in pieces), sum(piece.tokens for piece in pieces))
    with _client(url) as client:
        return _piece(client.infer(found.name, _inputs(prompt, sampling)))


def print_stream(pieces: Iterator[Piece]) -> bool:
    """Write pieces to stdout as they come and, to stderr, first-token time and tokens a second. False: Ctrl-C
    ended them early."""
    started, first, last, early, tokens = time.perf_counter(), 0.0, 0.0, 0, 0
    whole = True
    try:
        for piece in pieces:
            last = time.perf_counter()
            if not first:
                first, early = last, piece.tokens
            tokens += piece.tokens
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        whole = False
    print(flush=True)
    if first:
        rate = f", then {(tokens - early) / (last - first):.1f} tokens/s" if tokens > early else ""
        cut = "" if whole else "; cancelled"
        told = f"first token {(first - started) * 1000:.0f} ms{rate}; {tokens} tokens{cut}"
        typer.secho(told, dim=True, err=True)
    return whole


def _pieces(answers: queue.Queue, model: TextModel, timeout_s: float | None) -> Iterator[Piece]:
    while True:
        try:
            result, error = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineDownError(f"{model.name} has been silent for {timeout_s:g} s") from None
        if error is not None:
            raise _ours(error)
        response = result.get_response()
        if response.outputs:
            yield _piece(result)
        if _is_final(response, model):
            return


def _is_final(response: Any, model: TextModel) -> bool:
    """A stream says of each response whether it is the last; a model with one response need not."""
    if "triton_final_response" in response.parameters:
        return response.parameters["triton_final_response"].bool_param
    return not model.decoupled


def _piece(result: triton.InferResult) -> Piece:
    text = result.as_numpy("text_output")
    counts = result.as_numpy("num_output_tokens")
    joined = b"" if text is None else b"".join(text.reshape(-1).tolist())
    return Piece(joined.decode("utf-8", errors="replace"), 0 if counts is None else int(counts.sum()))


def _inputs(prompt: str, options: dict[str, Any]) -> list[triton.InferInput]:
    flags = {"stream": bool(options.pop("stream", False)), "exclude_input_in_output": True}
    flags["return_num_output_tokens"] = True
    unknown = sorted(set(options) - set(SAMPLING))
    if unknown:
        raise RequestError(f"no sampling option {unknown[0]}; there are {', '.join(SAMPLING)}")
    options.setdefault("max_tokens", 128)
    inputs = [_tensor("text_input", np.array([[prompt.encode()]], np.object_))]
    inputs += [_tensor(name, np.array([[flag]], np.bool_)) for name, flag in flags.items()]
    for name, value in options.items():
        if value is not None:
            inputs.append(_tensor(name, _option(name, value)))
    return inputs


def _option(name: str, value: Any) -> np.ndarray:
    if SAMPLING[name] is np.object_:
        words = [value] if isinstance(value, str) else list(value)
        return np.array([[word.encode() for word in words]], np.object_)
    return np.array([[value]], SAMPLING[name])


def _tensor(name: str, value: np.ndarray) -> triton.InferInput:
    tensor = triton.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    tensor.set_data_from_numpy(value)
    return tensor


@contextmanager
def _client(url: str) -> Iterator[triton.InferenceServerClient]:
    """A client whose errors are ours."""
    client = triton.InferenceServerClient(url)
    try:
        yield client
    except InferenceServerException as error:
        raise _ours(error, url) from None
    finally:
        client.close()


def _ours(error: InferenceServerException, url: str = "") -> TridecodeError:
    """The server's text, as the error that its status stands for."""
    status = (error.status() or "").removeprefix("StatusCode.")
    code = {"INVALID_ARGUMENT": "INVALID_ARG", "UNIMPLEMENTED": "UNSUPPORTED"}.get(status, status)
    where = f" (server: {url})" if url and code == "UNAVAILABLE" else ""
    return BY_CODE.get(code, TridecodeError)(f"{error.message()}{where}")


def _ready_models(client: triton.InferenceServerClient) -> set[str]:
    """Of TEXT_MODELS: the list of all models is closed to clients, see docs/security.md."""
    return {name for name in TEXT_MODELS if client.is_model_ready(name)}


def _describe(client: triton.InferenceServerClient, name: str) -> TextModel | None:
    """None for a model that is no text model."""
    config = client.get_model_config(name).config
    if "text_input" not in {tensor.name for tensor in config.input}:
        return None
    return TextModel(name, config.model_transaction_policy.decoupled)


def _named(client: triton.InferenceServerClient, name: str) -> TextModel:
    found = _describe(client, name)
    if found is None:
        raise RequestError(f"model {name} has no input text_input; wanted a text model, as {TEXT_MODELS[0]}")
    return found
