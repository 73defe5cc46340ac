"""A gRPC server that speaks Triton's protocol with answers and timings that a test chooses.

It runs in a thread of the test, and keeps what clients sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

TRITON_TYPES = {"int32": "INT32", "uint32": "UINT32", "float32": "FP32", "bool": "BOOL", "object": "BYTES"}


@dataclass
class FakeModel:
    """outputs: the tensors of each response in turn. first_s, gap_s: seconds before the first and before each
    other response. error_after: number of responses before an error ends the request."""

    name: str
    inputs: tuple[str, ...]
    responses: list[dict[str, np.ndarray]] = field(default_factory=list)
    decoupled: bool = True
    first_s: float = 0.0
    gap_s: float = 0.0
    error_after: int | None = None
    error: str = "the engine was rebuilt while it held the request"
    never_ends: bool = False
    dtypes: dict[str, str] = field(default_factory=dict)  # of inputs, e.g. UINT32; else undeclared


def text_responses(pieces: list[tuple[str, int]]) -> list[dict[str, np.ndarray]]:
    return [
        {
            "text_output": np.array([[text.encode()]], object),
            "num_output_tokens": np.array([[count]], np.int32),
        }
        for text, count in pieces
    ]


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, models: list[FakeModel]):
        self.models = {model.name: model for model in models}
        self.requests: list[service_pb2.ModelInferRequest] = []
        self.arrived: list[float] = []  # seconds of time.monotonic, for streamed requests
        self.cancelled = threading.Event()
        self.url = ""

    async def ServerLive(self, request, context):
        return service_pb2.ServerLiveResponse(live=True)

    async def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=request.name in self.models)

    async def ModelConfig(self, request, context):
        if request.name not in self.models:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}'")
        model = self.models[request.name]
        config = model_config_pb2.ModelConfig(name=model.name)
        config.model_transaction_policy.decoupled = model.decoupled
        for name in model.inputs:
            config.input.add(name=name, data_type=f"TYPE_{model.dtypes[name]}" if name in model.dtypes else 0)
        return service_pb2.ModelConfigResponse(config=config)

    def responses(self, model: FakeModel, request) -> list[dict[str, np.ndarray]]:
        """The tensors of each response to a request."""
        return model.responses

    async def ModelInfer(self, request, context):
        self.requests.append(request)
        model = self.models[request.model_name]
        if model.error_after == 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, model.error)
        return _response(model, request.id, self.responses(model, request)[0])

    async def ModelStreamInfer(
        self, requests: AsyncIterator[service_pb2.ModelInferRequest], context
    ) -> AsyncIterator[service_pb2.ModelStreamInferResponse]:
        try:
            async for request in requests:
                self.arrived.append(time.monotonic())
                self.requests.append(request)
                async for message in self._answer(self.models[request.model_name], request):
                    yield message
        except (asyncio.CancelledError, GeneratorExit):  # the second while a message is being sent
            self.cancelled.set()
            raise

    async def _answer(self, model: FakeModel, request) -> AsyncIterator:
        for number, outputs in enumerate(self.responses(model, request)):
            if number == model.error_after:
                break
            await asyncio.sleep(model.gap_s if number else model.first_s)
            yield _message(_response(model, request.id, outputs, final=False))
        if model.error_after is not None:
            yield service_pb2.ModelStreamInferResponse(error_message=model.error)
        elif model.never_ends:
            await asyncio.sleep(3600)
        elif model.decoupled:
            yield _message(_response(model, request.id, {}, final=True))


def _message(response) -> service_pb2.ModelStreamInferResponse:
    return service_pb2.ModelStreamInferResponse(infer_response=response)


def _response(model: FakeModel, request_id: str, outputs: dict, final: bool | None = None):
    response = service_pb2.ModelInferResponse(model_name=model.name, id=request_id)
    if final is not None and model.decoupled:
        response.parameters["triton_final_response"].bool_param = final
    for name, value in outputs.items():
        response.outputs.add(name=name, datatype=TRITON_TYPES[value.dtype.name], shape=value.shape)
        if value.dtype == object:
            items = [len(item).to_bytes(4, "little") + item for item in value.reshape(-1)]
            response.raw_output_contents.append(b"".join(items))
        else:
            response.raw_output_contents.append(value.tobytes())
    return response


@contextlib.contextmanager
def fake_server(*models: FakeModel, kind: type[FakeServer] = FakeServer) -> Iterator[FakeServer]:
    """A server with these models, on a free port; `url` of the value is its address."""
    server, started = kind(list(models)), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        host = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(server, host)
        server.url = f"localhost:{host.add_insecure_port('localhost:0')}"
        await host.start()
        started.set()
        await stop.wait()
        await host.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(10.0)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10.0)
        loop.close()
