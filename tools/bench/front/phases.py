"""The measurements of `tridecode bench front`; each starts a front and an engine of its own."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tridecode.tools.bench.front.engine import EngineSettings
from tridecode.tools.bench.front.processes import Client, environment_of, running

_COMPLETION = {"prompt": " The ferry", "ignore_eos": True, "stream": True, "temperature": 0}
_CHAT = {"messages": [{"role": "user", "content": "When does the ferry leave?"}], "temperature": 0}
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Setting:
    """Values that all phases share. tree: see processes.Front. seconds: of each phase, about."""

    repository: Path
    tokens: list[int]
    vocab_size: int
    client: Path
    tree: Path | None
    seconds: float

    def engine(self, **values: Any) -> EngineSettings:
        return EngineSettings(self.tokens, self.vocab_size, **values)


def streams(setting: Setting, count: int, step_s: float, workers: int = 1) -> dict[str, Any]:
    """Chats of `count` streams, each with one token a step. A chunk is an event that a client has read."""
    tokens = max(16, int(setting.seconds / step_s))
    body = {**_CHAT, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    engine = setting.engine(step_s=step_s)
    with running(setting.repository, engine, workers, setting.tree) as (front, fake):
        before = front.usage()
        client = Client(setting.client, front, _CHATS, body, "-c", str(count), "-n", str(count))
        found = client.finish()[-1]
        after = front.usage()
    sent = count * tokens
    used, system = after.cpu_s - before.cpu_s, (after.cpu_s - after.user_s) - (before.cpu_s - before.user_s)
    return {
        "streams": count,
        "step_ms": 1e3 * step_s,
        "workers": workers,
        "chunks": found["events"],
        "tokens": sent,
        "seconds": found["seconds"],
        "tokens_per_chunk": sent / found["events"],
        "chunks_per_s": found["events_per_s"],
        "tokens_per_s": sent / found["seconds"],
        "cpu_us_per_chunk": 1e6 * used / found["events"],
        "system_us_per_chunk": 1e6 * system / found["events"],
        "cpu_us_per_token": 1e6 * used / sent,
        "cpu_share": used / found["seconds"],
        "first_event_ms": found["first_event_ms"],
        "rss_mb": after.rss_mb,
        "late_steps": fake.counts.late_steps / fake.counts.steps,
    }


def requests(setting: Setting, connections: int = 64, workers: int = 1) -> dict[str, Any]:
    """Whole chats of four tokens over connections that are kept alive."""
    body = {**_CHAT, "max_tokens": 4, "ignore_eos": True}
    engine = setting.engine(step_s=0.001, tokens_per_event=4)
    options = ("-c", str(connections), "-t")
    with running(setting.repository, engine, workers, setting.tree) as (front, _):
        Client(setting.client, front, _CHATS, body, *options, "0.5").finish()
        before = front.usage()
        found = Client(setting.client, front, _CHATS, body, *options, str(setting.seconds)).finish()[-1]
        after = front.usage()
    used = after.cpu_s - before.cpu_s
    return {
        "connections": connections,
        "workers": workers,
        "requests": found["requests"],
        "requests_per_s": found["requests_per_s"],
        "cpu_us_per_request": 1e6 * used / found["requests"],
        "cpu_share": used / found["seconds"],
        "request_ms": found["request_ms"],
        "statuses": found["statuses"],
        "rss_mb": after.rss_mb,
    }


def idle(setting: Setting, count: int) -> dict[str, Any]:
    """Open `count` streams that get one token and no more, then time new requests among them."""
    body = {**_COMPLETION, "max_tokens": 64}
    with running(setting.repository, setting.engine(step_s=0.005, pause_after=1), 1, setting.tree) as (
        front,
        _,
    ):
        empty = front.usage()
        open_ones = Client(
            setting.client, front, _COMPLETIONS, body, "-c", str(count), "-n", str(count), "-i", "-r", "1000"
        )
        opened = open_ones.line()
        full = front.usage()
        idle_s = 2.0
        time.sleep(idle_s)
        later = front.usage()
        alone = Client(setting.client, front, _COMPLETIONS, {**body, "max_tokens": 1}, "-n", "50")
        beside = alone.finish()[-1]
        open_ones.finish()
    return {
        "streams": opened["open"],
        "opened_in_s": opened["after_s"],
        "rss_mb_before": empty.rss_mb,
        "rss_mb": full.rss_mb,
        "kb_per_stream": 1e3 * (full.rss_mb - empty.rss_mb) / max(1, opened["open"]),
        "cpu_share_while_idle": (later.cpu_s - full.cpu_s) / idle_s,
        "first_event_ms_of_a_new_request": beside["first_event_ms"],
    }


def leaving(setting: Setting, events: int, count: int = 40) -> dict[str, Any]:
    """Clients that leave, 150 ms after one another: ms from close() to the engine's Cancel. events: that they
    have read before; 0: none has come yet. A request whose client left before the engine had it needs none.
    """
    body = {**_COMPLETION, "max_tokens": 1 << 14}
    engine = setting.engine(step_s=0.01 if events else 30.0)
    with running(setting.repository, engine, 1, setting.tree) as (front, fake):
        client = Client(setting.client, front, _COMPLETIONS, body, "-n", str(count), "-l", str(events))
        left_at = [line["left_at"] for line in client.finish() if "left_at" in line]
        time.sleep(0.5)
    waits = []
    for left, following in zip(left_at, [*left_at[1:], math.inf]):
        found = [at for at in fake.counts.cancelled_at if left < at < following]
        waits += [1e3 * (at - left) for at in found[:1]]
    return {
        "clients": len(left_at),
        "requests_of_the_engine": fake.counts.requests,
        "cancelled": len(waits),
        "cancel_ms": {"p50": statistics.median(waits), "max": max(waits)},
    }


def importing(setting: Setting, times: int = 5) -> dict[str, Any]:
    """Seconds of processor time to import a worker's modules, beyond an empty interpreter: the least."""
    work = "import time; t = time.process_time(); import tridecode.backend.front.process.worker; "
    work += "print(time.process_time() - t)"

    def once() -> float:
        done = subprocess.run(
            [sys.executable, "-c", work],
            env=environment_of(setting.tree),
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout)

    return {"cpu_s": min(once() for _ in range(times))}
