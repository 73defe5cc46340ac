"""One client of pytriton: HTTP GRPC MODEL PROMPT TOKENS CLASS."""

import asyncio
import json
import sys

import numpy as np
import pytriton.client

http, grpc, model, prompt, tokens, way = sys.argv[1:]
NAMED = {
    "text_input": np.array([[prompt.encode()]], object),
    "max_tokens": np.array([[int(tokens)]], np.int32),
    "exclude_input_in_output": np.array([[True]]),
}


def text(answer):
    return b"".join(answer["text_output"].reshape(-1).tolist()).decode()


def model_client(url):
    with pytriton.client.ModelClient(url, model) as client:
        return text(client.infer_batch(**NAMED))


def futures_client():
    with pytriton.client.FuturesModelClient(f"http://{http}", model) as client:
        return text(client.infer_batch(**NAMED).result())


def decoupled_client():
    named = {**NAMED, "stream": np.array([[True]])}
    with pytriton.client.DecoupledModelClient(f"grpc://{grpc}", model) as client:
        return "".join(text(answer) for answer in client.infer_batch(**named))


async def asyncio_client():
    async with pytriton.client.AsyncioModelClient(f"http://{http}", model) as client:
        return text(await client.infer_batch(**NAMED))


async def asyncio_decoupled_client():
    named = {**NAMED, "stream": np.array([[True]])}
    async with pytriton.client.AsyncioDecoupledModelClient(f"grpc://{grpc}", model) as client:
        return "".join([text(answer) async for answer in client.infer_batch(**named)])


WAYS = {
    "ModelClient, HTTP": lambda: model_client(f"http://{http}"),
    "ModelClient, gRPC": lambda: model_client(f"grpc://{grpc}"),
    "FuturesModelClient": futures_client,
    "AsyncioModelClient": lambda: asyncio.run(asyncio_client()),
    "DecoupledModelClient": decoupled_client,
    "AsyncioDecoupledModelClient": lambda: asyncio.run(asyncio_decoupled_client()),
}
print("ANSWER", json.dumps(WAYS[way]()))
