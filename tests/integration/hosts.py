"""Two network namespaces as hosts that a cable joins, on one machine; needs root.

Every process of a host sees its own loopback interface and one end of a veth pair, and nothing else.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

_CLONE_NEWNET = 0x40000000


def refusal() -> str:
    """Return why network namespaces are not available; "" if they are."""
    name = f"td{uuid4().hex[:6]}"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
    except FileNotFoundError:
        return "there is no program `ip`"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Host:
    """One namespace. interface: its end of the cable."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.interface = f"{name}-c"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        self._calls = ThreadPoolExecutor(8, initializer=self._enter)

    def _enter(self) -> None:
        """Move the calling thread into the namespace."""
        with open(f"/run/netns/{self.name}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """Run a function on a thread of this host."""
        return self._calls.submit(function, *arguments)

    def start(self, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen:
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    def plug(self, state: str) -> None:
        """ "up" or "down": the state of this end of the cable."""
        _ip("-n", self.name, "link", "set", self.interface, state)

    def close(self) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)
        _ip("netns", "del", self.name)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    tag = f"td{os.getpid() % 10000}{threading.get_ident() % 100}"
    made: list[Host] = []
    try:
        for number in (0, 1):
            made.append(Host(f"{tag}{'ab'[number]}", f"10.98.76.{number + 1}"))
        first, second = made
        _ip("-n", first.name, "link", "add", first.interface, "type", "veth",
            "peer", "name", second.interface, "netns", second.name)  # fmt: skip
        for host in made:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            host.plug("up")
        yield first, second
    finally:
        for host in made:
            host.close()
