"""`tridecode bench batches`: first tokens of clients and tokens per second of a batch, alone and together.

One service runs all phases of a round: clients alone, the batch alone, both. Ratios are within a round, since
a machine changes its speed between runs.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.front.batches.objects import FINAL
from tridecode.tools.bench.engines.server import engine_settings
from tridecode.tools.bench.front.engine import EngineSettings
from tridecode.tools.bench.front.processes import FakeEngine, Front
from tridecode.tools.bench.front.setup import make_repository
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.reports.report import check_output, table, write_report
from tridecode.tools.bench.shapes.random_repo import write_random_repository

_READY_S = 600.0
_FAKE_STEP_S = 0.01
_COLUMNS = {
    "phase": "",
    "requests": "requests",
    "first_p50_ms": "first token p50 ms",
    "first_p95_ms": "p95",
    "client_tokens_s": "clients tokens/s",
    "batch_tokens_s": "batch tokens/s",
}


@dataclass(frozen=True)
class BatchPlan:
    """lines: of the batch. rate: requests of clients per second, arriving at random. seconds: of each phase.
    prompt_tokens, output_tokens: of each line and request. slots: sequences that the engine computes at once.
    """

    lines: int = 10_000
    rate: float = 4.0
    seconds: float = 30.0
    rounds: int = 1
    prompt_tokens: int = 256
    output_tokens: int = 64
    slots: int = 64


def run_batches(plan: BatchPlan, job: Job | None, output: Path) -> Path:
    """Measure, print a table and write front-batches.json, whose path is returned.

    job: of the engine; None: a fake one that computes all sequences at once. Raises TridecodeError.
    """
    check_output(output)
    rows: list[dict[str, Any]] = []
    with _service(job, plan.slots) as (front, vocab_size):
        for number in range(plan.rounds):
            rows += asyncio.run(_round(plan, front, vocab_size, number))
    console = Console()
    shown = [[row[key] for key in _COLUMNS] for row in rows]
    console.print(table("batches and clients", list(_COLUMNS.values()), shown))
    ratios = [_ratios(rows[begin : begin + 3]) for begin in range(0, len(rows), 3)]
    for found in ratios:
        text = f"together: p95 of the first token x {found['first_p95']:.3f}"
        text += f", the batch's tokens/s x {found['batch']:.3f}, all tokens/s x {found['all']:.3f}"
        console.print(text, highlight=False)
    results = {"rows": rows, "ratios": ratios}
    settings = {**asdict(plan), "job": None if job is None else asdict(job)}
    report = write_report(output / "front-batches.json", "front-batches", settings, results)
    console.print(f"wrote {report}", highlight=False, soft_wrap=True)
    return report


def _ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the ratios of both together to each alone; all: tokens of both to those of the batch alone."""
    clients, batch, both = rows
    every = both["client_tokens_s"] + both["batch_tokens_s"]
    return {
        "first_p95": both["first_p95_ms"] / clients["first_p95_ms"],
        "batch": both["batch_tokens_s"] / batch["batch_tokens_s"],
        "all": every / batch["batch_tokens_s"],
    }


@contextmanager
def _service(job: Job | None, slots: int) -> Iterator[tuple[Front, int]]:
    with tempfile.TemporaryDirectory(prefix="bench-batches-") as name:
        folder = Path(name)
        options = ("--batch-dir", str(folder / "store"))
        if job is not None:
            settings = engine_settings(job, job.shape)
            repository = write_random_repository(folder / "repository", job.shape, settings)
            front = Front(repository, folder, "", 1, None, _READY_S, options)
            fake, vocab_size = None, job.shape.vocab_size
        else:
            repository, tokens, vocab_size = make_repository(folder / "repository")
            fake = FakeEngine(folder, EngineSettings(tokens, vocab_size, _FAKE_STEP_S, max_sequences=slots))
            front = Front(repository, folder, fake.control, 1, None, _READY_S, options)
        try:
            yield front, vocab_size
        finally:
            front.close()
            if fake is not None:
                fake.close()


async def _round(plan: BatchPlan, front: Front, vocab_size: int, number: int) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{front.port}", timeout=600, limits=limits
    ) as http:
        draw = random.Random(number)
        clients = _Clients(http, plan, vocab_size, draw)
        await clients.run(min(5.0, plan.seconds))  # warm
        rows = [_row("clients alone", await clients.run(plan.seconds), 0.0)]
        batch = _Batch(http, plan, vocab_size, draw)
        await batch.start()
        try:
            await batch.wait_busy()
            rows.append(_row("batch alone", [], await batch.speed(plan.seconds)))
            times, speed = await asyncio.gather(clients.run(plan.seconds), batch.speed(plan.seconds))
            rows.append(_row("both", times, speed))
        finally:
            await batch.end()
    for row in rows:
        row["client_tokens_s"] = row["requests"] * plan.output_tokens / plan.seconds
    return rows


def _row(phase: str, firsts: list[float], speed: float) -> dict[str, Any]:
    found = sorted(firsts)
    return {
        "phase": phase,
        "requests": len(found),
        "first_p50_ms": 1e3 * statistics.median(found) if found else None,
        "first_p95_ms": 1e3 * found[min(len(found) - 1, round(0.95 * len(found)))] if found else None,
        "batch_tokens_s": speed,
    }


def _body(plan: BatchPlan, vocab_size: int, draw: random.Random) -> dict[str, Any]:
    """A request whose prompt has no beginning in common with others."""
    prompt = [draw.randrange(vocab_size // 8, vocab_size // 2) for _ in range(plan.prompt_tokens)]
    return {"prompt": prompt, "max_tokens": plan.output_tokens, "temperature": 0, "ignore_eos": True}


class _Clients:
    """Streams that arrive at random. The same times and prompts in each run."""

    def __init__(self, http: httpx.AsyncClient, plan: BatchPlan, vocab_size: int, draw: random.Random):
        self._http, self._plan = http, plan
        gaps = [draw.expovariate(plan.rate) for _ in range(round(plan.rate * plan.seconds * 2) + 10)]
        self._asks = [(gap, _body(plan, vocab_size, draw)) for gap in gaps]

    async def run(self, seconds: float) -> list[float]:
        """Return the seconds until the first token of each request that began within the time."""
        began, tasks = time.monotonic(), []
        for gap, body in self._asks:
            await asyncio.sleep(gap)
            if time.monotonic() - began > seconds:
                break
            tasks.append(asyncio.create_task(self._first(body)))
        return await asyncio.gather(*tasks)

    async def _first(self, body: dict[str, Any]) -> float:
        began, first = time.monotonic(), 0.0
        async with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for _ in response.aiter_bytes():
                first = first or time.monotonic() - began
        if response.status_code != 200:
            raise TridecodeError(f"a request of the clients got {response.status_code}")
        return first


class _Batch:
    def __init__(self, http: httpx.AsyncClient, plan: BatchPlan, vocab_size: int, draw: random.Random):
        self._http, self._plan, self._vocab_size, self._draw = http, plan, vocab_size, draw
        self._id = ""

    async def start(self) -> None:
        lines = []
        for number in range(self._plan.lines):
            body = _body(self._plan, self._vocab_size, self._draw)
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            lines.append(json.dumps(line))
        content = "\n".join(lines).encode()
        found = await self._http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", content)})
        wanted = {
            "input_file_id": found.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        self._id = (await self._http.post("/v1/batches", json=wanted)).json()["id"]

    async def _lines(self) -> int:
        found = (await self._http.get(f"/v1/batches/{self._id}")).json()
        counts = found["request_counts"]
        if counts["failed"] or found["status"] not in ("validating", "in_progress"):
            raise TridecodeError(
                f"the batch is {found['status']} with {counts}; wanted one that runs: --lines"
            )
        return counts["completed"]

    async def wait_busy(self) -> None:
        """Wait until twice the lines that are open at once have been answered."""
        while await self._lines() < min(500, self._plan.lines // 4):
            await asyncio.sleep(0.2)

    async def speed(self, seconds: float) -> float:
        """Return the tokens per second, between two changes of the count."""
        began, before = await self._change()
        await asyncio.sleep(seconds)
        ended, after = await self._change()
        return (after - before) * self._plan.output_tokens / (ended - began)

    async def _change(self) -> tuple[float, int]:
        first = await self._lines()
        while (now := await self._lines()) == first:
            await asyncio.sleep(0.02)
        return time.monotonic(), now

    async def end(self) -> None:
        await self._http.post(f"/v1/batches/{self._id}/cancel")
        while (await self._http.get(f"/v1/batches/{self._id}")).json()["status"] not in FINAL:
            await asyncio.sleep(0.2)
