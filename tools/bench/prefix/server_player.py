"""Plays a load against a running server: token ids through fastertransformer_streaming over gRPC streams."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tridecode.backend.base.errors import EngineDownError, TridecodeError
from tridecode.tools.bench.load.generator import TOKEN_MODEL
from tridecode.tools.bench.load.worker import LoadSpec, make_request
from tridecode.tools.bench.prefix.figures import Played
from tridecode.tools.bench.prefix.traffic import Conversation, Traffic

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
#: totals that have not changed for this long are complete: the engine's arrive with its heartbeats, and doors
#: publish them about once a second
_STILL_S = 2.5
_METRICS_S = 60.0  # a loaded machine takes long for the page


class ServerPlayer:
    """url, metrics: host:port of the server's gRPC and of its metrics."""

    def __init__(self, url: str, metrics: str):
        self._url, self._metrics = url, metrics

    def play(self, traffic: Traffic, use: str, salt: str) -> Played:
        """Return the figures of a load, see Player.play. Nothing else may use the server meanwhile.

        Raises EngineDownError if the server does not answer, TridecodeError if a request fails.
        """
        before = self._settled()
        played = asyncio.run(self._play(traffic, use, salt))
        after = self._settled()
        played.computed, played.cached, played.host = (int(b - a) for a, b in zip(before, after))
        return played

    async def _play(self, traffic: Traffic, use: str, salt: str) -> Played:
        played = Played()
        async with grpc.aio.insecure_channel(self._url, options=_OPTIONS) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                await stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=10.0)
            except grpc.aio.AioRpcError as error:
                raise EngineDownError(f"no server at {self._url}: {error.details()}") from None
            began = time.perf_counter()
            talks = (self._talk(stub, one, use, salt, played) for one in traffic.conversations)
            await asyncio.gather(*talks)
            played.seconds = time.perf_counter() - began
        return played

    async def _talk(self, stub: Any, talk: Conversation, use: str, salt: str, played: Played) -> None:
        """Send the requests of a conversation, one after the other."""
        call = stub.ModelStreamInfer()
        for number, turn in enumerate(talk.turns):
            prompt = talk.prompt(number)
            request = make_request(LoadSpec("", TOKEN_MODEL, [prompt], turn.answer, 1, tokens_in=True), 0)
            for name, text in (("cache", use), ("cache_salt", salt)):
                request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
                request.raw_input_contents.append(len(text).to_bytes(4, "little") + text.encode())
            sent = time.perf_counter()
            await call.write(request)
            ids, first = await _read(call)
            played.first_ms.append((number > 0 or talk.known > 0, 1000 * (first - sent)))
            played.output_tokens += len(ids) - len(prompt)
            talk.answered(ids[len(prompt) :].tolist())
        call.cancel()

    def _settled(self) -> tuple[float, float, float]:
        """Return `_counts` once they no longer change."""
        found = self._counts()
        while True:
            time.sleep(_STILL_S)
            last, found = found, self._counts()
            if found == last:
                return found

    def _counts(self) -> tuple[float, float, float]:
        """Return the prompt tokens that were computed, found in the cache, and of these in the host tier."""
        try:
            with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=_METRICS_S) as page:
                text = page.read().decode()
        except OSError as error:
            raise EngineDownError(f"no metrics at {self._metrics}: {error}") from None
        computed = _total(text, r"tridecode_engine_computed_prompt_tokens_total\{[^}]*\}")
        host = _total(text, r'tridecode_engine_cached_prompt_tokens_total\{[^}]*tier="host"[^}]*\}')
        cached = _total(text, r"tridecode_engine_cached_prompt_tokens_total\{[^}]*\}")
        return computed, cached, host


async def _read(call: Any) -> tuple[np.ndarray, float]:
    """Return the ids of prompt and answer, and the time of the first response."""
    first, ids = 0.0, np.zeros(0, np.int32)
    while True:
        message = await call.read()
        if message is grpc.aio.EOF or message.error_message:
            raise TridecodeError(f"a request failed: {getattr(message, 'error_message', 'the stream ended')}")
        response = message.infer_response
        outputs = {tensor.name: data for tensor, data in zip(response.outputs, response.raw_output_contents)}
        if "output_ids" in outputs:
            first = first or time.perf_counter()
            length = int(np.frombuffer(outputs["sequence_length"], np.uint32)[0])
            ids = np.frombuffer(outputs["output_ids"], np.int32)[:length]
        if response.parameters["triton_final_response"].bool_param:
            return ids, first


def _total(text: str, pattern: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))
