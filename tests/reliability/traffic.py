"""Seeded requests to every door, controls whose tokens never change, and a crowd of clients that send them.

    python -m tests.reliability.traffic --grpc HOST:PORT --http HOST:PORT --streams 80 --seed 1

runs a crowd as a process of its own, to be killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tests.reliability.forms import FREE, Form, fault_of, form_of
from tests.reliability.wire import (
    UNCLEAN,
    GrpcCaller,
    Outcome,
    Tensor,
    grpc_request,
    http_call,
    http_request,
    json_infer,
)

LIMIT_S = 30.0  # a client's own limit
WORDS = ["the", "city", "and", "a", "small", "harbour", "begins", "with", "3", "boats", "il", "pleut"]
WORDS += ["sur", "la", "ville", "今日は", "🙂", "façade"]
#: the only codes that a client may get; a message in a stream has no code
CODES = {"", "UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "CONNECTION", "400", "503", "499"}


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="clients", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine, timeout_s: float = 300.0) -> Any:
        return self.start(work).result(timeout_s)

    def close(self) -> None:
        async def cancel_all() -> None:
            for task in asyncio.all_tasks():
                if task is not asyncio.current_task():
                    task.cancel()
            await asyncio.sleep(0.05)

        self.run(cancel_all(), 20.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


@dataclass(frozen=True)
class Ask:
    """A well-formed request. way: grpc, grpc_stream, http, generate or generate_stream. form: the form of its
    answers."""

    name: str
    model: str
    way: str
    tensors: tuple[Tensor, ...] = ()
    body: str = ""
    compared: tuple[str, ...] = ("output_ids", "sequence_length", "text_output", "OUTPUT_0", "body")
    form: Form = FREE

    async def send(
        self,
        grpc: GrpcCaller,
        http: tuple[str, int],
        limit_s: float = LIMIT_S,
        outcome: Outcome | None = None,
    ) -> Outcome:
        """outcome: filled while the request is open, if the caller wants to look at it."""
        parameters = {"triton_enable_empty_final_response": True}
        if self.way == "grpc":
            request = grpc_request(self.model, self.tensors, self._wanted())
            return await grpc.unary(request, limit_s, outcome=outcome)
        if self.way == "grpc_stream":
            request = grpc_request(self.model, self.tensors, self._wanted(), b"", parameters)
            return await grpc.stream(request, limit_s, outcome=outcome)
        if self.way == "http":
            request = json_infer(self.model, self.tensors, self._wanted())
            return await http_call(http, request, limit_s, outcome=outcome)
        request = http_request(f"/v2/models/{self.model}/{self.way}", self.body.encode())
        return await http_call(http, request, limit_s, outcome=outcome)

    def _wanted(self) -> tuple[str, ...]:
        """Log probabilities may differ in the last digits with the other requests of a batch."""
        if self.model.startswith("fastertransformer"):
            return ("output_ids", "sequence_length")
        return ("text_output",) if self.model.startswith("tensorrt") else ("OUTPUT_0",)

    def digest(self, outcome: Outcome) -> str:
        """Return a digest of the tokens or the text of an answer."""
        held = [outcome.outputs[name] for name in self.compared if name in outcome.outputs]
        if "body" in outcome.outputs:
            with contextlib.suppress(ValueError):
                answer = json.loads(outcome.outputs["body"])
                held = [json.dumps(answer.get("outputs", answer.get("text_output")), sort_keys=True).encode()]
        return hashlib.sha256(b"|".join(held)).hexdigest()[:16] if held else ""

    def fault(self, outcome: Outcome) -> str:
        """Return why an answer does not match the form; "" if it matches, or without a form."""
        return fault_of(self.form, outcome.outputs.get("text_output", b"").decode("utf-8", "replace"))


def token_ask(
    name: str, model: str, way: str, prompt: Sequence[int], new_tokens: int, sampled_seed: int | None = None
) -> Ask:
    tensors = [
        Tensor("input_ids", "UINT32", [1, len(prompt)], list(prompt)),
        Tensor("input_lengths", "UINT32", [1, 1], [len(prompt)]),
        Tensor("request_output_len", "UINT32", [1, 1], [new_tokens]),
        Tensor("end_id", "UINT32", [1, 1], [50256]),
    ]
    if sampled_seed is not None:
        tensors += [
            Tensor("runtime_top_k", "UINT32", [1, 1], [20]),
            Tensor("runtime_top_p", "FP32", [1, 1], [0.9]),
            Tensor("temperature", "FP32", [1, 1], [0.8]),
            Tensor("random_seed", "UINT64", [1, 1], [sampled_seed]),
        ]
    return Ask(name, model, way, tuple(tensors))


def text_ask(
    name: str,
    model: str,
    way: str,
    text: str,
    new_tokens: int,
    sampled_seed: int | None = None,
    form: Form = FREE,
) -> Ask:
    values: dict = {"text_input": text, "max_tokens": new_tokens, "end_id": 50256}
    if form != FREE:
        values.update(guided_decoding_guide_type=form[0], guided_decoding_guide=form[1])
    if way in ("grpc_stream", "generate_stream"):
        values["stream"] = True
    if sampled_seed is not None:
        values.update(top_p=0.9, temperature=0.8, seed=sampled_seed)
    types = {
        "text_input": "BYTES",
        "guided_decoding_guide_type": "BYTES",
        "guided_decoding_guide": "BYTES",
        "stream": "BOOL",
        "seed": "UINT64",
        "top_p": "FP32",
        "temperature": "FP32",
    }
    tensors = [
        Tensor(key, types.get(key, "INT32"), [1, 1], [value.encode() if isinstance(value, str) else value])
        for key, value in values.items()
    ]
    return Ask(name, model, way, tuple(tensors), json.dumps(values), form=form)


def ensemble_ask(name: str, text: str, new_tokens: int) -> Ask:
    tensors = (
        Tensor("INPUT_0", "BYTES", [1, 1], [text.encode()]),
        Tensor("INPUT_1", "UINT32", [1, 1], [new_tokens]),
        Tensor("INPUT_2", "BYTES", [1, 1], [b""]),
        Tensor("INPUT_3", "BYTES", [1, 1], [b""]),
    )
    return Ask(name, "ensemble", "grpc", tensors)


def controls() -> list[Ask]:
    """Greedy and sampled, on every engine door, over every protocol."""
    return [
        token_ask("ids greedy, gRPC", "fastertransformer", "grpc", [5, 9, 11, 3], 12),
        token_ask("ids sampled, HTTP", "fastertransformer", "http", [7, 30, 21], 12, sampled_seed=77),
        token_ask("ids greedy, stream", "fastertransformer_streaming", "grpc_stream", [13, 2, 44], 12),
        text_ask("text greedy, HTTP", "tensorrt_llm_bls_plain", "http", "the small harbour", 12),
        text_ask("text sampled, gRPC", "tensorrt_llm_bls_plain", "grpc", "il pleut", 12, sampled_seed=5),
        text_ask("text sampled, SSE", "tensorrt_llm_bls", "generate_stream", "the city", 12, sampled_seed=9),
        text_ask("text greedy, stream", "tensorrt_llm_bls", "grpc_stream", "3 boats and", 12),
        ensemble_ask("ensemble greedy, gRPC", "the city begins", 8),
    ]


def mixture(seed: int, count: int, prompt_tokens: int = 48, new_tokens: int = 160) -> list[Ask]:
    """Return random requests by the seed, with different doors, lengths and sampling; every sixth has a
    form."""
    draw = random.Random(f"mixture {seed}")
    asks = []
    for number in range(count):
        length, output = draw.randint(1, prompt_tokens), draw.randint(new_tokens // 8, new_tokens)
        short = 1 + output % 12  # a plain call shows nothing until it ends
        sampled = draw.choice([None, draw.randrange(2**63)])
        prompt = [draw.randrange(3, 330) for _ in range(length)]
        text = " ".join(draw.choice(WORDS) for _ in range(1 + length // 4))
        kind = draw.choice(["ids", "stream", "stream", "stream", "plain", "text", "text", "sse"])
        if number % 6 == 5:
            kind = "form"
        name = f"{number} {kind}"
        if kind == "ids":
            asks.append(token_ask(name, "fastertransformer", "grpc", prompt, short, sampled))
        elif kind == "stream":
            asks.append(
                token_ask(name, "fastertransformer_streaming", "grpc_stream", prompt, output, sampled)
            )
        elif kind == "plain":
            asks.append(text_ask(name, "tensorrt_llm_bls_plain", "http", text, short, sampled))
        elif kind == "text":
            asks.append(text_ask(name, "tensorrt_llm_bls", "grpc_stream", text, output, sampled))
        elif kind == "form":
            form, way = form_of(draw, output), draw.choice(["grpc_stream", "generate_stream"])
            asks.append(text_ask(name, "tensorrt_llm_bls", way, text, 400, sampled, form))
        else:
            asks.append(text_ask(name, "tensorrt_llm_bls", "generate_stream", text, output, sampled))
    return asks


@dataclass
class Sent:
    ask: Ask
    outcome: Outcome


class Clients:
    """A test's clients of one server: an event loop, connections, and the right answers."""

    def __init__(self, grpc_url: str, http: tuple[str, int], channels: int = 8) -> None:
        self.loop = Loop()
        self.http = http
        self.grpc: GrpcCaller = self.loop.run(self._connect(grpc_url, channels))

    @staticmethod
    async def _connect(url: str, channels: int) -> GrpcCaller:
        return GrpcCaller(url, channels)

    def send(self, ask: Ask, limit_s: float = LIMIT_S) -> Outcome:
        return self.loop.run(ask.send(self.grpc, self.http, limit_s), limit_s + 10)

    def digests(self, asks: Sequence[Ask], attempts: int = 120) -> dict[str, str]:
        """The digest of each answer; an UNAVAILABLE is asked again. AssertionError if one does not come."""
        found = {}
        for ask in asks:
            for _attempt in range(attempts):
                outcome = self.send(ask, 20.0)
                if outcome.kind == "answer":
                    break
                time.sleep(0.25)
            assert outcome.kind == "answer", (
                f"control {ask.name}: {outcome.kind} {outcome.code} {outcome.text}"
            )
            found[ask.name] = ask.digest(outcome)
            assert found[ask.name], f"control {ask.name} was answered without tokens"
            assert not ask.fault(outcome), f"control {ask.name}: {ask.fault(outcome)}"
        return found

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.loop.run(self.grpc.close(), 10)
        self.loop.close()


class Crowd:
    """`streams` clients; each sends one request after the other until `stop`."""

    def __init__(
        self,
        clients: Clients,
        asks: Sequence[Ask],
        streams: int,
        seed: int,
        answers: dict[str, str] | None = None,
        pause_s: float = 0.0,
    ) -> None:
        self.sent: list[Sent] = []
        self.open: dict[int, Sent] = {}
        self.wrong: list[str] = []
        self._answers = answers
        self._clients, self._asks, self._pause_s = clients, asks, pause_s
        self._stopping = False
        self._tasks = [
            clients.loop.start(self._client(random.Random(f"client {seed} {number}"), number))
            for number in range(streams)
        ]

    async def _client(self, draw: random.Random, number: int) -> None:
        while not self._stopping:
            ask = draw.choice(self._asks)
            outcome = Outcome(time.monotonic())
            self.open[number] = Sent(ask, outcome)
            await ask.send(self._clients.grpc, self._clients.http, outcome=outcome)
            self.open.pop(number, None)
            self.sent.append(Sent(ask, outcome))
            if outcome.kind == "answer" and self._answers is not None:
                digest = ask.digest(outcome)
                if digest != self._answers[ask.name]:
                    self.wrong.append(ask.name)
            if outcome.kind == "answer" and (fault := ask.fault(outcome)):
                self.wrong.append(f"{ask.name}: {fault}")
            await asyncio.sleep(0.2 if outcome.kind != "answer" else self._pause_s)

    def open_now(self) -> int:
        return len(self.open)

    def stop(self, wait_s: float) -> int:
        """No new requests; how many are still open after wait_s."""
        self._stopping = True
        deadline = time.monotonic() + wait_s
        while any(not task.done() for task in self._tasks) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [task for task in self._tasks if not task.done()]
        hanging = list(self.open.values())
        self.open.clear()
        for task in left:
            task.cancel()
        for sent in hanging:
            sent.outcome.finish("hang", "", "still open when the test ended")
            self.sent.append(sent)
        return len(hanging)


def clean(outcome: Outcome, codes: set[str] | None = None) -> str:
    """The fault in how a request ended; "" if there is none."""
    if outcome.kind == "hang":
        return "no end within the client's own limit"
    if outcome.kind == "error":
        if codes is not None and outcome.code not in codes:
            return f"code {outcome.code}: {outcome.text[:300]}"
        if not outcome.text.strip():
            return f"an error without a text (code {outcome.code})"
        found = UNCLEAN.search(outcome.text)
        if found:
            return f"the error shows {found.group(0)!r}: {outcome.text[:300]}"
    if outcome.kind in ("answer", "error") and outcome.ends != 1:
        return f"{outcome.ends} ends instead of one: {outcome.text[:300]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grpc", required=True)
    parser.add_argument("--http", required=True)
    parser.add_argument("--streams", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    host, port = arguments.http.rsplit(":", 1)
    clients = Clients(arguments.grpc, (host, int(port)))
    crowd = Crowd(clients, mixture(arguments.seed, 40, 48, 600), arguments.streams, arguments.seed)
    while True:
        time.sleep(0.2)
        print(sum(sent.outcome.responses for sent in crowd.sent), crowd.open_now(), flush=True)


if __name__ == "__main__":
    main()
