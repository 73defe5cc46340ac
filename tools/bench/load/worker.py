"""One process of the load generator: sends requests over gRPC streams and records when tokens arrive.

Each stream carries one request after another, as a client's would. Statistics are computed after the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

clock: Callable[[], float] = time.monotonic  # the same for all processes of a machine
Prompt = str | np.ndarray  # a text, or int32 token ids

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # or all channels of a process would share one connection
]
_STREAMS_PER_CHANNEL = 32


@dataclass(frozen=True)
class LoadSpec:
    """The requests of one run.

    tokens_in: prompts are token ids for FasterTransformer's streaming model, else texts for a text model.
    concurrency: requests in flight (closed loop). request_rate: requests per second, Poisson arrivals
    independent of the requests in flight (open loop). forced_length: the end token is suppressed before
    output_tokens. timeout_s: limit of one request. connect_s: limit until the server accepts connections.
    start_within_s: the last request is sent within this time after the first. whole_type: Triton's type of
    max_tokens.
    """

    url: str
    model: str
    prompts: list[Prompt]
    output_tokens: int
    num_requests: int
    concurrency: int = 1
    request_rate: float | None = None
    tokens_in: bool = False
    forced_length: bool = True
    processes: int = 1
    timeout_s: float = 600.0
    connect_s: float = 30.0
    start_within_s: float = float("inf")
    whole_type: str = "INT32"
    seed: int = 0


@dataclass
class Record:
    """One request. Times in seconds of `clock`; responses: (arrival, tokens) of each that has tokens."""

    index: int
    sent: float
    ended: float = 0.0
    responses: list[tuple[float, int]] = field(default_factory=list)
    counted: bool = True  # False: the server sent no counts; each response counts as one token
    error: str = ""


def make_request(spec: LoadSpec, index: int) -> service_pb2.ModelInferRequest:
    """Return the request for prompt `index` (prompts are used in rotation)."""
    prompt = spec.prompts[index % len(spec.prompts)]
    request = service_pb2.ModelInferRequest(model_name=spec.model, id=str(index))
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if spec.tokens_in:
        assert isinstance(prompt, np.ndarray)
        _add(request, "input_ids", "UINT32", prompt.astype(np.uint32))
        _add(request, "input_lengths", "UINT32", np.array([len(prompt)], np.uint32))
        _add(request, "request_output_len", "UINT32", np.array([spec.output_tokens], np.uint32))
        if spec.forced_length:
            _add(request, "min_length", "UINT32", np.array([spec.output_tokens], np.uint32))
        return request
    assert isinstance(prompt, str)
    data = prompt.encode()
    _add(request, "text_input", "BYTES", len(data).to_bytes(4, "little") + data)
    _add(request, "max_tokens", spec.whole_type, np.array([spec.output_tokens], np.int32))
    if spec.forced_length:
        _add(request, "min_tokens", "INT32", np.array([spec.output_tokens], np.int32))
    for flag in ("stream", "exclude_input_in_output", "return_num_output_tokens"):
        _add(request, flag, "BOOL", np.array([True]))
    return request


def _add(request: service_pb2.ModelInferRequest, name: str, datatype: str, value: np.ndarray | bytes) -> None:
    columns = 1 if isinstance(value, bytes) else len(value)
    request.inputs.add(name=name, datatype=datatype, shape=[1, columns])
    request.raw_input_contents.append(value if isinstance(value, bytes) else value.tobytes())


class _TokenCount:
    """New tokens of each response of one request. counted: False once a response had no count.

    num_output_tokens of a text model counts one response; FasterTransformer's sequence_length counts from the
    prompt's start.
    """

    def __init__(self, prompt: Prompt):
        self.counted = True
        self._length = 0 if isinstance(prompt, str) else len(prompt)

    def __call__(self, response: service_pb2.ModelInferResponse) -> int:
        outputs = {tensor.name: data for tensor, data in zip(response.outputs, response.raw_output_contents)}
        if "num_output_tokens" in outputs:
            return int(np.frombuffer(outputs["num_output_tokens"], np.int32).sum())
        if "sequence_length" not in outputs:
            self.counted = False
            return 1
        before, self._length = self._length, int(np.frombuffer(outputs["sequence_length"], np.uint32)[0])
        return self._length - before


class _Stream:
    """One ModelStreamInfer call."""

    def __init__(self, stub: service_pb2_grpc.GRPCInferenceServiceStub):
        self._call: Any = stub.ModelStreamInfer()

    async def run(self, request: service_pb2.ModelInferRequest, record: Record, count: Callable) -> None:
        """Send, and read to the last response; an error is stored in record.error."""
        await self._call.write(request)
        while True:
            message = await self._call.read()
            now = clock()
            if message is grpc.aio.EOF:
                record.error = "the server closed the stream"
                return
            if message.error_message:
                record.error = message.error_message
                return
            response = message.infer_response
            if response.id != request.id:
                continue
            if response.outputs:
                tokens = count(response)
                if tokens:
                    record.responses.append((now, tokens))
            if response.parameters["triton_final_response"].bool_param:
                return

    def cancel(self) -> None:
        self._call.cancel()


class Worker:
    """Sends its share of the requests of a spec. take() gives the next request's number, or None at the end;
    on_end() is called when a request has ended.
    """

    def __init__(self, spec: LoadSpec, take: Callable[[], int | None], on_end: Callable[[], None]):
        self.spec, self._take, self._on_end = spec, take, on_end
        self._channels: list[grpc.aio.Channel] = []
        self._idle: list[_Stream] = []
        self._opened = 0
        self.deadline = float("inf")  # of `clock`: no request is sent after it
        self.records: list[Record] = []

    async def connect(self, streams: int) -> None:
        """Open connections for that many streams. Raises grpc.aio.AioRpcError or asyncio.TimeoutError."""
        for _ in range(-(-streams // _STREAMS_PER_CHANNEL)):
            channel = grpc.aio.insecure_channel(self.spec.url, options=_CHANNEL_OPTIONS)
            self._channels.append(channel)
            await asyncio.wait_for(channel.channel_ready(), self.spec.connect_s)
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            await stub.ServerLive(service_pb2.ServerLiveRequest())  # the first call of a channel is slower

    async def closed_loop(self, users: int) -> None:
        """Keep `users` requests in flight until all have been taken."""
        await asyncio.gather(*(self._user() for _ in range(users)))

    async def _user(self) -> None:
        while clock() < self.deadline and (index := self._take()) is not None:
            await self._request(index)

    async def open_loop(self, arrivals: list[tuple[int, float]]) -> None:
        """Send each (number, seconds of `clock`) at its time."""
        tasks = []
        for index, when in arrivals:
            if when >= self.deadline:
                break
            await asyncio.sleep(max(0.0, when - clock()))
            tasks.append(asyncio.ensure_future(self._request(index)))
        await asyncio.gather(*tasks)

    async def close(self) -> None:
        for stream in self._idle:
            stream.cancel()
        for channel in self._channels:
            await channel.close()

    def _open(self) -> _Stream:
        channel = self._channels[self._opened % len(self._channels)]
        self._opened += 1
        return _Stream(service_pb2_grpc.GRPCInferenceServiceStub(channel))

    async def _request(self, index: int) -> None:
        request = make_request(self.spec, index)
        stream = self._idle.pop() if self._idle else self._open()
        count = _TokenCount(self.spec.prompts[index % len(self.spec.prompts)])
        record = Record(index, clock())
        try:
            await asyncio.wait_for(stream.run(request, record, count), self.spec.timeout_s)
        except asyncio.TimeoutError:
            record.error = f"no end within {self.spec.timeout_s:g} s"
        except grpc.RpcError as error:
            record.error = f"{error.code().name}: {error.details()}"
        record.ended, record.counted = clock(), count.counted
        if record.error:
            stream.cancel()  # its remaining responses would be counted for the next request
        else:
            self._idle.append(stream)
        self.records.append(record)
        self._on_end()


def work(number: int, spec: LoadSpec, taken: Any, done: Any, pipe: Connection) -> None:
    """Process `number` of a run: connect, report, wait for the starting time, send, return the records.

    taken, done: shared counters (multiprocessing.Value). pipe: gives "ready" or an error's text, takes the
    starting time in seconds of `clock`, gives the list of Records.
    """
    asyncio.run(_work(number, spec, taken, done, pipe))


async def _work(number: int, spec: LoadSpec, taken: Any, done: Any, pipe: Connection) -> None:
    def take() -> int | None:
        with taken.get_lock():
            if taken.value >= spec.num_requests:
                return None
            taken.value += 1
            return taken.value - 1

    def on_end() -> None:
        with done.get_lock():
            done.value += 1

    users = len(range(number, spec.concurrency, spec.processes))
    worker = Worker(spec, take, on_end)
    try:
        await worker.connect(users)
    except (grpc.RpcError, asyncio.TimeoutError) as error:
        pipe.send(f"no gRPC server answers at {spec.url} ({type(error).__name__})")
        return
    pipe.send("ready")
    start = pipe.recv()
    worker.deadline = start + spec.start_within_s
    if spec.request_rate is None:
        await asyncio.sleep(max(0.0, start - clock()))
        await worker.closed_loop(users)
    else:
        await worker.open_loop(_arrivals(spec, start)[number :: spec.processes])
    pipe.send(worker.records)
    await worker.close()


def _arrivals(spec: LoadSpec, start: float) -> list[tuple[int, float]]:
    """Number and time of every request: a Poisson process, the same for every process of the run."""
    assert spec.request_rate is not None
    gaps = np.random.default_rng(spec.seed).exponential(1.0 / spec.request_rate, spec.num_requests)
    return list(enumerate((start + np.cumsum(gaps) - gaps[0]).tolist()))
