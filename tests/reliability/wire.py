"""One request on the wire, and its responses: gRPC as raw protobuf over grpc.aio, HTTP over a plain socket.

There is no client library between a test and the server, so a request may be malformed in any way.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

SERVICE = "/inference.GRPCInferenceService/"
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
#: texts that belong into a server's log, never into an answer
UNCLEAN = re.compile(
    r"Traceback|the door failed|could not parse it|File \"|\.py\b|site-packages"
    r"|/dev/shm|/tmp/|/proc/|/home/|std::|terminate called|lock_exception|Segmentation|"
    + re.escape(os.path.expanduser("~/"))
)
FINAL = "triton_final_response"

NUMPY = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}


@dataclass
class Outcome:
    """The end of one request. Times are monotonic seconds.

    kind: "answer", "error", "cancelled" (by the client itself), "hang" (the client's own limit was reached).
    code: the gRPC status or HTTP status of an error; a message in a gRPC stream has none. progress: the times
    at which something arrived. ends: final responses and errors that arrived; one is right.
    """

    start: float
    kind: str = ""
    code: str = ""
    text: str = ""
    responses: int = 0
    ends: int = 0
    progress: list[float] = field(default_factory=list)
    end: float = 0.0
    outputs: dict[str, bytes] = field(default_factory=dict)

    def finish(self, kind: str, code: str = "", text: str = "") -> Outcome:
        self.kind, self.code, self.text, self.end = kind, code, text, time.monotonic()
        return self

    def silence_after(self, moment: float) -> float:
        """The longest time after `moment` in which nothing came, up to the end, which may be now."""
        times = [moment, *(at for at in self.progress if at > moment), self.end or time.monotonic()]
        return max((later - earlier for earlier, later in zip(times, times[1:])), default=0.0)


# ---------------------------------------------------------------- payloads


def encode_bytes(values: Sequence[bytes]) -> bytes:
    return b"".join(len(value).to_bytes(4, "little") + value for value in values)


@dataclass
class Tensor:
    """One input; data: the elements, or the raw bytes as they are sent; region: shared memory it names."""

    name: str
    datatype: str
    shape: list[int]
    data: list | bytes
    region: str = ""

    def raw(self) -> bytes:
        if isinstance(self.data, bytes):
            return self.data
        if self.datatype == "BYTES":
            return encode_bytes([v if isinstance(v, bytes) else str(v).encode() for v in self.data])
        kind = NUMPY.get(self.datatype, np.int64)
        if np.dtype(kind).kind in "iu":
            bits = 8 * np.dtype(kind).itemsize
            wrapped = np.array([int(value) % 2**bits for value in self.data], np.uint64)
            return wrapped.astype(f"u{bits // 8}").tobytes()
        with np.errstate(over="ignore", invalid="ignore"):
            return (
                np.array(self.data, np.float64 if np.dtype(kind).kind == "f" else None).astype(kind).tobytes()
            )

    def as_json(self) -> dict:
        data = self.data
        if isinstance(data, bytes):
            data = [0]
        if self.region:
            region = {"shared_memory_region": self.region, "shared_memory_byte_size": 4}
            entry = {"name": self.name, "datatype": self.datatype, "shape": self.shape}
            return {**entry, "parameters": region}
        return {
            "name": self.name,
            "datatype": self.datatype,
            "shape": self.shape,
            "data": [v.decode("latin-1") if isinstance(v, bytes) else v for v in data],
        }


def grpc_request(
    model: str,
    tensors: Sequence[Tensor],
    outputs: Sequence[str] = (),
    request_id: bytes = b"",
    parameters: dict | None = None,
) -> bytes:
    """A ModelInferRequest. The id may be any bytes: protobuf's python refuses what is not UTF-8."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for tensor in tensors:
        entry = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if tensor.region:
            entry.parameters["shared_memory_region"].string_param = tensor.region
            entry.parameters["shared_memory_byte_size"].int64_param = 4
        else:
            request.raw_input_contents.append(tensor.raw())
    for name in outputs:
        request.outputs.add(name=name)
    for key, value in (parameters or {}).items():
        one = request.parameters[key]
        if isinstance(value, bool):
            one.bool_param = value
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            one.int64_param = value
        elif isinstance(value, int) and 0 <= value < 2**64:
            one.uint64_param = value
        elif isinstance(value, (int, float)):
            one.double_param = float(value)
        else:
            one.string_param = value if isinstance(value, str) else json.dumps(value)
    encoded = request.SerializeToString()
    if request_id:  # field 3, length-delimited
        encoded += b"\x1a" + _varint(len(request_id)) + request_id
    return encoded


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while True:
        value, low = value >> 7, value & 127
        encoded.append(low | (128 if value else 0))
        if not value:
            return bytes(encoded)


def http_request(
    path: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST"
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def json_infer(
    model: str, tensors: Sequence[Tensor], outputs: Sequence[str] = (), binary: bool = False, **extra: object
) -> bytes:
    """POST /v2/models/<model>/infer; binary: the tensors follow the JSON as raw bytes."""
    head: dict = {"inputs": [], **extra}
    raw = b""
    for tensor in tensors:
        if binary:
            data = tensor.raw()
            entry = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
            head["inputs"].append({**entry, "parameters": {"binary_data_size": len(data)}})
            raw += data
        else:
            head["inputs"].append(tensor.as_json())
    if outputs:
        head["outputs"] = [{"name": name} for name in outputs]
    text = json.dumps(head).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))} if binary else {}
    return http_request(f"/v2/models/{model}/infer", text + raw, headers)


# ---------------------------------------------------------------- calls


class GrpcCaller:
    """Calls over `channels` connections of one event loop."""

    def __init__(self, url: str, channels: int = 4) -> None:
        self._channels = [
            grpc.aio.insecure_channel(url, options=[*GRPC_OPTIONS, ("tridecode.number", number)])
            for number in range(channels)
        ]
        self._next = 0

    def _channel(self) -> grpc.aio.Channel:
        self._next += 1
        return self._channels[self._next % len(self._channels)]

    async def unary(
        self,
        request: bytes,
        limit_s: float,
        method: str = "ModelInfer",
        cancel_s: float = 0.0,
        outcome: Outcome | None = None,
    ) -> Outcome:
        """One unary call of raw bytes; cancel_s: the client cancels after this time."""
        outcome = outcome or Outcome(time.monotonic())
        answer_type = service_pb2.ModelInferResponse.FromString if method == "ModelInfer" else None
        call = self._channel().unary_unary(SERVICE + method, response_deserializer=answer_type)(request)
        try:
            answer = await asyncio.wait_for(call, cancel_s or limit_s)
        except asyncio.TimeoutError:
            return outcome.finish("cancelled" if cancel_s else "hang")
        except grpc.aio.AioRpcError as error:
            outcome.ends += 1
            return outcome.finish("error", _code_of(error), error.details() or "")
        outcome.ends, outcome.responses = 1, 1
        if answer_type is not None:
            outcome.outputs = _outputs_of(answer)
        return outcome.finish("answer")

    async def stream(
        self,
        request: bytes,
        limit_s: float,
        cancel_after: int = -1,
        outcome: Outcome | None = None,
    ) -> Outcome:
        """One request on a stream of its own, read to the stream's end.

        cancel_after: number of responses after which the client cancels.
        """
        outcome = outcome or Outcome(time.monotonic())
        call = self.open_stream()
        try:
            return await asyncio.wait_for(self._send_and_read(call, request, outcome, cancel_after), limit_s)
        except asyncio.TimeoutError:
            return outcome.finish("hang")
        except grpc.aio.AioRpcError as error:
            if not outcome.ends:
                outcome.ends += 1
                outcome.finish("error", _code_of(error), error.details() or "")
            return outcome
        finally:
            call.cancel()

    def open_stream(self) -> grpc.aio.StreamStreamCall:
        return self._channel().stream_stream(
            SERVICE + "ModelStreamInfer",
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )()

    async def _send_and_read(self, call, request: bytes, outcome: Outcome, cancel_after: int) -> Outcome:
        await call.write(request)
        if cancel_after != 0:
            await call.done_writing()
        return await self.read_stream(call, outcome, cancel_after)

    async def read_stream(self, call, outcome: Outcome, cancel_after: int = -1) -> Outcome:
        """Read to the end of the stream, or cancel after that many responses."""
        while True:
            if 0 <= cancel_after <= outcome.responses:
                call.cancel()
                return outcome.finish("cancelled")
            message = await call.read()
            if message is grpc.aio.EOF:
                if outcome.end:
                    return outcome
                code = await call.code()
                outcome.ends += 1
                return outcome.finish("error", code.name, await call.details() or "the stream ended early")
            outcome.progress.append(time.monotonic())
            if message.error_message:
                outcome.ends += 1
                outcome.finish("error", "", message.error_message)
                continue
            answer = message.infer_response
            if answer.outputs:
                outcome.responses += 1
                _append_outputs(outcome.outputs, _outputs_of(answer))
            if answer.parameters[FINAL].bool_param:
                outcome.ends += 1
                outcome.finish("answer")

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def _code_of(error: grpc.aio.AioRpcError) -> str:
    """Return the status; CONNECTION for the client library's error when a server dies during a call."""
    return "CONNECTION" if error.details() == "Internal error from Core" else error.code().name


def _outputs_of(answer: service_pb2.ModelInferResponse) -> dict[str, bytes]:
    return {output.name: raw for output, raw in zip(answer.outputs, answer.raw_output_contents)}


def _append_outputs(held: dict[str, bytes], new: dict[str, bytes]) -> None:
    """Texts add up; arrays are whole in each response."""
    for name, raw in new.items():
        held[name] = held.get(name, b"") + raw[4:] if name == "text_output" else raw


class HttpError(Exception):
    """The connection ended before the answer did."""


async def http_call(
    address: tuple[str, int],
    request: bytes,
    limit_s: float,
    leave_s: float = 0.0,
    half_close: bool = False,
    outcome: Outcome | None = None,
) -> Outcome:
    """Send raw bytes, read one answer. leave_s: the client closes the connection this long after sending.
    half_close: the sending side is closed after the request, for bodies that are shorter than they say."""
    outcome = outcome or Outcome(time.monotonic())
    writer = None
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*address, limit=1 << 24), limit_s)
        writer.write(request)
        await asyncio.wait_for(writer.drain(), limit_s)
        if half_close:
            writer.write_eof()
        if leave_s:
            await asyncio.sleep(leave_s)
            return outcome.finish("cancelled")
        await asyncio.wait_for(_read_http(reader, outcome), limit_s)
    except asyncio.TimeoutError:
        return outcome.finish("hang")
    except (OSError, HttpError, asyncio.IncompleteReadError, ValueError, asyncio.LimitOverrunError) as error:
        outcome.ends += 1
        return outcome.finish("error", "CONNECTION", f"{type(error).__name__}: {error}")
    finally:
        if writer is not None:
            writer.close()
    return outcome


async def _read_http(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status = head.split(" ", 2)[1]
    headers = {
        line.split(":", 1)[0].strip().lower(): line.split(":", 1)[1].strip()
        for line in head.split("\r\n")[1:]
        if ":" in line
    }
    if headers.get("transfer-encoding", "") == "chunked":
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).strip() or b"0", 16):
            body += await reader.readexactly(size + 2)
            body = body[:-2]
            outcome.progress.append(time.monotonic())
        await reader.readuntil(b"\r\n")
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        outcome.progress.append(time.monotonic())
    _judge_http(status, headers, body, outcome)


def _judge_http(status: str, headers: dict[str, str], body: bytes, outcome: Outcome) -> None:
    text = body.decode("utf-8", "replace")
    outcome.ends = 1
    if status != "200":
        outcome.finish("error", status, text)
    elif "event-stream" in headers.get("content-type", "") or text.startswith("data: "):
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
        outcome.responses = len(events)
        errors = [event["error"] for event in events if "error" in event]
        outcome.outputs["text_output"] = "".join(
            event.get("text_output", "") for event in events if isinstance(event.get("text_output", ""), str)
        ).encode()
        if errors:
            outcome.ends = len(errors)
            outcome.finish("error", "", errors[-1])
        else:
            outcome.finish("answer")
    elif text.startswith('{"error"'):
        outcome.finish("error", "200", text)
    else:
        outcome.responses = 1
        outcome.outputs["body"] = body
        outcome.finish("answer")
