"""A client of the text models that streams their answers over tritonclient's gRPC."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import typer
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from tridecode.backend.base.errors import BY_CODE, ConfigError, EngineDownError, RequestError, TridecodeError
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM
from tridecode.backend.service.structured_fields import GUIDE, GUIDE_TYPE
from tridecode.model_repo_templates.contracts_in import with_advice
from tridecode.model_repo_templates.pbtxt import data_type_name
from tridecode.tools.client.triton_stream import plain_reason, stream_results, tensor

GRPC_PORT = 8001  # tritonserver's default
_CONNECT_S = 10.0  # seconds until a server that does not answer counts as absent
_RATE_S = 0.05  # shortest time from which tokens/s is computed: several tokens can arrive in one packet

#: names of text models in a repository, the recommended one first
TEXT_MODELS = (
    "tensorrt_llm_bls",
    "tensorrt_llm_bls_streaming",
    "tensorrt_llm_bls_plain",
    "ensemble",
    "ensemble_streaming",
    "ensemble_plain",
)


def _numpy(dtype: str) -> Any:
    """Triton's name of a type in a config.pbtxt -> numpy type; None for an unknown one."""
    return triton_to_np_dtype("BYTES" if dtype == "STRING" else dtype)


_OTHERS = ("end_id", "stop_words", "bad_words", "priority", "lora_name", GUIDE_TYPE, GUIDE)
#: inputs that a request may set: input of the text models -> its usual dtype (object: texts)
SAMPLING = {
    field.name: _numpy(field.dtype)
    for field in TENSORRT_LLM.inputs
    if field.declared and (field.param or field.name in _OTHERS)
}
#: sampling parameter -> its input of the text models, where the names differ: length_penalty
_INPUT_OF = {field.param: field.name for field in TENSORRT_LLM.params if field.param != field.name}


@dataclass(frozen=True)
class Piece:
    """The part that one response added: its text and number of tokens. finish_reason: "stop", "length" or
    "abort" with the last one, "" before and from servers without it.
    """

    text: str
    tokens: int
    finish_reason: str = ""


@dataclass(frozen=True)
class TemplatedPrompt:
    """A prompt rendered by a chat template: special tokens added by the tokenizer would be duplicates.

    text: as rendered, with the template's BOS. without_bos: for models that have no input
    add_special_tokens (config.pbtxt of an older version); the text without a BOS that the tokenizer adds.
    """

    text: str
    without_bos: str


@dataclass(frozen=True)
class TextModel:
    """A text model of the server. decoupled: it answers with a stream. dtypes: of its inputs, as its
    config.pbtxt declares them (LangChain's client needs UINT32 for some that are INT32 by default).
    """

    name: str
    decoupled: bool
    dtypes: Mapping[str, Any] = field(default_factory=dict)


def grpc_address(url: str) -> str:
    """host:port of a server's gRPC; the port is 8001 by default.

    Raises ConfigError for an HTTP address and for a text that is not an address.
    """
    scheme, separator, rest = url.strip().rpartition("://")
    example = "wanted host:port of the server's gRPC, e.g. localhost:8001"
    if separator and scheme.lower() != "grpc":
        raise ConfigError(f"--url {url} is an {scheme.upper()} address; {example}")
    rest = rest.rstrip("/")
    host, colon, port = rest.rpartition(":")
    if rest.startswith("[") and rest.endswith("]"):  # an IPv6 address
        host, port = rest, str(GRPC_PORT)
    elif rest.count(":") > 1 and not rest.startswith("["):
        host, port = f"[{rest}]", str(GRPC_PORT)
    elif not colon:
        host, port = rest, str(GRPC_PORT)
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or " " in host:
        raise ConfigError(f"--url {url} is not an address; {example}")
    return f"{host}:{port}"


def complete_sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request, with top_p and seed added where the user expects them.

    In the contract a temperature has no effect without top_k or top_p; here a temperature alone sets top_p to
    1, the whole vocabulary. If tokens are sampled and no seed is given, one is drawn; the server's default is
    0.
    """
    completed = dict(options)
    temperature, top_k, top_p = (completed.get(key) for key in ("temperature", "top_k", "top_p"))
    if temperature and top_k is None and top_p is None:
        completed["top_p"] = top_p = 1.0
    samples = temperature != 0 and top_k != 1 and bool(top_k or top_p)
    if samples and completed.get("seed") is None:
        completed["seed"] = secrets.randbelow(1 << 32)
    return completed


def find_text_model(url: str, name: str | None = None, streaming: bool = True) -> TextModel:
    """Return the text model `name`, or the first of TEXT_MODELS that is ready.

    If streaming, decoupled models are preferred, otherwise the others.

    url: host:port of gRPC. Raises EngineDownError if no server answers, RequestError if it has no such model.
    """
    with connected(url) as client:
        if name is not None:
            return _named(client, name)
        found = [_describe(client, model) for model in TEXT_MODELS if client.is_model_ready(model)]
    fitting = [model for model in found if model is not None]
    if not fitting:
        wanted = f"one of {', '.join(TEXT_MODELS)}, or --model"
        raise RequestError(f"{url} has no text model that is ready; wanted {wanted}")
    return next((model for model in fitting if model.decoupled == streaming), fitting[0])


def stream_text(
    url: str,
    model: str | None,
    prompt: str | TemplatedPrompt,
    *,
    timeout_s: float | None = None,
    **sampling: Any,
) -> Iterator[Piece]:
    """The pieces of text that `model` (None: the first text model of the server) generates after `prompt`.

    sampling: keys of SAMPLING. timeout_s: longest wait for a response; None: no limit. Closing the iterator
    cancels the request on the server, and so does Ctrl-C. Raises EngineDownError if no server answers,
    RequestError for an option that does not exist or does not fit its dtype, TridecodeError with the server's
    text if the request fails.
    """
    with connected(url) as client:
        found = _named(client, model) if model else find_text_model(url)
        inputs = _inputs(prompt, {"stream": found.decoupled, **sampling}, found.dtypes)
        for result in stream_results(client, found.name, inputs, timeout_s, request_id=uuid.uuid4().hex):
            yield _piece(result)


def infer_text(
    url: str,
    model: str | None,
    prompt: str | TemplatedPrompt,
    *,
    timeout_s: float | None = None,
    **sampling: Any,
) -> Piece:
    """Return the whole answer, over a plain infer if the model gives one response, else over a stream.

    Raises the same errors as stream_text.
    """
    found = find_text_model(url, model, streaming=False)
    if found.decoupled:
        options = {"stream": False, "timeout_s": timeout_s, **sampling}
        pieces = list(stream_text(url, found.name, prompt, **options))
        reason = pieces[-1].finish_reason if pieces else ""
        return Piece("".join(piece.text for piece in pieces), sum(piece.tokens for piece in pieces), reason)
    with connected(url) as client:
        inputs = _inputs(prompt, dict(sampling), found.dtypes)
        return _piece(client.infer(found.name, inputs, client_timeout=timeout_s))


def print_stream(pieces: Iterator[Piece]) -> bool:
    """Write pieces to stdout as they arrive; then, to stderr, the time to the first token, tokens/s, and
    whether max_tokens ended the answer. Returns False if Ctrl-C ended it early.
    """
    started, first, last, early, tokens = time.perf_counter(), 0.0, 0.0, 0, 0
    whole, reason = True, ""
    try:
        for piece in pieces:
            last = time.perf_counter()
            if not first:
                first, early = last, piece.tokens
            tokens += piece.tokens
            reason = piece.finish_reason or reason
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        whole = False
    print(flush=True)
    if first:
        later, seconds = tokens - early, last - first
        rate = f", then {later / seconds:.1f} tokens/s" if later and seconds >= _RATE_S else ""
        cut = "" if whole else "; cancelled"
        if reason == "length":
            cut = "; ended by its length (--max-tokens)"
        told = f"first token {(first - started) * 1000:.0f} ms{rate}; {tokens} tokens{cut}"
        typer.secho(told, dim=True, err=True)
    return whole


def _piece(result: triton.InferResult) -> Piece:
    text = result.as_numpy("text_output")
    counts = result.as_numpy("num_output_tokens")
    joined = b"" if text is None else b"".join(text.reshape(-1).tolist())
    reasons = result.as_numpy("finish_reason")
    return Piece(
        joined.decode("utf-8", errors="replace"),
        0 if counts is None else int(counts.sum()),
        "" if reasons is None else reasons.reshape(-1)[0].decode("utf-8", errors="replace"),
    )


def _inputs(
    prompt: str | TemplatedPrompt, options: dict[str, Any], dtypes: Mapping[str, Any]
) -> list[triton.InferInput]:
    flags = {"stream": bool(options.pop("stream", False)), "exclude_input_in_output": True}
    flags["return_num_output_tokens"] = True
    if isinstance(prompt, TemplatedPrompt):
        if "add_special_tokens" in dtypes:
            flags["add_special_tokens"], prompt = False, prompt.text
        else:
            prompt = prompt.without_bos
    options = {_INPUT_OF.get(name, name): value for name, value in options.items()}
    if (options.get("beam_width") or 1) > 1:
        options["num_return_sequences"] = 1  # the best beam is the answer
    unknown = sorted(name for name in set(options) - set(SAMPLING) if options[name] is not None)
    if unknown:
        raise RequestError(f"no sampling option {unknown[0]}; there are {', '.join(SAMPLING)}")
    options.setdefault("max_tokens", 128)
    inputs = [tensor("text_input", np.array([[prompt.encode()]], np.object_))]
    inputs += [tensor(name, np.array([[flag]], np.bool_)) for name, flag in flags.items()]
    for name, value in options.items():
        if value is not None:
            inputs.append(tensor(name, _option(name, value, dtypes.get(name, SAMPLING[name]))))
    return inputs


def _option(name: str, value: Any, dtype: Any) -> np.ndarray:
    """[1, 1], or [1, n] of texts. RequestError for a number that the dtype does not hold."""
    if dtype is np.object_:
        words = [value] if isinstance(value, str) else list(value)
        return np.array([[word.encode() for word in words]], np.object_)
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise RequestError(f"{name} is {value}; wanted {limits.min} to {limits.max} ({limits.dtype})")
    return np.array([[value]], dtype)


@contextmanager
def connected(url: str) -> Iterator[triton.InferenceServerClient]:
    """Yield a client whose errors are TridecodeErrors; EngineDownError if the server does not answer."""
    client = triton.InferenceServerClient(url)
    try:
        _check_live(client, url)
        yield client
    except InferenceServerException as error:
        raise _ours(error, url) from None
    finally:
        client.close()


def _check_live(client: triton.InferenceServerClient, url: str) -> None:
    """Raise EngineDownError with a plain text instead of gRPC's sockets and channel states."""
    try:
        client.is_server_live(client_timeout=_CONNECT_S)
    except InferenceServerException as error:
        if error.status() not in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED"):
            return  # the server answers; a gateway may block this call
        late = error.status() == "StatusCode.DEADLINE_EXCEEDED"
        why = f"no answer within {_CONNECT_S:g} s" if late else plain_reason(error.message() or "")
        raise EngineDownError(
            f"no Triton server answers at {url} over gRPC ({why}): is it running? tridecode serve REPOSITORY"
        ) from None


#: gRPC status -> our code; what Triton does not find is a model
_CODES = {"INVALID_ARGUMENT": "INVALID_ARG", "NOT_FOUND": "INVALID_ARG", "UNIMPLEMENTED": "UNSUPPORTED"}


def _ours(error: InferenceServerException, url: str = "") -> TridecodeError:
    """Return the server's text as the error class of its status."""
    status = (error.status() or "").removeprefix("StatusCode.")
    code = _CODES.get(status, status)
    where = f" (server: {url})" if url and code == "UNAVAILABLE" else ""
    return BY_CODE.get(code, TridecodeError)(f"{with_advice(error.message() or '')}{where}")


def _describe(client: triton.InferenceServerClient, name: str) -> TextModel | None:
    """Describe a model; None if it does not take text."""
    config = client.get_model_config(name).config
    declared = {tensor.name: tensor.data_type for tensor in config.input}
    if "text_input" not in declared:
        return None
    found = {name: _numpy(data_type_name(kind)) for name, kind in declared.items()}
    dtypes = {name: dtype for name, dtype in found.items() if dtype is not None}
    return TextModel(config.name or name, config.model_transaction_policy.decoupled, dtypes)


def _named(client: triton.InferenceServerClient, name: str) -> TextModel:
    found = _describe(client, name)
    if found is None:
        raise RequestError(
            f"model {name} has no input text_input; wanted a text model, e.g. {TEXT_MODELS[0]}"
        )
    return found
