"""One rank of an epoch: its process, and the messages that it has sent."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Protocol

from tridecode.backend.supervisor import processes
from tridecode.backend.supervisor.host_cache import inherited
from tridecode.backend.wire.messages import EngineBeat, RankDigest, RankFailed, RankProgress, RankReady

RankMessage = RankReady | RankProgress | RankFailed | RankDigest | EngineBeat


class RankProcess(Protocol):
    """The process of a rank, on this node or on another one. pid: on its own node."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The return code once the process has ended, as subprocess has it."""

    def state(self) -> str:
        """Return the one-letter state that ps shows; "" if the process has ended."""

    def kill(self) -> None:
        """Send SIGKILL to the process and to its children, which may outlive it."""


class LocalProcess:
    """A rank on this node, in a process session of its own, so that its whole tree can be killed."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
            pass_fds=(*pass_fds, *inherited(command)),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def state(self) -> str:
        return processes.state(self._process.pid)

    def kill(self) -> None:
        processes.kill_group(self._process.pid)


class Rank:
    """One rank of an epoch, and the messages that it has sent."""

    def __init__(self, index: int, process: RankProcess, now: float) -> None:
        self.index = index
        self.process = process
        self.ready = False
        self.progress = "starting python"
        self.waits_for: list[int] = []
        self.beat: EngineBeat | None = None
        self.failed: RankFailed | None = None
        self.failed_at = 0.0
        self.heard_at = now
        self.exited_at: float | None = None
        self._killed = False

    def hear(self, message: RankMessage, now: float) -> None:
        self.heard_at = now
        if isinstance(message, RankReady):
            self.ready = True
        elif isinstance(message, RankProgress):
            self.progress, self.waits_for = message.what, message.waits_for
        elif isinstance(message, RankFailed):
            self.failed, self.failed_at = message, now
        elif isinstance(message, EngineBeat):
            self.beat = message

    @property
    def exchange(self) -> str:
        """Return the exchange with other ranks, or the GPU synchronisation, in which it waits."""
        return "" if self.beat is None else self.beat.waits

    def poll(self, now: float) -> int | None:
        """The return code once the process has ended, as subprocess has it."""
        code = self.process.poll()
        if code is not None and self.exited_at is None:
            self.exited_at = now
        return code

    def kill(self) -> None:
        """Send SIGKILL to the rank and to its children, which may outlive it."""
        if not self._killed:
            self._killed = True
            self.process.kill()
