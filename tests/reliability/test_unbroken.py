"""The engine is killed under 64 streams: 64 whole texts, and a gap of the time that the rebuild takes."""

from __future__ import annotations

import random
import re
import time
import urllib.request
from datetime import datetime
from pathlib import Path

import pytest

from tests.reliability.forms import FREE, form_of
from tests.reliability.service import Service
from tests.reliability.traffic import Ask, Clients, text_ask, token_ask
from tests.reliability.wire import Outcome
from tests.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.nightly]

STREAMS = 64
TOKENS = 400
SLACK_S = 2.0  # detection, the first step of all prompts, and the load of the machine


def asks() -> list[Ask]:
    """Return greedy and sampled streams of texts (some with a form) and of ids, with different prompts."""
    made, draw = [], random.Random("forms")
    for number in range(STREAMS):
        seed = None if number % 4 < 2 else 2**62 + number
        name = f"stream {number}"
        if number % 2:
            text = f"{number} boats and the small harbour"
            form = form_of(draw, TOKENS) if number % 8 in (1, 3) else FREE
            made.append(text_ask(name, "tensorrt_llm_bls", "grpc_stream", text, TOKENS, seed, form))
        else:
            prompt = [5 + number, 9, 11, 3 + 2 * number]
            made.append(token_ask(name, "fastertransformer_streaming", "grpc_stream", prompt, TOKENS, seed))
    return made


def moment(log: str, text: str) -> float:
    """Seconds since the Unix epoch of the last line of the log with this text."""
    line = next(line for line in reversed(log.splitlines()) if text in line)
    found = re.match(r"(\d+-\d+-\d+ \d+:\d+:\d+),(\d+)", line)
    assert found, line
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(found[2]) / 1000


def resumed(service: Service) -> float:
    """Requests that another engine continued, by the page of metrics, of all doors."""
    with urllib.request.urlopen(f"http://127.0.0.1:{service.server.metrics_port}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("tridecode_resumed_requests_total{")
    )


def test_64_streams_of_a_killed_engine_are_whole(repository: Path) -> None:
    service = Service(repository)
    clients = Clients(service.grpc, service.http)
    try:
        wanted_of = asks()
        wanted = clients.digests(wanted_of)
        outcomes = [Outcome(time.monotonic()) for _ in wanted_of]
        work = [
            clients.loop.start(ask.send(clients.grpc, clients.http, 120.0, outcome))
            for ask, outcome in zip(wanted_of, outcomes)
        ]
        wait_until(lambda: all(len(outcome.progress) > 2 for outcome in outcomes), 60, "the first tokens")
        assert not any(outcome.kind for outcome in outcomes), "a stream ended before the kill"
        killed, killed_at = time.monotonic(), time.time()
        service.roles()["rank0"].kill()
        for one in work:
            one.result(120)
        assert [outcome.kind for outcome in outcomes] == ["answer"] * STREAMS
        found = {ask.name: ask.digest(outcome) for ask, outcome in zip(wanted_of, outcomes)}
        assert found == wanted
        assert not [ask.name for ask, outcome in zip(wanted_of, outcomes) if ask.fault(outcome)]
        rebuilt_s = moment(service.log(), "is ready") - killed_at
        gap_s = max(outcome.silence_after(killed) for outcome in outcomes)
        print(f"{STREAMS} of {STREAMS} texts equal; longest gap {gap_s:.1f} s, rebuild {rebuilt_s:.1f} s")
        assert gap_s < rebuilt_s + SLACK_S
        wait_until(lambda: resumed(service) == STREAMS, 60, "the page of metrics")
        counts = re.findall(r"another engine continues (\d+) requests", service.log())
        assert sum(map(int, counts)) == STREAMS
    finally:
        clients.close()
        left = service.stop()
        service.close()
    assert not left
