"""Every field of every route of the OpenAI service, spoilt in every way of `cases`, and broken HTTP.

    python -m tests.reliability.front.fuzz --report build/front_fuzz.md --mixed 2000 --seed 7

The service is a process of its own, in front of the real engine on a tiny LLaMA. Cases are sent with
control requests. Each ends in one clean error in OpenAI's shape that names its field, or in one whole answer;
the texts of the controls do not change. The report has a line for each case, to be read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.backend.front.fronts import TEMPLATE, Front, repository
from tests.checkpoints import TINY_VOCAB, tiny_llama
from tests.fake_engine import FakeSupervisor
from tests.real_engine import RealEngine
from tests.reliability.front.calls import Address, Reply, call, post
from tests.reliability.front.cases import GOOD, LARGE, Case, cases_of, mixed_cases
from tests.reliability.front.http_cases import HttpCase, http_cases
from tests.reliability.report import megabytes, table
from tests.reliability.wire import UNCLEAN
from tridecode.backend.supervisor import processes

TOGETHER = 16  # cases sent with one set of controls
ERROR_KEYS = {"message", "type", "param", "code"}
#: statuses that a wrong body may have
REFUSALS = (400, 403, 404, 413, 429, 504)
_SENTENCE = {"stream": True, "seed": 5, "max_tokens": 12}
#: request whose text must not change
CONTROLS: dict[str, bytes] = {
    "completion": post("/v1/completions", {**GOOD["/v1/completions"], "max_tokens": 12}),
    "chat": post("/v1/chat/completions", {**GOOD["/v1/chat/completions"], "max_tokens": 12}),
    "sampled stream": post("/v1/completions", {**_SENTENCE, "prompt": "the ferry"}),
}
_KINDS: dict[str, Any] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletion,
    "/v1/embeddings": CreateEmbeddingResponse,
}
_CHUNKS: dict[str, Any] = {"/v1/completions": Completion, "/v1/chat/completions": ChatCompletionChunk}


@dataclass
class Outcome:
    """The end of one request. complaint: "" if that is clean."""

    case: Case | HttpCase
    status: int
    text: str
    seconds: float
    complaint: str


class FrontFuzz:
    """Sends cases to a running service."""

    def __init__(self, address: Address):
        self._address = address
        url = f"http://{address[0]}:{address[1]}"
        self.document = httpx.get(f"{url}/openapi.json", timeout=30).json()
        self.references = asyncio.run(self._controls())
        self.changed: list[str] = []
        self.slowest_control_s = 0.0

    async def _controls(self) -> dict[str, str]:
        replies = await asyncio.gather(*(call(self._address, sent) for sent in CONTROLS.values()))
        return {name: _text_of(reply) for name, reply in zip(CONTROLS, replies)}

    def run(self, cases: Iterable[Case | HttpCase]) -> list[Outcome]:
        return asyncio.run(self._run(list(cases)))

    async def _run(self, cases: Sequence[Case | HttpCase]) -> list[Outcome]:
        found = []
        for start in range(0, len(cases), TOGETHER):
            group = cases[start : start + TOGETHER]
            began = time.monotonic()
            controls = asyncio.create_task(self._timed_controls(began))
            replies = await asyncio.gather(*(self._send(case) for case in group))
            found += [_outcome(case, reply) for case, reply in zip(group, replies)]
            now = await controls
            self.changed += [
                f"{name} beside {group[0]} and others: {text!r}"
                for name, text in now.items()
                if text != self.references[name]
            ]
        return found

    async def _timed_controls(self, began: float) -> dict[str, str]:
        found = await self._controls()
        self.slowest_control_s = max(self.slowest_control_s, time.monotonic() - began)
        return found

    async def _send(self, case: Case | HttpCase) -> Reply:
        if isinstance(case, HttpCase):
            return await call(self._address, case.sent, half_close=case.half_close)
        head = (
            f"POST {case.route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(case.body)}"
        )
        return await call(self._address, f"{head}\r\n\r\n".encode() + case.body)

    def all_cases(self, mixed: int, seed: int) -> Iterator[Case | HttpCase]:
        """mixed: cases of several unusual fields, a route."""
        gets = [path for path, methods in self.document["paths"].items() if "get" in methods]
        yield from http_cases(gets)
        for route in GOOD:
            yield from cases_of(self.document, route)
            yield from mixed_cases(self.document, route, mixed, seed)


def _text_of(reply: Reply) -> str:
    """The generated text; what went wrong instead."""
    if reply.status != 200 or reply.hang or reply.broken or reply.error:
        return f"(no answer: {reply.status} {reply.broken} {reply.error})"
    return reply.text


def _outcome(case: Case | HttpCase, reply: Reply) -> Outcome:
    complaint = judge_http(case, reply) if isinstance(case, HttpCase) else judge(case, reply)
    text = reply.error.get("message", "") if not complaint.startswith("not JSON") else ""
    return Outcome(case, reply.status, text, reply.end - reply.start, complaint)


def judge_http(case: HttpCase, reply: Reply) -> str:
    """Return the fault in the answer to broken HTTP; "" for none."""
    if reply.hang or reply.broken:
        return "no end within the client's limit" if reply.hang else reply.broken
    if reply.status not in case.statuses:
        return f"status {reply.status}; wanted {' or '.join(map(str, case.statuses))}: {reply.body[:200]!r}"
    return "" if reply.status < 400 else _judge_error(reply)


def judge(case: Case, reply: Reply) -> str:
    """Return the fault in the answer to a body; "" for one clean error, or one whole answer."""
    if reply.hang or reply.broken:
        return "no end within the client's limit" if reply.hang else reply.broken
    if reply.status == 200:
        return _judge_answer(case, reply)
    if reply.status not in REFUSALS:
        return f"status {reply.status}: {reply.body[:200]!r}"
    complaint = _judge_error(reply)
    if complaint or reply.status != 400 or not case.place or _names(case, reply.error):
        return complaint
    return f"the error does not name the field: {reply.error['message']}"


def _names(case: Case, error: dict[str, Any]) -> bool:
    """Return whether an error says which field it is about, or one above it."""
    said = f"{error['param']} {error['message']}"
    words = [step for step in case.place if isinstance(step, str)]
    words += ["lora_path"] if "lora" in case.route else []  # wrong in all cases
    return any(word in said for word in words) or error["code"] in ("context_length_exceeded", "invalid_json")


def _judge_error(reply: Reply) -> str:
    error = reply.error
    try:
        whole = json.loads(reply.body)
    except ValueError:
        return f"not JSON: {reply.body[:100]!r}"
    if set(whole) != {"error"} or set(error) != ERROR_KEYS:
        return f"not an error in OpenAI's shape: {reply.body[:200]!r}"
    if reply.headers.get("content-type") != "application/json":
        return f"content-type {reply.headers.get('content-type')}"
    return _judge_fields(error)


def _judge_fields(error: dict[str, Any]) -> str:
    """Return the fault in message, type, param or code of an error."""
    message, param = error["message"], error["param"]
    if not isinstance(message, str) or not message.strip() or len(message) > 600:
        return f"the message is {message!r:.200}"
    if UNCLEAN.search(message) or re.search(r"0x[0-9a-f]{6,}|\n", message):
        return f"the message is not for clients: {message}"
    if param is not None and len(param) > 200:
        return f"param has {len(param)} characters"
    return "" if error["type"] and error["code"] else "an error without type or code"


def _judge_answer(case: Case, reply: Reply) -> str:
    try:
        text = reply.body.decode()
        if text.endswith("\0"):  # Colossal-Inference's streams
            return "" if all(json.loads(one) for one in text.split("\0")[:-1]) else "an empty part"
        if reply.is_stream:
            return _judge_stream(case, reply)
        if "lora" in case.route:
            return ""
        body = json.loads(text)
        if "error" in body:
            return "an error with status 200"
        _KINDS.get(case.route, _Anything).model_validate(body, strict=True)
        return ""
    except ValueError as error:
        return f"the answer is not valid: {error!s:.200}: {reply.body[:200]!r}"


class _Anything:
    @staticmethod
    def model_validate(body: Any, strict: bool) -> None: ...


def _judge_stream(case: Case, reply: Reply) -> str:
    events = reply.events
    if reply.error:
        return f"the error is not the last event: {events[-1]}" if reply.done else _judge_fields(reply.error)
    if not reply.done:
        return f"a stream without its end: {reply.body[-200:]!r}"
    for one in events:
        for choice in one["choices"]:  # OpenAI's type of a completion knows whole answers only
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        _CHUNKS.get(case.route, _Anything).model_validate(one, strict=True)
    return "" if events else "a stream without events"


# ---------------------------------------------------------------- the service


@dataclass
class Usage:
    """Resources of the service's workers: resident bytes, open files, threads."""

    memory: int
    files: int
    threads: int


class Running:
    """A service over the real engine. impatient: with limits of time of this many seconds."""

    def __init__(self, front: Front, engine: RealEngine):
        self.front, self.engine = front, engine
        self.address: Address = ("127.0.0.1", front.port)
        self.fuzz = FrontFuzz(self.address)

    def usage(self) -> Usage:
        workers = [psutil.Process(pid) for pid in processes.children(self.front.process.pid)]
        return Usage(
            sum(one.memory_info().rss for one in workers),
            sum(one.num_fds() for one in workers),
            sum(one.num_threads() for one in workers),
        )

    def settle(self, before: Usage, timeout_s: float = 20.0) -> str:
        """Wait until nothing is open; what is left, "" for nothing."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.engine.scheduler.has_work and self.usage().files <= before.files + 4:
                return ""
            time.sleep(0.1)
        now = self.usage()
        work = "requests in the engine, " if self.engine.scheduler.has_work else ""
        return f"{work}{now.files} open files; before: {before.files}"


#: shows tools in one word, because the engine takes 128 tokens; calls are Hermes' (<tool_call>)
_TEMPLATE = TEMPLATE + "{% if tools %}tools{% endif %}{# <tool_call> #}"


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[Running]:
    """A service with its engine. options: of the front."""
    model = tiny_llama(vocab_size=TINY_VOCAB, max_position_embeddings=128)
    with contextlib.ExitStack() as stack:
        folder.mkdir(exist_ok=True)
        made = repository(folder / "repo", _TEMPLATE, lora_path="loras")
        (made / "fastertransformer" / "loras").mkdir()
        engine = stack.enter_context(
            RealEngine(
                model,
                tokenizer_dir=made / "text" / "1" / "tokenizer",
                max_sequences=32,
                max_step_tokens=64,
                cache_bytes=32 << 20,
            )
        )
        supervisor = stack.enter_context(FakeSupervisor(engine))  # type: ignore[arg-type]
        environment = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint, "TRIDECODE_REQUEST_LOG": "off"}
        front = stack.enter_context(Front(made, folder / "front.log", *options, **environment))
        yield Running(front, engine)


def report(outcomes: Iterable[Outcome]) -> str:
    """A table of the cases for each route, and the counts."""
    outcomes = list(outcomes)
    statuses = Counter(one.status for one in outcomes)
    slowest = max(outcomes, key=lambda one: one.seconds)
    parts = [
        f"{len(outcomes):,} requests: "
        + ", ".join(f"{n:,} x {status}" for status, n in sorted(statuses.items())),
        f"slowest: {slowest.seconds:.2f} s, {slowest.case}",
    ]
    wrong = [one for one in outcomes if one.complaint]
    parts.append("\n".join(f"- NOT CLEAN: {one.case}: {one.complaint}" for one in wrong))
    bodies = [(one, one.case) for one in outcomes if isinstance(one.case, Case)]
    for route, group in itertools.groupby(bodies, key=lambda pair: pair[1].route):
        rows = [[case.field, case.what, f"{one.status} {one.text}"] for one, case in group]
        parts += [f"## {route}", table(["field", "case", "end"], rows)]
    rows = [[str(one.case), f"{one.status} {one.text}"] for one in outcomes if isinstance(one.case, HttpCase)]
    parts += ["## HTTP", table(["case", "end"], rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--report", type=Path, help="write every case and its end here")
    parser.add_argument(
        "--mixed", type=int, default=100, help="requests with several unusual fields, a route"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--every", type=int, default=1, help="send every Nth case")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tdfront") as folder,
        running(Path(folder), "--manage-adapters") as on,
    ):
        cases = list(on.fuzz.all_cases(arguments.mixed, arguments.seed))[:: arguments.every]
        on.fuzz.run([case for case in cases if isinstance(case, Case) and case.what in LARGE][:20])
        before = on.usage()
        outcomes = on.fuzz.run(cases)
        left, after = on.settle(before), on.usage()
        tail = on.front.text()[-2000:]
    text = report(outcomes)
    if arguments.report:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(text, encoding="utf-8")
    print(text.split("\n##")[0])
    grown, slowest = megabytes(after.memory - before.memory), on.fuzz.slowest_control_s
    print(f"memory grew by {grown}, slowest control {slowest:.2f} s; left: {left or 'nothing'}")
    for one in on.fuzz.changed:
        print(f"a control changed: {one}")
    if "Traceback" in tail:
        print(tail)
    raise SystemExit(1 if left or on.fuzz.changed or any(one.complaint for one in outcomes) else 0)


if __name__ == "__main__":
    main()
