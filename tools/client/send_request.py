"""Sends FasterTransformer's JSON request files and shows every tensor of the responses.

A file is {"config": {...}, "request": [{"name", "data", "dtype"}, ...]}. config: protocol (http, grpc), url,
model_name, verbose, stream_api. data: a number, a text or nested lists; dtype: numpy's name, or bytes.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from rich.console import Console
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tridecode.backend.base.errors import ConfigError, EngineDownError, TridecodeError
from tridecode.model_repo_templates.contracts_in import with_advice
from tridecode.tools.client.triton_stream import NO_SERVER, plain_reason, stream_results

_MAX_FILE_BYTES = 256 << 20
_PORTS = {"http": 8000, "grpc": 8001}
_HTTP_TIMEOUT_S = 600.0  # the HTTP client needs a time-out
_TEXT_DTYPES = ("bytes", "object", "str", "string")


@dataclass(frozen=True)
class RequestFile:
    """A request from a file and --params. tensors: name -> array with its batch axis."""

    protocol: str = "http"
    url: str = "localhost:8000"
    model_name: str = "fastertransformer"
    verbose: bool = False
    stream_api: bool = False
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One response: its outputs by name, and seconds since the request was sent."""

    outputs: dict[str, np.ndarray]
    elapsed_s: float


def read_request(path: str | Path | None, params: str | None = None) -> RequestFile:
    """The request in a file, in `params` (JSON text, merged over the file, object by object), or in both.

    Raises ConfigError naming the file, the tensor, what was found and what was wanted.
    """
    where = str(path) if path is not None else "--params"
    merged: dict[str, Any] = {}
    for source, text in ((where, _read(path)), ("--params", params)):
        if text is not None:
            merged = _merge(merged, _checked(_parse(text, source), source))
    if not merged.get("request"):
        raise ConfigError(f'{where} has no "request"; wanted a list of {{"name", "data", "dtype"}}')
    config = merged.get("config", {})
    protocol = config.get("protocol", "http")
    if protocol not in _PORTS:
        raise ConfigError(f"{where}: config.protocol is {protocol!r}; wanted http or grpc")
    if config.get("stream_api") and protocol != "grpc":
        raise ConfigError(f"{where}: config.stream_api needs config.protocol grpc; found {protocol}")
    return RequestFile(
        protocol=protocol,
        url=_address(config.get("url", "localhost"), protocol, where),
        model_name=config.get("model_name", "fastertransformer"),
        verbose=bool(config.get("verbose", False)),
        stream_api=bool(config.get("stream_api", False)),
        tensors=dict(_tensor(entry, where) for entry in merged["request"]),
    )


def _checked(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `value` after checking the types of its parts; ConfigError for the first wrong one."""
    config, request = value.get("config", {}), value.get("request", [])
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: config is {_short(config)}; wanted an object")
    for key in ("protocol", "url", "model_name"):
        if not isinstance(config.get(key, ""), str):
            raise ConfigError(f"{where}: config.{key} is {_short(config[key])}; wanted a text")
    if not isinstance(request, list):
        raise ConfigError(f"{where}: request is {_short(request)}; wanted a list of tensors")
    for entry in request:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            wanted = 'an object with "name", a text'
            raise ConfigError(f"{where}: request holds {_short(entry)}; wanted {wanted}")
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _address(url: str, protocol: str, where: str) -> str:
    """host:port without the scheme; the port is Triton's by default."""
    scheme, separator, rest = url.strip().rpartition("://")
    if separator and scheme.lower() != protocol:
        raise ConfigError(f"{where}: config.url is {url}; wanted host:port of the server's {protocol}")
    rest = rest.rstrip("/")
    if ":" not in rest:
        rest = f"{rest}:{_PORTS[protocol]}"
    host, _, port = rest.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{where}: config.url is {url!r}; wanted host:port")
    return rest


def send_request(request: RequestFile, timeout_s: float | None = None) -> Iterator[Answer]:
    """Yield the responses to a request: one, or those of a stream. timeout_s: longest wait for a response.

    Raises EngineDownError if no server answers, TridecodeError with the server's text for any other failure.
    """
    try:
        yield from (_stream if request.stream_api else _infer)(request, timeout_s)
    except InferenceServerException as error:
        if _is_unreachable(error):
            raise _no_server(request, error.message()) from None
        text = with_advice(error.message() or "")
        raise TridecodeError(f"{request.model_name} at {request.url}: {text}") from None
    except TimeoutError:
        patience = f"{timeout_s or _HTTP_TIMEOUT_S:g} s"
        raise EngineDownError(f"{request.url} has not answered within {patience}") from None
    except (OSError, ValueError) as error:  # errors of the HTTP client's sockets and parser
        raise _no_server(request, str(error)) from None


def _is_unreachable(error: InferenceServerException) -> bool:
    return any(part in (error.message() or "") for part in NO_SERVER)


def _no_server(request: RequestFile, reason: str) -> EngineDownError:
    found = f"no Triton server answers at {request.url} over {request.protocol} ({plain_reason(reason)})"
    return EngineDownError(f"{found}; start one, or name its address in config.url")


def show(answer: Answer, console: Console) -> None:
    """Print every output with its shape and dtype."""
    console.print(f"[bold]{answer.elapsed_s * 1000:.1f} ms[/]", highlight=False)
    for name, value in answer.outputs.items():
        console.print(f"  {name} {list(value.shape)} {value.dtype}", highlight=False, markup=False)
        console.print(_readable(value), highlight=False, markup=False)


def show_streamed(answer: Answer, console: Console) -> None:
    """Print one line per response of FasterTransformer's stream: time, cumulative probability, tokens of the
    first sequence. Of another model's response, print every output.
    """
    outputs = answer.outputs
    if not {"output_ids", "sequence_length"} <= set(outputs):
        show(answer, console)
        return
    length = int(outputs["sequence_length"].reshape(-1)[0])
    tokens = outputs["output_ids"].reshape(-1, outputs["output_ids"].shape[-1])[0, :length].tolist()
    likely = ""
    if "cum_log_probs" in outputs:
        likely = f"  probability {np.exp(float(outputs['cum_log_probs'].reshape(-1)[0])):.4g}"
    line = f"{answer.elapsed_s:8.3f} s{likely}  {length} tokens {tokens}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _readable(value: np.ndarray) -> str:
    if value.dtype == object:
        texts = [
            item.decode("utf-8", errors="replace") if isinstance(item, bytes) else str(item)
            for item in value.reshape(-1)
        ]
        return "\n".join(f"  {text!r}" for text in texts)
    return "  " + np.array2string(value, threshold=4096, separator=", ", prefix="  ")


def _read(path: str | Path | None) -> str | None:
    if path is None:
        return None
    try:
        if not Path(path).is_file():
            raise ConfigError(f"{path} cannot be read (not a file); wanted a JSON request file")
        size = Path(path).stat().st_size
        if size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} holds {size:,} bytes; a request file has at most {_MAX_FILE_BYTES:,}")
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); wanted a JSON request file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply; wanted a request file") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{where} holds a {type(value).__name__}; wanted an object with "request"')
    return value


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` takes precedence; objects are merged by key, lists of named tensors by name."""
    merged = dict(base)
    for key, value in over.items():
        held = merged.get(key)
        if isinstance(held, dict) and isinstance(value, dict):
            merged[key] = _merge(held, value)
        elif key == "request" and isinstance(held, list) and isinstance(value, list):
            named = {entry.get("name"): entry for entry in held}
            for entry in value:
                named[entry.get("name")] = {**named.get(entry.get("name"), {}), **entry}
            merged[key] = list(named.values())
        else:
            merged[key] = value
    return merged


def _tensor(entry: Mapping[str, Any], where: str) -> tuple[str, np.ndarray]:
    missing = [key for key in ("name", "data", "dtype") if key not in entry]
    if missing:
        raise ConfigError(f"{where}: tensor {entry.get('name', '?')} has no {missing[0]}")
    name, dtype = entry["name"], str(entry["dtype"]).removeprefix("np.").removeprefix("numpy.")
    try:
        if dtype in _TEXT_DTYPES:
            return name, _texts(entry["data"])
        array = np.array(entry["data"], dtype=np.dtype(dtype))
        if np_to_triton_dtype(array.dtype) in (None, "BYTES"):
            raise TypeError("Triton has no such type")
        return name, array
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: tensor {name}: data does not fit dtype {dtype}: {error}") from None


def _texts(data: Any) -> np.ndarray:
    found = np.array(data, dtype=object)
    if any(isinstance(item, (list, dict)) for item in found.reshape(-1)):
        raise ValueError("its lists have different lengths, or hold objects")
    encoded = [str(item).encode() for item in found.reshape(-1)]
    return np.array(encoded, dtype=object).reshape(found.shape)


def _inputs(request: RequestFile, make: Callable) -> list:
    inputs = []
    for name, value in request.tensors.items():
        tensor = make(name, list(value.shape), np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


def _infer(request: RequestFile, timeout_s: float | None) -> Iterator[Answer]:
    started = time.perf_counter()
    if request.protocol == "grpc":
        with grpc_client.InferenceServerClient(request.url, verbose=request.verbose) as client:
            inputs = _inputs(request, grpc_client.InferInput)
            result = client.infer(request.model_name, inputs, client_timeout=timeout_s)
        names = [output.name for output in result.get_response().outputs]
    else:
        import tritonclient.http as http_client  # it imports gevent, which gRPC does not need

        patience = timeout_s or _HTTP_TIMEOUT_S
        # the client prints a response that it cannot parse before it raises
        quiet = nullcontext() if request.verbose else redirect_stdout(io.StringIO())
        with (
            quiet,
            http_client.InferenceServerClient(
                request.url, verbose=request.verbose, network_timeout=patience
            ) as client,
        ):
            try:
                result = client.infer(request.model_name, _inputs(request, http_client.InferInput))
            except HTTPException as error:
                raise ValueError(f"no HTTP: {error}") from None
        names = [output["name"] for output in result.get_response().get("outputs", ())]
    elapsed = time.perf_counter() - started
    yield Answer({name: result.as_numpy(name) for name in names}, elapsed)


def _stream(request: RequestFile, timeout_s: float | None) -> Iterator[Answer]:
    inputs = _inputs(request, grpc_client.InferInput)
    with grpc_client.InferenceServerClient(request.url, verbose=request.verbose) as client:
        started = time.perf_counter()
        for result in stream_results(client, request.model_name, inputs, timeout_s):
            outputs = {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
            yield Answer(outputs, time.perf_counter() - started)
