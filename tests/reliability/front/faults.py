"""Kills and stops of every process under streams of the OpenAI service, against the real server and engine.

    python -m tests.reliability.front.faults --streams 64 --seed 3 --only kill:front

Each fault happens while every stream is open. A stream that had begun must end with the text of an
undisturbed run, unless the process that held its connection was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.reliability.faults import pause, signal_to
from tests.reliability.front.calls import Address, Reply, call, post
from tests.reliability.report import table
from tests.reliability.service import Service, build_repository, end_on_sigterm
from tridecode.tools.serve.ports import free_ports, inodes_listening

WORKERS = 2
READY_S = 60.0  # for a server to start, or to recover
END_S = 5.0  # within which a broken stream must end
CALM_S = 1.5  # without a failed probe: the service is back
PROBE_S = 0.2
_PROBE = post("/v1/completions", {"prompt": "x", "max_tokens": 2, "temperature": 0, "ignore_eos": True})


def asks(seed: int, tokens: int) -> dict[str, bytes]:
    """Requests by name: greedy and sampled streams, several samples, token ids."""
    draw = random.Random(seed)
    found = {}
    for number in range(8):
        common = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
        common.update({"temperature": 0} if number % 2 else {"seed": draw.getrandbits(31)})
        prompt = [draw.randrange(3, 300) for _ in range(draw.randint(2, 40))]
        if number % 4 == 3:
            common["n"] = 2
        found[f"ask {number}"] = post("/v1/completions", {"prompt": prompt, **common})
    return found


@dataclass(frozen=True)
class Fault:
    """strike(service): causes the fault; returns a function that ends it after pause_s, or None.

    breaks: streams may end early, because their connections are closed. ends: the server ends, and must leave
    nothing. settle_s: time after which the effect is certain to have begun.
    """

    name: str
    strike: Callable[[Service], Callable[[], None] | None]
    pause_s: float = 0.0
    breaks: bool = False
    ends: bool = False
    settle_s: float = 1.0


FAULTS = [
    Fault("kill:front:0", signal_to("front:0", signal.SIGKILL), breaks=True),
    Fault("stop:front:0", signal_to("front:0", signal.SIGSTOP), settle_s=6.0),
    Fault("kill:front", signal_to("front", signal.SIGKILL), breaks=True),
    Fault("stop:front", signal_to("front", signal.SIGSTOP), settle_s=6.0),
    Fault("kill:rank0", signal_to("rank0", signal.SIGKILL)),
    Fault("stop:rank0", signal_to("rank0", signal.SIGSTOP), settle_s=6.0),
    Fault("kill:supervisor", signal_to("supervisor", signal.SIGKILL)),
    Fault("stop:supervisor", signal_to("supervisor", signal.SIGSTOP), settle_s=6.0),
    Fault("kill:tritonserver", signal_to("tritonserver", signal.SIGKILL)),
    Fault("pause:all", pause("all"), pause_s=6.0),
    Fault("kill:serve", signal_to("serve", signal.SIGKILL), breaks=True, ends=True),
]


@dataclass
class Row:
    """The effects of one fault.

    open: streams that had begun. whole: those that ended with the text of an undisturbed run. broken: those
    whose connection was closed, or that ended with an error. refused: later requests with 503 or without a
    connection. silent_s: longest gap of a stream that was open. back_s: until requests were answered again.
    """

    fault: str
    open: int = 0
    whole: int = 0
    broken: int = 0
    refused: int = 0
    silent_s: float = 0.0
    back_s: float = 0.0
    left: str = ""
    complaints: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        numbers = [str(self.open), str(self.whole), str(self.broken), str(self.refused)]
        times = [f"{self.silent_s:.1f}", f"{self.back_s:.1f}"]
        return [self.fault, *numbers, *times, self.left or "nothing", "FAIL" if self.complaints else "ok"]


HEADS = ["fault", "open", "whole", "broken", "refused", "silent s", "back s", "left", "verdict"]


@dataclass
class Sent:
    name: str
    reply: Reply


class Crowd:
    """Clients that send one stream after the other, and a probe."""

    def __init__(
        self, address: Address, wanted: dict[str, bytes], texts: dict[str, str], streams: int, seed: int
    ):
        self._address, self._asks, self._texts = address, wanted, texts
        self.open: dict[int, Sent] = {}
        self.ended: list[Sent] = []
        self.probes: list[tuple[float, bool]] = []  # (end, whether it was answered)
        self._stopping = False
        self._tasks = [
            asyncio.create_task(self._client(random.Random(f"{seed} {i}"), i)) for i in range(streams)
        ]
        self._probe = asyncio.create_task(self._probe_all())

    async def _client(self, draw: random.Random, number: int) -> None:
        while not self._stopping:
            sent = Sent(draw.choice(sorted(self._asks)), Reply())
            self.open[number] = sent
            await call(self._address, self._asks[sent.name], 120.0, reply=sent.reply)
            del self.open[number]
            self.ended.append(sent)
            if not self.is_whole(sent):
                await asyncio.sleep(0.2)

    async def _probe_all(self) -> None:
        while not self._stopping:
            reply = await call(self._address, _PROBE, 10.0)
            self.probes.append((time.monotonic(), reply.status == 200))
            await asyncio.sleep(PROBE_S)

    def is_whole(self, sent: Sent) -> bool:
        return bool(sent.reply.done) and texts_of(sent.reply) == self._texts[sent.name]

    def back(self, since: float) -> float | None:
        """Return when the last probe failed, `since` if none did; None before CALM_S without a failure."""
        bad = max((at for at, good in self.probes if at > since and not good), default=since)
        good = [at for at, good in self.probes if at > bad and good]
        return bad if good and good[-1] - good[0] >= CALM_S else None

    async def stop(self) -> None:
        """Let open streams end, and send no more."""
        self._stopping = True
        await asyncio.gather(*self._tasks, self._probe)


def texts_of(reply: Reply) -> str:
    """The text of each choice of a stream, in order."""
    found: dict[int, str] = {}
    for event in reply.events:
        for choice in event.get("choices", ()):
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return repr(sorted(found.items()))


class Range:
    """Causes one fault after the other at one server; a new one is started where the last one has ended."""

    def __init__(self, folder: Path, streams: int = 64, seed: int = 1, tokens: int = 160):
        """folder: for the repository of the server."""
        (self.port,) = free_ports(1)
        template = folder / "template.jinja"
        template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
        self._repository = build_repository(
            folder, openai_port=self.port, openai_workers=WORKERS, openai_chat_template=template
        )
        self.address: Address = ("127.0.0.1", self.port)
        self._streams, self._seed = streams, seed
        self._asks = asks(seed, tokens)
        self._texts: dict[str, str] = {}
        self.service: Service | None = None
        self.rows: list[Row] = []

    def start(self) -> None:
        if self.service is not None and not self.service.ended():
            return
        self.service = Service(self._repository)
        deadline = time.monotonic() + READY_S
        while not self._healthy():
            assert time.monotonic() < deadline, "the OpenAI service did not come"
            time.sleep(0.1)
        self._texts = self._texts or asyncio.run(self._undisturbed())

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    async def _undisturbed(self) -> dict[str, str]:
        replies = [await call(self.address, sent) for sent in self._asks.values()]
        assert all(reply.done for reply in replies), [reply.raw[:300] for reply in replies]
        return {name: texts_of(reply) for name, reply in zip(self._asks, replies)}

    def strike(self, fault: Fault) -> Row:
        row = Row(fault.name)
        self.rows.append(row)
        self.start()
        asyncio.run(self._strike(fault, row))
        if fault.ends:
            row.left = self._left()
            if row.left:
                row.complaints.append(f"left behind: {row.left}")
        return row

    async def _strike(self, fault: Fault, row: Row) -> None:
        assert self.service is not None
        crowd = Crowd(self.address, self._asks, self._texts, self._streams, self._seed)
        try:
            await self._wait_open(crowd)
            undo = fault.strike(self.service)
            if undo is not None:
                await asyncio.sleep(fault.pause_s)
                undo()
            struck = time.monotonic()
            open_then = {id(sent) for sent in crowd.open.values() if sent.reply.times}
            if not fault.ends:
                row.back_s = await self._wait_back(fault, row, crowd, struck)
        finally:
            await crowd.stop()
        self._judge(fault, row, crowd, struck, open_then)

    async def _wait_back(self, fault: Fault, row: Row, crowd: Crowd, struck: float) -> float:
        """Wait until the service answers again; return the seconds that this took."""
        await asyncio.sleep(fault.settle_s)
        while (back := crowd.back(struck)) is None:
            if time.monotonic() - struck > READY_S:
                row.complaints.append(f"not back after {READY_S:g} s")
                return READY_S
            await asyncio.sleep(0.1)
        return back - struck

    async def _wait_open(self, crowd: Crowd) -> None:
        deadline = time.monotonic() + READY_S
        while sum(bool(sent.reply.times) for sent in crowd.open.values()) < self._streams * 3 // 4:
            assert time.monotonic() < deadline, "the streams did not open"
            await asyncio.sleep(0.05)

    def _judge(self, fault: Fault, row: Row, crowd: Crowd, struck: float, open_then: set[int]) -> None:
        begun = [sent for sent in crowd.ended if id(sent) in open_then]
        row.open = len(begun)
        whole = [sent for sent in begun if crowd.is_whole(sent)]
        broken = [sent for sent in begun if not crowd.is_whole(sent)]
        row.whole, row.broken = len(whole), len(broken)
        row.silent_s = max((_silence(sent.reply, struck) for sent in whole), default=0.0)
        row.refused = sum(sent.reply.status in (0, 503) for sent in crowd.ended if id(sent) not in open_then)
        for sent in broken:
            late = sent.reply.end - struck
            if not fault.breaks or sent.reply.hang or late > END_S + row.back_s:
                row.complaints.append(f"{sent.name} broke after {late:.1f} s: {_end(sent.reply)}")
        for sent in crowd.ended:
            wrong = sent.reply.done and not crowd.is_whole(sent)
            if wrong or sent.reply.status not in (0, 200, 503):
                row.complaints.append(f"{sent.name}: status {sent.reply.status}, {_end(sent.reply)}")
        row.complaints = row.complaints[:5]

    def _left(self) -> str:
        """Wait until nothing of an ended server remains; return what does."""
        assert self.service is not None
        found = self.service.wait_nothing_left()
        self.service.close()
        self.service = None
        return found + (f"; port {self.port} is open" if inodes_listening(self.port) else "")

    def stop(self) -> str:
        """Stop the server as an operator does; return what is left of it."""
        if self.service is None:
            return ""
        found = self.service.stop()
        return "; ".join(filter(None, [found, self._left()]))

    def close(self) -> None:
        if self.service is not None:
            self.service.close()
            self.service = None

    def table(self) -> str:
        complaints = "".join(f"\n{row.fault}: {one}" for row in self.rows for one in row.complaints)
        return table(HEADS, [row.cells() for row in self.rows]) + complaints


def _silence(reply: Reply, since: float) -> float:
    times = [max(since, reply.start), *(at for at in reply.times if at > since)]
    return max((later - earlier for earlier, later in zip(times, times[1:])), default=0.0)


def _end(reply: Reply) -> str:
    if reply.hang:
        return "no end within the client's limit"
    return reply.broken or str(reply.error or bytes(reply.raw[-200:]))


def by_name(names: Sequence[str]) -> list[Fault]:
    return [fault for fault in FAULTS if not names or fault.name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[])
    arguments = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="tdfaults") as folder:
        strikes = Range(Path(folder), arguments.streams, arguments.seed)
        try:
            for fault in by_name(arguments.only):
                row = strikes.strike(fault)
                print(*row.cells(), *row.complaints, sep=" | ", flush=True)
            left = strikes.stop()
        finally:
            strikes.close()
    print(strikes.table())
    print(f"left at the end: {left or 'nothing'}")
    return 1 if left or any(row.complaints for row in strikes.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
