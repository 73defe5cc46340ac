"""The link to the engine behind one Triton server.

A request is a gRPC stream of its own, so that it can be cancelled alone and ends with a status. A server that
is lost before the first token is replaced by another one; after it, the request ends with an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec
import numpy as np
from tritonclient.grpc.aio import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from tridecode.backend.base.errors import EngineDownError, UnsupportedError
from tridecode.backend.front.triton.watch import EVENTS, PARAMS, HostWatch, SameModel
from tridecode.backend.service.link import Sink
from tridecode.backend.wire import messages as m

#: the server reports an error as the stream's status, instead of a text without a code
_HEADERS = {"triton_grpc_error": "true"}
_ID_BYTES = 4
_MICROSECONDS = 1e6
#: status -> code of an event; others may mean that the server is gone
_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_ARG",
    grpc.StatusCode.UNIMPLEMENTED: "UNSUPPORTED",
    grpc.StatusCode.CANCELLED: "CANCELLED",
}

_log = logging.getLogger("tridecode.front")


@dataclass
class _Call:
    """A request. arrays: a row for each of its prompts. open: sequences that have not ended. began: at least
    one event has been delivered."""

    arrays: dict[str, np.ndarray]
    label: str
    timeout_s: float
    sink: Sink
    open: set[int]
    began: bool = False
    task: asyncio.Task[None] | None = None
    started_at: float = field(default_factory=time.monotonic)

    def fail(self, finish: str, text: str, code: str) -> None:
        for sequence in sorted(self.open)[:1]:
            self.open.clear()
            self.sink(m.Event(0, sequence, finish=finish, error=text, code=code))


class TritonLink:
    """A Link; its thread is the event loop's. others: the links of all servers, this one included."""

    def __init__(
        self,
        host: str,
        same: SameModel,
        others: Sequence[TritonLink] = (),
        tls: Mapping[str, Any] | None = None,
    ):
        """tls: options of InferenceServerClient; None: without. Call it in the event loop."""
        self.host, self._others = host, others
        self._loop = asyncio.get_running_loop()
        self.client = InferenceServerClient(host, **(tls or {}))
        self.watch = HostWatch(host, self.client, same, self._fail_all)
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._watching = self._loop.create_task(self.watch.run())

    # ------------------------------------------------------------ any thread

    def reserve(self) -> int:
        return next(self._ids)

    def submit(
        self,
        request: int,
        sequences: list[m.SequenceRequest],
        sink: Sink,
        *,
        priority: int = 0,
        timeout_s: float = 0.0,
        label: str = "",
        session: m.SessionRound | None = None,
        history: list[list[int]] | None = None,
        resume_within_s: float = 0.0,
    ) -> None:
        """resume_within_s: above 0: the server's engine may be replaced while the request runs."""
        if session is not None or any(sequence.learned is not None for sequence in sequences):
            raise UnsupportedError("sessions and learned prompts do not pass through Triton")
        count = sum(sequence.params.num_sequences for sequence in sequences)
        arrays = _arrays(sequences, priority, resume_within_s > 0)
        self._call(self._begin, request, _Call(arrays, label, timeout_s, sink, set(range(count))))

    def cancel(self, request: int) -> None:
        self._call(self._cancel, request)

    def limits(self) -> m.Limits | None:
        return self.watch.limits

    def state(self) -> m.EngineState:
        return self.watch.state

    def beat(self) -> m.EngineBeat | None:
        """None: Triton passes no heartbeats on."""
        return None

    def close(self) -> None:
        self._call(self._close)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody waits for an answer any more
            pass

    # ------------------------------------------------------------ the event loop

    def _begin(self, number: int, call: _Call) -> None:
        self._calls[number] = call
        call.task = self._loop.create_task(self._run(number, call))

    def _cancel(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            call.open.clear()
            if call.task is not None:
                call.task.cancel()

    def _close(self) -> None:
        self._watching.cancel()
        self._fail_all("the service stops")

    def _fail_all(self, text: str) -> None:
        for number, call in list(self._calls.items()):
            call.fail("error", text, EngineDownError.code)
            self._cancel(number)

    async def _run(self, number: int, call: _Call) -> None:
        try:
            for link in (self, *(other for other in self._others if other is not self)):
                if await link.serve(call):
                    break
            else:
                state = self.state()
                call.fail("error", f"no server is ready ({state.detail})", EngineDownError.code)
        except Exception as error:
            _log.exception("request %r failed", call.label)
            call.fail("error", f"the front failed: {type(error).__name__}", "INTERNAL")
        finally:
            self._calls.pop(number, None)

    async def serve(self, call: _Call) -> bool:
        """Have this server answer a request. False: the server is lost, and nothing has been delivered."""
        if not self.watch.ready:
            return False
        stream = self.client.stream_infer(self._request(call), headers=_HEADERS)
        try:
            async for result, error in stream:
                if error is not None:
                    raise error
                self._deliver(call, result)
            if call.open:
                call.fail("error", f"{self.host} ended the stream before the answer was complete", "INTERNAL")
        except (grpc.RpcError, InferenceServerException) as error:
            return await self._failed(call, error)
        finally:
            stream.cancel()
        return True

    async def _request(self, call: _Call) -> AsyncIterator[dict[str, Any]]:
        """Yield the arguments of the only request of a stream."""
        inputs = []
        for name, array in call.arrays.items():
            kind = self.watch.types[name]
            inputs.append(InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array.astype(triton_to_np_dtype(kind)))
        timeout = round(call.timeout_s * _MICROSECONDS) if call.timeout_s else None
        yield {
            "model_name": self.watch.model,
            "inputs": inputs,
            "request_id": call.label,
            "timeout": timeout,
        }

    def _deliver(self, call: _Call, result: Any) -> None:
        found = result.as_numpy(EVENTS)
        if found is None:
            return
        for data in found.reshape(-1).tolist():
            event = m.decode(data, m.Event)
            if event.sequence not in call.open:
                continue
            call.began = True
            if event.finish:
                call.open.discard(event.sequence)
            call.sink(event)

    async def _failed(self, call: _Call, error: Exception) -> bool:
        """End the request with the server's error, or return False: see `serve`."""
        status, text = _status(error)
        text = text.removesuffix(f" (request {call.label!r})")
        code = _CODES.get(status, "")
        if not code:
            await self.watch.look()  # is it the request, the engine, or the server?
            if not self.watch.ready:
                if not call.began:
                    return False
                call.fail("error", f"{self.host} is lost: {text}", EngineDownError.code)
            else:
                code = "UNAVAILABLE" if status == grpc.StatusCode.UNAVAILABLE else "INTERNAL"
        if code:
            call.fail("deadline" if code == "CANCELLED" and self._is_late(call) else "error", text, code)
        return True

    def _is_late(self, call: _Call) -> bool:
        """Return whether the deadline can be the reason why the server cancelled the request."""
        limits = self.limits()
        timeout_s = call.timeout_s or (limits.request_timeout_s if limits else 0.0)
        return bool(timeout_s) and time.monotonic() - call.started_at >= timeout_s


def _status(error: Exception) -> tuple[grpc.StatusCode, str]:
    if isinstance(error, InferenceServerException):
        return grpc.StatusCode.UNKNOWN, error.message()
    assert isinstance(error, grpc.aio.AioRpcError)
    return error.code(), error.details() or error.code().name


def _arrays(sequences: Sequence[m.SequenceRequest], priority: int, resume: bool) -> dict[str, np.ndarray]:
    """Return the input tensors of a request: a row for each sequence."""
    prompts = [np.frombuffer(sequence.prompt, "<i4") for sequence in sequences]
    ids = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    arrays = {
        "input_ids": ids,
        "input_lengths": _column([len(prompt) for prompt in prompts]),
        "request_output_len": _column([one.params.max_tokens for one in sequences]),
        PARAMS: _column([_params(one) for one in sequences], np.object_),
        "resume": _column([resume] * len(sequences), np.bool_),
    }
    if priority:
        arrays["priority"] = _column([priority] * len(sequences))
    if any(sequence.lora_name for sequence in sequences):
        arrays["lora_name"] = _column([one.lora_name.encode() for one in sequences], np.object_)
    return arrays


def _params(sequence: m.SequenceRequest) -> bytes:
    """Return the sampling parameters and the structured output as one JSON object."""
    if sequence.structured_output is None:
        return msgspec.json.encode(sequence.params)
    values = msgspec.to_builtins(sequence.params)
    values["structured_output"] = msgspec.to_builtins(sequence.structured_output)
    return msgspec.json.encode(values)


def _column(values: Sequence[Any], dtype: type = np.int32) -> np.ndarray:
    return np.array(values, dtype).reshape(-1, 1)
