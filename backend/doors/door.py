"""Shared parts of the doors: life cycle, acceptance of requests, output tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tridecode.backend.base import log_format
from tridecode.backend.base.errors import EngineDownError, RequestError, TridecodeError
from tridecode.backend.doors import huge_shapes
from tridecode.backend.doors.answers import text_tensors
from tridecode.backend.doors.answers.door_cores import share_cores
from tridecode.backend.doors.answers.senders import Senders
from tridecode.backend.doors.answers.stream import Stream
from tridecode.backend.doors.contracts.field import Contract
from tridecode.backend.doors.contracts.inputs import Inputs, check_parameters
from tridecode.backend.doors.door_settings import DoorSettings, door_tokenizer, read_settings
from tridecode.backend.doors.monitoring.door_metrics import DoorMetrics
from tridecode.backend.doors.monitoring.request_lines import line_of
from tridecode.backend.doors.monitoring.request_times import GapCounts, RequestTimes
from tridecode.backend.doors.requests.envelope import (
    Envelope,
    envelope_of,
    read_label,
    read_parameters,
    read_timeout_s,
)
from tridecode.backend.doors.siblings import streaming_sibling
from tridecode.backend.doors.triton_owner import TritonOwner
from tridecode.backend.service.engine_link import EngineLink
from tridecode.backend.service.engine_service import EngineService, Submission
from tridecode.backend.service.error_texts import internal_error, public_text, with_label
from tridecode.backend.service.limits import check_label
from tridecode.backend.service.monitoring.request_log import RequestLog
from tridecode.backend.service.preparation import Preparation
from tridecode.backend.wire.messages import Limits
from tridecode.backend.wire.taken_requests import TakenRequests

_log = logging.getLogger("tridecode.door")
_DECOUPLED_WANTED = "model_transaction_policy { decoupled: true } in config.pbtxt would allow it"
#: the supervisor reports a failed start after start_timeout_s; a door waits slightly longer for that report
_START_MARGIN_S = 30.0
#: tensors that a request keeps for later responses
_MAX_REPEATED = 64
_TEXTS = text_tensors.TextTensors()


@dataclass(frozen=True)
class Received:
    """A request copied out of Triton's shared memory, so that the request object can be released."""

    inputs: Inputs
    parameters: Mapping[str, Any]
    outputs: Outputs
    timeout_s: float  # 0: not sent
    envelope: Envelope
    size: int  # bytes of its text and numeric inputs


class EngineDoor:
    """Base of the models whose requests go to the engine; a subclass adds `accept` and its contract."""

    contract: Contract
    known_parameters: tuple[str, ...] = ()  # request parameters that the door reads

    def initialize(self, args: Mapping[str, str]) -> None:
        """Called by Triton; return when the engine is ready, else raise TritonModelException."""
        huge_shapes.install()
        text_tensors.install()
        self.taken = TakenRequests()
        try:
            log_format.configure_door(args["model_instance_name"])
            self.settings = read_settings(args)
            self.prepare(self.settings)
            self._connect(args["model_instance_name"])
        except TridecodeError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def _connect(self, instance: str) -> None:
        settings = self.settings
        self._envelope: tuple[Limits, Envelope] | None = None
        self._streams_too: str | None = None
        number = settings.engine_number
        self.link = EngineLink(
            str(settings.engine_dir), instance, TritonOwner.of_this_stub(), settings.hold_s, number=number
        ).start()
        try:
            if settings.wait_for_engine:
                self.link.wait_ready(settings.start_timeout_s + _START_MARGIN_S)
        except TridecodeError:
            self.link.close()
            raise
        self.log = RequestLog(settings.name).start()
        self.senders = Senders(
            self.link, settings.num_senders, self._ended_request, settings.merge_behind_s, taken=self.taken
        ).start()
        self.metrics = DoorMetrics(
            settings.name,
            settings.engine_label(number),
            self.link,
            settings.engine_dir,
            self.senders.gaps,
        )
        self.preparation = Preparation(settings.max_preparing_requests, settings.max_preparing_bytes).start()
        self.engine = EngineService(self.link, self.preparation, settings.resume_within_s)
        self.connected()
        self.metrics.start()
        share_cores(settings.door_cores, instance, self.preparation.free)

    def prepare(self, settings: DoorSettings) -> None:
        """Load what the door needs besides the engine, such as a tokenizer."""

    def connected(self) -> None:
        """Create what depends on the engine, once self.engine is set."""

    def accept(self, received: Received, stream: Stream) -> None:
        """Set the stream's answer and submit the request. Raises TridecodeError if it cannot be served.

        Runs on a thread of the preparation. The stream may end during the call, which `submit` handles.
        """
        raise NotImplementedError

    def at_once(self, received: Received, stream: Stream) -> bool:
        """Serve a request that must not wait in the preparation queue; return False for any other request."""
        return False

    def execute(self, requests: Sequence[Any]) -> None:
        """Called by Triton; return at once. Other threads prepare and answer the requests."""
        for request in requests:
            stream = self.senders.open(request.get_response_sender())
            self._or_fail(stream, self._take, request, stream)
        self.taken.returned()

    def _take(self, request: Any, stream: Stream) -> None:
        received = self._receive(request, stream)
        if not self.at_once(received, stream):
            self.preparation.put(received.size, lambda: self._or_fail(stream, self._accept, received, stream))

    def _accept(self, received: Received, stream: Stream) -> None:
        if not stream.ended:
            self.accept(received, stream)

    @staticmethod
    def _or_fail(stream: Stream, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call`; an exception ends this stream only."""
        try:
            call(*arguments)
        except TridecodeError as error:
            stream.fail(error)
        except Exception as error:
            _log.exception("request %r: %s failed", stream.label, call.__name__)
            stream.fail(internal_error(error, stream.label))

    def _ended_request(self, stream: Stream, outcome: str) -> None:
        """Count and log a request that has ended. Runs on its sender thread."""
        times, answer = stream.times, stream.answer
        self.metrics.count(times, outcome, 0 if answer is None else answer.num_output_tokens)
        self.log.put(line_of(times, stream.label, outcome, answer, stream.sequences, stream.error))

    def finalize(self) -> None:
        """Called by Triton when the model is unloaded."""
        self.senders.close(EngineDownError("the model is being unloaded"))
        self.preparation.close()
        self.metrics.close()
        self.log.close()
        self.link.close()

    # ------------------------------------------------------------ for subclasses

    def limits(self) -> Limits:
        return self.engine.limits()

    def envelope(self) -> Envelope:
        limits = self.limits()
        if self._envelope is None or self._envelope[0] is not limits:
            self._envelope = limits, envelope_of(self.settings, limits)
        return self._envelope[1]

    def cannot_stream(self, flag: str) -> RequestError:
        """Return the error for a request that wants a stream from a model that is not decoupled.

        flag: its input.
        """
        if self._streams_too is None:  # read once: a flood of such requests must not read the files each time
            self._streams_too = streaming_sibling(self.settings.repository, self.settings.name)
        found = f"{flag} is true; this model cannot stream"
        if self._streams_too:
            return RequestError(f"{found}: send the request to model {self._streams_too}, which does")
        return RequestError(f"{found} ({_DECOUPLED_WANTED})")

    def submit(self, stream: Stream, submissions: Sequence[Submission], received: Received) -> None:
        """Submit the stream's requests to the engine; cancel them if the stream has ended meanwhile."""
        resume = received.inputs.flag("resume", True)
        self.engine.submit(stream, submissions, timeout_s=received.timeout_s, resume=resume)

    def _receive(self, request: Any, stream: Stream) -> Received:
        """Label the stream; return the request, checked against envelope and contract."""
        stream.label = read_label(request)
        parameters = read_parameters(request)
        allowed = (*self.settings.allowed_parameters, *self.known_parameters)
        check_parameters(parameters, self.contract, allowed)
        stream.label = stream.label or check_label(str(parameters.get("id", "")))
        envelope = self.envelope()
        inputs, size = _read_inputs(request, self.contract, envelope)
        return Received(
            inputs,
            parameters,
            Outputs(self.settings.outputs, request.requested_output_names()),
            read_timeout_s(request),
            envelope,
            size,
        )


class UnaryDoor:
    """Base of preprocessing and postprocessing: they load a tokenizer and send one response per request."""

    contract: Contract

    def initialize(self, args: Mapping[str, str]) -> None:
        huge_shapes.install()
        text_tensors.install()
        self.taken = TakenRequests()  # stays 0: execute() returns with the answers
        try:
            log_format.configure_door(args["model_instance_name"])
            self.settings = read_settings(args)
            self.envelope = envelope_of(self.settings)
            self.tokenizer, self.end_id = door_tokenizer(self.settings)
        except TridecodeError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self.log = RequestLog(self.settings.name).start()

    def execute(self, requests: Sequence[Any]) -> list:
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """Called by Triton when the model is unloaded."""
        self.log.close()

    def _respond(self, request: Any) -> Any:
        label, times = "", RequestTimes(GapCounts())
        try:
            label = read_label(request)
            check_parameters(read_parameters(request), self.contract, self.settings.allowed_parameters)
            inputs, _ = _read_inputs(request, self.contract, self.envelope)
            outputs = Outputs(self.settings.outputs, request.requested_output_names())
            return pb_utils.InferenceResponse(outputs.tensors(self.answer(inputs)))
        except TridecodeError as error:
            return self._refuse(error, label, times)
        except Exception as error:
            _log.exception("request %r: the door failed", label)
            return self._refuse(internal_error(error, label), label, times)

    def _refuse(self, error: TridecodeError, label: str, times: RequestTimes) -> Any:
        """Log and return a refusal. The generating model logs answers: both are steps of one ensemble."""
        self.log.put(line_of(times, label, error.code.lower(), None, 0, str(error)))
        return refusal(error, label)

    def answer(self, inputs: Inputs) -> dict[str, Any]:
        raise NotImplementedError


def _read_inputs(request: Any, contract: Contract, envelope: Envelope) -> tuple[Inputs, int]:
    """Return a checked copy of the input tensors, and the bytes of their texts and numbers."""
    arrays = {}
    for tensor in request.inputs():
        name, array = tensor.name(), tensor.as_numpy()
        huge_shapes.check(name, tensor, array)
        arrays[name] = array
    text_bytes = envelope.check(arrays, contract)
    inputs = Inputs(arrays, contract)
    return inputs, text_bytes + sum(array.nbytes for array in inputs.arrays.values())


def refusal(error: TridecodeError, label: str = "") -> Any:
    """Return the error response for a client, without directories of this server. label: its request id."""
    code = getattr(pb_utils.TritonError, error.code)
    text = public_text(with_label(str(error), label))
    return pb_utils.InferenceResponse([], error=pb_utils.TritonError(text, code))


class Outputs:
    """Creates the output tensors that the model declares and the request names, in the declared types.

    Each request has one instance, used only by its sender thread.
    """

    def __init__(self, declared: Mapping[str, Any], requested: Sequence[str]):
        self._types = {n: t for n, t in declared.items() if not requested or n in requested}
        self._made: dict[tuple[str, Hashable], Any] = {}
        self._shared: dict[Hashable, list] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._types

    def tensors(self, arrays: Mapping[str, Any]) -> list:
        return [
            pb_utils.Tensor(name, np.array(array, dtype=self._types[name]))
            for name, array in arrays.items()
            if name in self._types
        ]

    def text(self, name: str, text: bytes) -> list:
        """Return the tensor of a text, (1,); later responses of the same sender thread may share it."""
        if name not in self._types:
            return []
        return [_TEXTS.tensor(name, text, lambda: self.tensors({name: [text]})[0])]

    def repeated(self, arrays: Mapping[str, Hashable]) -> list:
        """Return tensors that several responses share, each created at the first use of its value and kept
        until it is evicted by other values.

        arrays: name -> nested tuples of numbers. Creating a tensor takes tens of microseconds with the GIL
        held; sending an existing one needs no new shared memory.
        """
        made, found = self._made, []
        for item in arrays.items():
            if item[0] in self._types:
                tensor = made.get(item)
                if tensor is None:
                    if len(made) >= _MAX_REPEATED:
                        made.clear()
                    tensor = made[item] = self.tensors(dict([item]))[0]
                found.append(tensor)
        return found

    def shared(self, key: Hashable, arrays: Callable[[], Mapping[str, Hashable]]) -> list:
        """Return the tensors of `arrays()`, which is called only if the responses of this key are new.

        Looking up one key takes a fraction of the time of making nested tuples and looking up each of them.
        """
        found = self._shared.get(key)
        if found is None:
            if len(self._shared) >= _MAX_REPEATED:
                self._shared.clear()
            found = self._shared[key] = self.repeated(arrays())
        return found
