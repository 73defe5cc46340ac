"""Requests as public clients made them, read from JSON and sent again: the same names, types and shapes.

A value that all elements of a tensor share is kept once. Used where a program itself cannot be installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

TIMEOUT_S = 60.0
_HERE = Path(__file__).parent
#: recorded from the programs; and of programs that the server does not serve yet, after their sources
FILES = (_HERE.parent / "integration" / "client_requests.json", _HERE / "requests.json")


def recorded() -> dict[tuple[str, str], dict]:
    """Every kept request, by client and model."""
    entries = [entry for file in FILES for entry in json.loads(file.read_text(encoding="utf-8"))]
    return {(entry["client"], entry["model"]): entry for entry in entries}


def request_of(entry: dict) -> kserve.ModelInferRequest:
    """The message that a client sent."""
    request = kserve.ModelInferRequest(model_name=entry["model"], id=entry["id"])
    for name, value in entry["parameters"].items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    for name in entry["outputs"]:
        request.outputs.add(name=name)
    for tensor in entry["inputs"]:
        name, datatype, shape = tensor["name"], tensor["datatype"], tensor["shape"]
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        count = int(np.prod(shape))
        values = tensor["data"] * (count if len(tensor["data"]) == 1 else 1)
        array = np.array(values, triton_to_np_dtype(datatype)).reshape(shape)
        raw = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
        request.raw_input_contents.append(raw)
    return request


def arrays(response: kserve.ModelInferResponse) -> dict[str, np.ndarray]:
    """The outputs of a response, in their shapes."""
    found = {}
    for output, raw in zip(response.outputs, response.raw_output_contents):
        if output.datatype == "BYTES":
            values = deserialize_bytes_tensor(raw)
        else:
            values = np.frombuffer(raw, triton_to_np_dtype(output.datatype))
        found[output.name] = values.reshape(list(output.shape))
    return found


def responses(url: str, entry: dict) -> Iterator[kserve.ModelInferResponse]:
    """The responses of gRPC at `url`. Raises grpc.RpcError; RuntimeError for a stream's error."""
    with grpc.insecure_channel(url) as channel:
        stub = GRPCInferenceServiceStub(channel)
        if not entry["stream"]:
            yield stub.ModelInfer(request_of(entry), timeout=TIMEOUT_S)
            return
        for answer in stub.ModelStreamInfer(iter([request_of(entry)]), timeout=TIMEOUT_S):
            if answer.error_message:
                raise RuntimeError(answer.error_message)
            yield answer.infer_response


def refusal(url: str, entry: dict) -> str:
    """Send a recorded request. Return why its client would see a failure; "" if it would not."""
    rows = next((tensor["shape"][0] for tensor in entry["inputs"]), 1)
    texts: list[int] = []
    try:
        for response in responses(url, entry):
            if response.outputs:
                texts.append(int(response.outputs[0].shape[0]))
    except grpc.RpcError as error:
        return error.details() or str(error.code())
    except RuntimeError as error:
        return str(error)
    if not texts:
        return "no response"
    decoupled_rows = entry["stream"] and rows > 1 and entry["model"].startswith("tensorrt_llm")
    if decoupled_rows and max(texts) > 1:  # a client reads the first row of each response
        return f"{rows} rows come as {len(texts)} response; its client reads one row a response"
    return ""
