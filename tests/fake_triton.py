"""A fake of triton_python_backend_utils with the behaviour of Triton 2.51.

`install()` puts it into sys.modules before a door is imported. A response sender refuses to send after FINAL.
Sent responses are kept as copies, so that a door that reuses arrays is noticed; a tensor that is sent again
is the first copy of it. `ask()` runs one request through a door and waits for its end.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

_TYPES = {  # the whole of Triton's own table
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}


def install() -> None:
    sys.modules["triton_python_backend_utils"] = sys.modules[__name__]


class TritonModelException(Exception):
    pass


class TritonError(Exception):
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG = 0, 1, 2, 3
    UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = 4, 5, 6, 7

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"tensor {name} was given a {type(array).__name__}; wanted a numpy array")
        if array.dtype.type not in _TYPES.values():
            raise TypeError(f"tensor {name} has dtype {array.dtype}, which Triton does not know")
        self._name, self._array = name, array
        self._shared: np.ndarray | None = None

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    def sent(self) -> np.ndarray:
        """The copy in shared memory, made once. Not part of Triton's interface."""
        if self._shared is None:
            self._shared = self._array.copy()
        return self._shared


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None):
        self._tensors, self._error = list(output_tensors or []), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


@dataclass
class Sent:
    """One response as a client would get it."""

    outputs: dict[str, np.ndarray]
    error: TritonError | None
    final: bool
    at: float = field(default_factory=time.monotonic)


class ResponseSender:
    #: uses that crash the real server, which frees a request's factory with FINAL
    crashes: list[str] = []

    def __init__(self, request: InferenceRequest):
        self._request = request
        self._closed = threading.Event()
        self._asked = 0  # is_cancelled() calls in progress
        self.sent: list[Sent] = []
        self.before_send: Callable[[], None] = lambda: None

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(f"flags is {flags}; wanted 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL")
        if self._closed.is_set():
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is None and not flags:
            raise TritonModelException("a response must be provided when the flags are zero")
        self.before_send()
        if flags and self._asked:
            ResponseSender.crashes.append("FINAL was sent during is_cancelled()")
        if response is not None:
            outputs = {t.name(): t.sent().copy() for t in response.output_tensors()}
            self.sent.append(Sent(outputs, response.error(), bool(flags)))
        if flags:
            self._closed.set()

    def is_cancelled(self) -> bool:
        if self._closed.is_set():
            ResponseSender.crashes.append("is_cancelled() was called after FINAL")
        self._asked += 1
        time.sleep(5e-5)  # a round trip to the server
        self._asked -= 1
        return self._request.is_cancelled()

    def wait(self, timeout_s: float) -> bool:
        return self._closed.wait(timeout_s)


class InferenceRequest:
    def __init__(
        self,
        inputs: dict[str, np.ndarray],
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        requested_output_names: list[str] | None = None,
        timeout_us: int = 0,
        correlation_id: int | str = 0,
        flags: int = 0,
    ):
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self._request_id, self._parameters, self._timeout_us = request_id, parameters or {}, timeout_us
        self._correlation_id, self._flags = correlation_id, flags
        self.outputs = requested_output_names
        self._cancelled = False
        self.sender = ResponseSender(self)

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def requested_output_names(self) -> list[str]:
        return list(self.outputs or [])

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def timeout(self) -> int:
        return self._timeout_us

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def is_cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """The client's part; not part of Triton's interface."""
        self._cancelled = True


class Logger:
    """Keeps log lines as (level, text)."""

    lines: list[tuple[str, str]] = []

    @classmethod
    def log_info(cls, text: str) -> None:
        cls.lines.append(("info", text))

    @classmethod
    def log_warn(cls, text: str) -> None:
        cls.lines.append(("warn", text))

    @classmethod
    def log_error(cls, text: str) -> None:
        cls.lines.append(("error", text))


class Metric:
    """A metric; as in Triton 2.51, each kind refuses the operations of the others."""

    def __init__(self, kind: int, labels: dict[str, str], bounds: list[float]):
        self._kind, self.labels, self.number = kind, labels, 0.0
        self.bounds, self.values = bounds, []

    def increment(self, value: float) -> None:
        self._only(MetricFamily.COUNTER, MetricFamily.GAUGE)
        assert value >= 0
        self.number += value

    def set(self, value: float) -> None:
        self._only(MetricFamily.GAUGE)
        self.number = value

    def observe(self, value: float) -> None:
        self._only(MetricFamily.HISTOGRAM)
        self.values.append(value)

    def value(self) -> float:
        self._only(MetricFamily.COUNTER, MetricFamily.GAUGE)
        return self.number

    def _only(self, *kinds: int) -> None:
        if self._kind not in kinds:
            raise TritonModelException(f"kind {self._kind} does not support this")


class MetricFamily:
    """The registry is the server's: all doors share it, and families of one name are merged."""

    COUNTER, GAUGE, HISTOGRAM = 0, 1, 2
    registry: dict[str, MetricFamily] = {}

    def __init__(self, name: str, description: str, kind: int):
        self.name, self.description, self.kind = name, description, kind
        earlier = MetricFamily.registry.setdefault(name, self)
        if earlier.kind != kind:
            raise TritonModelException("Family name already exists with different type")
        self.metrics: dict[tuple, Metric] = getattr(earlier, "metrics", {})

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:
        key = tuple(sorted((labels or {}).items()))
        return self.metrics.setdefault(key, Metric(self.kind, labels or {}, buckets or []))


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def get_output_config_by_name(model_config: dict, name: str) -> dict | None:
    return next((output for output in model_config.get("output", []) if output["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(name: str) -> type:
    return _TYPES[name]


# ---------------------------------------------------------------- what tests use


def model_config(
    name: str,
    inputs: dict[str, str],
    outputs: dict[str, str],
    parameters: dict[str, str] | None = None,
    decoupled: bool = False,
    max_batch_size: int = 64,
    **more,
) -> dict:
    """A model configuration as a stub receives it. inputs, outputs: name -> "TYPE_FP32"."""
    return {
        "name": name,
        "max_batch_size": max_batch_size,
        "model_transaction_policy": {"decoupled": decoupled},
        "input": [{"name": n, "data_type": t, "dims": ["-1"]} for n, t in inputs.items()],
        "output": [{"name": n, "data_type": t, "dims": ["-1"]} for n, t in outputs.items()],
        "parameters": {key: {"string_value": value} for key, value in (parameters or {}).items()},
        **more,
    }


def initialize_arguments(config: dict, repository: str = "/nowhere") -> dict[str, str]:
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": "CPU",
        "model_instance_name": config["name"] + "_0_0",
        "model_instance_device_id": "0",
        "model_repository": f"{repository}/{config['name']}",
        "model_version": "1",
        "model_name": config["name"],
    }


def ask(door: Any, request: InferenceRequest, timeout_s: float = 60.0) -> list[Sent]:
    """Run one request through the door until its end; returns the responses in order."""
    answer = door.execute([request])
    if answer is not None and answer[0] is not None:
        request.sender.send(answer[0], TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    assert request.sender.wait(timeout_s), f"the request did not end within {timeout_s} s"
    return request.sender.sent
