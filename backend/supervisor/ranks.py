"""The rank processes of one epoch: started together, watched, and killed together."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tridecode.backend.supervisor import processes
from tridecode.backend.supervisor.blame import Failure, find_cause, ranks_text
from tridecode.backend.supervisor.digests import Digests
from tridecode.backend.supervisor.rank import LocalProcess, Rank, RankMessage, RankProcess
from tridecode.backend.wire.messages import EngineBeat, RankDigest


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
