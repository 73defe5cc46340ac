"""What doors share: life cycle, acceptance of requests, making of output tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tridecode.backend.doors.door_metrics import DoorMetrics
from tridecode.backend.doors.engine_link import EngineLink
from tridecode.backend.doors.fields import Field, Inputs, check_parameters
from tridecode.backend.doors.senders import Senders, Stream
from tridecode.backend.doors.settings import DoorSettings, end_token_id, load_tokenizer, read_settings
from tridecode.backend.errors import EngineDownError, RequestError, TridecodeError
from tridecode.backend.messages import Limits

_log = logging.getLogger("tridecode.door")
#: the supervisor gives up after start_timeout_s and says why; a door waits a little longer to hear it
_START_MARGIN_S = 30.0


class EngineDoor:
    """A TritonPythonModel whose requests go to the engine; a subclass adds `accept` and a table."""

    table: Sequence[Field] = ()

    def initialize(self, args: Mapping[str, str]) -> None:
        """Called by Triton; returns when the engine is ready, TritonModelException with the reason if not."""
        try:
            self.settings = read_settings(args)
            self.prepare(self.settings)
            self._connect(args["model_instance_name"])
        except TridecodeError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def _connect(self, instance: str) -> None:
        settings = self.settings
        self.link = EngineLink(str(settings.engine_dir), instance, settings.hold_s).start()
        try:
            if settings.wait_for_engine:
                self.link.wait_ready(settings.start_timeout_s + _START_MARGIN_S)
        except TridecodeError:
            self.link.close()
            raise
        self.metrics = DoorMetrics(settings.name, settings.engine_dir.name, self.link)
        self.senders = Senders(
            self.link, settings.num_senders, self.metrics.count, settings.merge_behind_s
        ).start()
        self.metrics.start()

    def prepare(self, settings: DoorSettings) -> None:
        """Load what the door needs beside the engine."""

    def accept(self, request: Any, stream: Stream) -> None:
        """Parse the request, give the stream its answer and submit; TridecodeError if it cannot be served."""
        raise NotImplementedError

    def execute(self, requests: Sequence[Any]) -> None:
        """Called by Triton; returns at once, the senders answer."""
        for request in requests:
            stream = self.senders.open(request.get_response_sender(), request.request_id())
            try:
                self.accept(request, stream)
            except TridecodeError as error:
                stream.fail(error)
            except Exception as error:
                _log.exception("request %s: the door could not parse it", stream.label)
                stream.fail(TridecodeError(f"the door failed: {type(error).__name__}: {error}"))

    def finalize(self) -> None:
        """Called by Triton when the model is unloaded."""
        self.senders.close(EngineDownError("the model is being unloaded"))
        self.metrics.close()
        self.link.close()

    # ------------------------------------------------------------ for subclasses

    def limits(self) -> Limits:
        limits = self.link.limits()
        if limits is None:
            state = self.link.state()
            raise EngineDownError(f"the engine is not ready ({state.phase}): {state.detail}")
        return limits

    def read(self, request: Any, stream: Stream) -> tuple[Inputs, dict[str, Any]]:
        """Inputs and parameters of the request, checked by the door's table; labels the stream."""
        parameters = check_parameters(request.parameters(), self.table, self.settings.allowed_parameters)
        stream.label = stream.label or str(parameters.get("id", ""))
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        return Inputs(arrays, self.table), parameters

    def schedule(self, request: Any, inputs: Inputs, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Priority and deadline of a request, as EngineLink.submit takes them.

        Triton tells a model a request's time-out but not its priority: that is an input or a parameter.
        """
        priority = inputs.rows("priority", 1, parameters.get("priority", 0))[0]
        try:
            priority = int(priority)
        except (TypeError, ValueError):
            raise RequestError(
                f"priority is {priority!r}; wanted a whole number, smaller is sooner"
            ) from None
        return {
            "priority": priority,
            "timeout_s": max(0, request.timeout()) / 1e6,
        }


class UnaryDoor:
    """Base of the two unary models around the engine: tokenizer in initialize(), one response a request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        try:
            self.settings = read_settings(args)
            self.tokenizer = load_tokenizer(self.settings)
            self.end_id = end_token_id(self.settings, self.tokenizer)
        except TridecodeError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: Sequence[Any]) -> list:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            outputs = Outputs(self.settings.outputs, request.requested_output_names())
            return pb_utils.InferenceResponse(outputs.tensors(self.answer(arrays, request.parameters())))
        except TridecodeError as error:
            code = getattr(pb_utils.TritonError, error.code)
            return pb_utils.InferenceResponse([], error=pb_utils.TritonError(str(error), code))
        except Exception as error:
            _log.exception("request %s: the door failed", request.request_id())
            return pb_utils.InferenceResponse([], error=pb_utils.TritonError(f"the door failed: {error!r}"))

    def answer(self, arrays: Mapping[str, np.ndarray], parameters: str) -> dict[str, Any]:
        raise NotImplementedError


class Outputs:
    """Makes the output tensors that the model declares and this request wants, in the declared types."""

    def __init__(self, declared: Mapping[str, Any], requested: Sequence[str]):
        self._types = {n: t for n, t in declared.items() if not requested or n in requested}

    def __contains__(self, name: str) -> bool:
        return name in self._types

    def tensors(self, arrays: Mapping[str, Any]) -> list:
        return [
            pb_utils.Tensor(name, np.array(array, dtype=self._types[name]))
            for name, array in arrays.items()
            if name in self._types
        ]
