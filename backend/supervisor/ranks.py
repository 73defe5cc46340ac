"""The rank processes of one epoch: started together, watched, and killed together."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Protocol, Union

from tridecode.backend.supervisor import processes
from tridecode.backend.supervisor.blame import Failure, find_cause, ranks_text
from tridecode.backend.supervisor.digests import Digests
from tridecode.backend.wire.messages import EngineBeat, RankDigest, RankFailed, RankProgress, RankReady

RankMessage = Union[RankReady, RankProgress, RankFailed, RankDigest, EngineBeat]


class RankProcess(Protocol):
    """The process of a rank, on this node or on another one. pid: on its own node."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The return code once the process has ended, as subprocess has it."""

    def state(self) -> str:
        """The one-letter state that ps shows; "" if there is no such process."""

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
            pass_fds=pass_fds,
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


class RankGroup:
    """All ranks of one epoch. Times are monotonic seconds that the caller gives."""

    def __init__(self, commands: Sequence[Sequence[str]], now: float) -> None:
        self.started_at = now
        self._digests = Digests()
        self.ranks: list[Rank] = []
        try:
            for index, command in enumerate(commands):
                self.ranks.append(Rank(index, self.start(index, command), now))
        except OSError:
            self.kill()
            raise

    def start(self, index: int, command: Sequence[str]) -> RankProcess:
        """Start one rank; a group over several nodes starts some of them elsewhere."""
        return LocalProcess(command)

    @property
    def ready(self) -> bool:
        return all(rank.ready for rank in self.ranks)

    @property
    def load(self) -> tuple[int, int]:
        """Return the numbers of running and waiting sequences that rank 0 reported last."""
        beat = self.ranks[0].beat
        return (beat.running, beat.waiting) if beat else (0, 0)

    def hear(self, message: RankMessage, now: float) -> None:
        if not 0 <= message.rank < len(self.ranks):
            return
        self.ranks[message.rank].hear(message, now)
        if len(self.ranks) == 1:
            return
        if isinstance(message, RankDigest):
            self._digests.hear(message)
        elif isinstance(message, EngineBeat) and message.digest_steps:
            tokens = RankDigest(message.epoch, message.rank, message.digest_steps, message.digest)
            self._digests.hear(tokens)

    def forgive(self, now: float, pause_s: float) -> None:
        """Subtract a pause of this process, of pause_s seconds, from the ranks' silence."""
        self.started_at += pause_s
        for rank in self.ranks:
            rank.heard_at = now

    def progress(self) -> str:
        """Describe the progress of the ranks that are not ready."""
        if len(self.ranks) == 1:
            return self.ranks[0].progress
        late = [f"rank {rank.index}: {rank.progress}{_waits(rank)}" for rank in self.ranks if not rank.ready]
        return "; ".join(late) or "all ranks are ready"

    def check(self, now: float, start_timeout_s: float, step_timeout_s: float) -> Failure | None:
        """Return the first cause found for the end of the epoch, or None while all is well."""
        cause = find_cause(self.ranks, now, self.started_at, start_timeout_s, step_timeout_s)
        return cause or self._digests.cause(now)

    def living(self) -> str:
        """Describe the ranks that have not ended, and what their processes do; "" if all have ended."""
        return "; ".join(
            f"{ranks_text([rank.index])} ({processes.STATE_WORDS.get(rank.process.state(), 'busy')})"
            for rank in self.ranks
            if rank.process.poll() is None
        )

    def kill(self) -> None:
        """Send SIGKILL to every rank and its children; `gone` returns when they have ended."""
        for rank in self.ranks:
            rank.kill()

    def gone(self) -> bool:
        return all(rank.process.poll() is not None for rank in self.ranks)

    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self.ranks if rank.process.poll() is None]


def _waits(rank: Rank) -> str:
    if rank.waits_for:
        return f" (waits for {ranks_text(rank.waits_for)})"
    return f" (waits in {rank.exchange})" if rank.exchange else ""


def kill_strays(control: str) -> None:
    """Kill ranks of an earlier supervisor, which hold the devices; their arguments name the endpoint."""
    for pid in processes.all_pids():
        arguments = processes.command_line(pid)
        if pid != os.getpid() and "--control" in arguments and control in arguments:
            process = processes.identify(pid)
            if process is not None:
                processes.kill(process)
