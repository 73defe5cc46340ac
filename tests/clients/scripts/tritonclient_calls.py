"""One way of calling with tritonclient: HTTP GRPC MODEL PROMPT TOKENS WAY."""

import asyncio
import json
import queue
import sys

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio

http, grpc, model, prompt, tokens, way = sys.argv[1:]


def inputs(module):
    values = {
        "text_input": (np.array([[prompt.encode()]], object), "BYTES"),
        "max_tokens": (np.array([[int(tokens)]], np.int32), "INT32"),
        "exclude_input_in_output": (np.array([[True]]), "BOOL"),
    }
    made = []
    for name, (value, datatype) in values.items():
        made.append(module.InferInput(name, [1, 1], datatype))
        made[-1].set_data_from_numpy(value)
    return made


def text(result):
    found = result.as_numpy("text_output")
    return b"".join(found.reshape(-1).tolist()).decode() if found is not None else ""


def callback_of(answers):
    return lambda result, error: answers.put((result, error))


def taken(answers):
    result, error = answers.get(timeout=60)
    if error is not None:
        raise error
    return result


def async_infer():
    answers = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(grpc) as client:
        client.async_infer(model, inputs(tritonclient.grpc), callback=callback_of(answers))
        return text(taken(answers))


def async_stream_infer():
    answers, pieces = queue.Queue(), []
    with tritonclient.grpc.InferenceServerClient(grpc) as client:
        client.start_stream(callback_of(answers))
        given = inputs(tritonclient.grpc)
        given.append(tritonclient.grpc.InferInput("stream", [1, 1], "BOOL"))
        given[-1].set_data_from_numpy(np.array([[True]]))
        client.async_stream_infer(model, given, enable_empty_final_response=True)
        while True:
            result = taken(answers)
            pieces.append(text(result))
            if result.get_response().parameters["triton_final_response"].bool_param:
                return "".join(pieces)


async def aio(module, url):
    async with module.InferenceServerClient(url) as client:
        return text(await client.infer(model, inputs(module)))


async def aio_stream():
    async def requests():
        yield {"model_name": model, "inputs": inputs(tritonclient.grpc.aio)}

    pieces = []
    async with tritonclient.grpc.aio.InferenceServerClient(grpc) as client:
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                raise error
            pieces.append(text(result))
    return "".join(pieces)


def plain(module, url):
    with module.InferenceServerClient(url) as client:
        return text(client.infer(model, inputs(module)))


def http_async_infer():
    with tritonclient.http.InferenceServerClient(http) as client:
        return text(client.async_infer(model, inputs(tritonclient.http)).get_result())


WAYS = {
    "http.infer": lambda: plain(tritonclient.http, http),
    "http.async_infer": http_async_infer,
    "http.aio.infer": lambda: asyncio.run(aio(tritonclient.http.aio, http)),
    "grpc.infer": lambda: plain(tritonclient.grpc, grpc),
    "grpc.async_infer": async_infer,
    "grpc.aio.infer": lambda: asyncio.run(aio(tritonclient.grpc.aio, grpc)),
    "grpc.async_stream_infer": async_stream_infer,
    "grpc.aio.stream_infer": lambda: asyncio.run(aio_stream()),
}
print("ANSWER", json.dumps(WAYS[way]()))
