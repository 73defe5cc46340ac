"""Hostile clients of the OpenAI service. Controls run with each kind, and nothing of it may remain.

python -m tests.reliability.front.hostile --connections 10000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import random
import resource
import socket
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from tests.reliability.front.calls import Address, Reply, call, post
from tests.reliability.front.fuzz import CONTROLS, Running, _text_of, running
from tests.reliability.report import megabytes

#: limits of time of the service, in seconds
LIMIT_S = 4.0
STALLED = 3  # each fills the buffers of its sockets first: 7 s of work on a core
TEMPLATE = """{% if mode == 'loop' %}
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{% elif mode == 'memory' %}
{% set n = namespace(x='x' * 10000) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}
{% elif mode == 'deep' %}{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}
{% elif mode == 'escape' %}{{ ''.__class__.__mro__[1].__subclasses__() }}
{% elif mode == 'raise' %}{{ raise_exception('no') }}
{% else %}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}
{% endif %}"""
MODES = ("loop", "memory", "deep", "escape", "raise")
#: more than a socket's buffers hold
_LARGE = {
    "prompt": ["x"] * 16,
    "n": 4,
    "max_tokens": 100,
    "stream": True,
    "logprobs": 20,
    "ignore_eos": True,
}
_LONG = {"prompt": "x", "max_tokens": 120, "stream": True, "ignore_eos": True}


Kind = Callable[[], Coroutine[Any, Any, list[str]]]


async def _nobody() -> list[str]:
    return []


def raise_file_limit(wanted: int) -> int:
    """Allow this process `wanted` connections; return how many it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard - 512)


class Hostile:
    """Each method returns complaints; [] where all is well."""

    def __init__(self, on: Running):
        self._on, self._address = on, on.address
        self.notes: list[str] = []  # for a report

    def run(self, kind: Kind, beside: bool = True) -> list[str]:
        """Run one kind of client, with controls during it or only after it; it must leave nothing."""
        before = self._on.usage()
        found = asyncio.run(self._beside_controls(kind) if beside else kind())
        if left := self._on.settle(before, 30.0):
            found.append(f"left behind: {left}")
        if not beside:
            found += asyncio.run(self._beside_controls(_nobody))
        return found

    async def _beside_controls(self, kind: Kind) -> list[str]:
        task = asyncio.create_task(kind())
        found: list[str] = []
        while True:
            ended = task.done()
            replies = await asyncio.gather(*(call(self._address, sent) for sent in CONTROLS.values()))
            for (name, wanted), reply in zip(self._on.fuzz.references.items(), replies):
                if _text_of(reply) != wanted:
                    found.append(f"the control {name} has {_text_of(reply)!r}; wanted {wanted!r}")
            if ended:
                return [*found[:3], *(await task)]
            await asyncio.sleep(0.1)

    # ------------------------------------------------------------ kinds of clients

    async def slow_senders(self) -> list[str]:
        """Headers a byte at a time, headers and bodies that stop, and connections on which nothing comes."""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n"
        parts = [head[:20], head[:-1], head, head + b'{"prompt": "x"']
        replies = await asyncio.gather(
            *(call(self._address, sent, 10 * LIMIT_S) for sent in parts * 5),
            *(_trickle(self._address, head) for _ in range(5)),
        )
        found = [
            f"a half request ended with {reply.status or reply.broken or 'a hang'}"
            for reply in replies
            if reply.status != 408 or not reply.error
        ]
        silent = await call(self._address, b"", 10 * LIMIT_S)
        return found + (["a silent connection stays open"] if silent.hang else [])

    async def leavers(self) -> list[str]:
        """Clients that close, or reset, at some moment of a request; bodies that end too early."""
        draw = random.Random(5)
        sent = post("/v1/completions", _LONG)
        whole = post("/v1/completions", {**_LONG, "stream": False, "n": 4})

        async def leave() -> None:
            data = draw.choice([sent, whole, sent[:-20], sent[:60]])
            _, writer = await asyncio.open_connection(*self._address)
            writer.write(data)
            await asyncio.sleep(draw.uniform(0, 0.2))
            if draw.random() < 0.5:  # a reset instead of an orderly end
                opened = writer.get_extra_info("socket")
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()

        for _ in range(6):
            await asyncio.gather(*(leave() for _ in range(25)))
        return []

    async def freeing_times(self, count: int, streaming: bool) -> list[float]:
        """Return seconds from a client's close until its slots and blocks are free, one client at a time."""
        scheduler, found = self._on.engine.scheduler, []
        sent = post("/v1/completions", {**_LONG, "stream": streaming, "n": 4})
        free = scheduler.limits.max_sequences
        for _ in range(count):
            _, writer = await asyncio.open_connection(*self._address)
            writer.write(sent)
            await _until(lambda: scheduler.num_running > 0)
            await asyncio.sleep(0.01)
            began = time.monotonic()
            writer.close()
            await _until(lambda: scheduler.cache.num_free_slots >= free and not scheduler.has_work)
            found.append(time.monotonic() - began)
        return found

    async def stalled_readers(self) -> list[str]:
        """Clients with large answers that read nothing: they are cut off, and their requests end."""
        sent = post("/v1/completions", _LARGE)
        stuck = []
        for _ in range(STALLED):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(self._address)
            await asyncio.get_running_loop().sock_sendall(one, sent)
            stuck.append(one)
        try:
            return await self._cut_off(stuck)
        finally:
            for one in stuck:
                one.close()

    async def _cut_off(self, stuck: list[socket.socket]) -> list[str]:
        work, began = self._on.engine.scheduler, time.monotonic()
        for wanted in (True, False):
            while work.has_work != wanted:
                if time.monotonic() - began > 60:
                    return [f"after 60 s requests are {'not open' if wanted else 'still open'}"]
                await asyncio.sleep(0.05)
        self.notes.append(
            f"{STALLED} clients that do not read: all ended after {time.monotonic() - began:.1f} s"
        )
        await asyncio.sleep(LIMIT_S + 2)
        return [one for one in map(_rest_of, stuck) if one]

    async def templates(self) -> list[str]:
        """Templates that loop, fill the memory, recurse, look for the interpreter, or refuse."""
        found = []
        for mode in MODES:
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 2,
                "chat_template_kwargs": {"mode": mode},
            }
            reply = await call(self._address, post("/v1/chat/completions", body))
            if reply.status != 400 or reply.error.get("code") != "invalid_messages":
                found.append(f"{mode}: status {reply.status} {reply.error}")
            self.notes.append(
                f"template {mode}: {reply.end - reply.start:.1f} s, {reply.error.get('message')}"
            )
        return found

    async def idle_connections(self, count: int) -> list[str]:
        before, found = self._on.usage(), []
        async with _idle(self._address, count) as held:
            now = self._on.usage()
            each = (now.memory - before.memory) / max(1, len(held))
            self.notes.append(f"{len(held):,} idle connections: {each / 1000:.1f} KB each")
            if len(held) < count:
                found.append(f"{len(held)} of {count} connections were opened")
            if each > 100_000:
                found.append(f"a connection costs {each:,.0f} bytes")
            await asyncio.sleep(0.5)  # for controls
        return found

    async def surplus_connections(self, limit: int) -> list[str]:
        """Connections beyond the limit. Each is refused with an error."""
        async with _idle(self._address, limit) as held:
            ends = await asyncio.gather(*(self._refused(held) for _ in range(20)))
        return [one for one in ends if one != "refused"][:3]

    async def _refused(self, held: list[Any]) -> str:
        """Hold one connection more; "refused" if it got its error, "" if it is open."""
        reader, writer = await asyncio.open_connection(*self._address)
        held.append(writer)
        try:
            raw = await asyncio.wait_for(reader.read(), 2.0)
        except asyncio.TimeoutError:
            return ""
        reply = Reply(raw=bytearray(raw))
        if reply.status != 503 or reply.error.get("code") != "too_many_connections":
            return f"a connection beyond the limit ended with {raw[:200]!r}"
        return "refused"


async def _until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for a condition, or until the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.001)


async def _trickle(address: Address, head: bytes) -> Reply:
    """Send a byte at a time until there is an answer."""
    reply = Reply()
    reader, writer = await asyncio.open_connection(*address)
    answer = asyncio.create_task(reader.read())
    try:
        for byte in head:
            writer.write(bytes([byte]))
            if (await asyncio.wait([answer], timeout=LIMIT_S / 10))[0]:
                break
        reply.raw += await asyncio.wait_for(answer, 10 * LIMIT_S)
    except (OSError, asyncio.TimeoutError) as error:
        reply.broken = type(error).__name__
    writer.close()
    return reply


def _rest_of(stuck: socket.socket) -> str:
    """Read what a connection still has; it must have been closed, whatever its buffers held."""
    stuck.settimeout(5.0)
    try:
        while stuck.recv(1 << 20):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return "a connection that was not read is still open"
    return ""


@contextlib.asynccontextmanager
async def _idle(address: Address, count: int) -> AsyncIterator[list[Any]]:
    """Open connections that send the beginning of a request, or nothing."""
    held: list[Any] = []
    try:
        while len(held) < count:
            opened = await asyncio.gather(
                *(asyncio.open_connection(*address) for _ in range(min(200, count - len(held)))),
                return_exceptions=True,
            )
            good = [one for one in opened if not isinstance(one, BaseException)]
            held += [writer for _, writer in good]
            if len(good) < len(opened):
                break
        yield held
    finally:
        for writer in held:
            writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    arguments = parser.parse_args()
    count = raise_file_limit(arguments.connections)
    with tempfile.TemporaryDirectory(prefix="tdhostile") as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        complaints: list[str] = []
        options = ["--limit-seconds", str(LIMIT_S), "--chat-template", str(template)]
        with running(Path(folder) / "a", *options) as on:
            clients, before = Hostile(on), on.usage()
            for kind in (clients.slow_senders, clients.leavers, clients.stalled_readers, clients.templates):
                complaints += clients.run(kind)
            for streaming in (True, False):
                times = sorted(asyncio.run(clients.freeing_times(50, streaming)))
                what = "streams" if streaming else "whole answers"
                worst = 1000 * times[-1]
                clients.notes.append(
                    f"{what} left: free after {1000 * times[25]:.1f} ms p50, {worst:.1f} ms max"
                )
            grown = megabytes(on.usage().memory - before.memory)
        with running(Path(folder) / "b", "--max-connections", str(count)) as on:
            many = Hostile(on)
            complaints += many.run(functools.partial(many.idle_connections, count - 100))
            complaints += many.run(functools.partial(many.surplus_connections, count), beside=False)
    print(json.dumps({"notes": [*clients.notes, *many.notes], "memory grew by": grown}, indent=1))
    print("\n".join(complaints) or "no complaint")
    raise SystemExit(1 if complaints else 0)


if __name__ == "__main__":
    main()
