"""The rank processes of one epoch: started together, watched, and killed together."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from tridecode.backend.messages import SILENCE_S, EngineBeat, RankFailed, RankProgress, RankReady
from tridecode.backend.supervisor import processes

EXIT_GRACE_S = 0.2  # the last messages of a rank that ended arrive within this time
RankMessage = Union[RankReady, RankProgress, RankFailed, EngineBeat]


@dataclass
class Failure:
    """Why an epoch is over. fatal: a restart would fail again in the same way."""

    reason: str
    fatal: bool = False


class Rank:
    """One rank process, in a session of its own, so that its whole tree can be killed."""

    def __init__(self, index: int, command: Sequence[str], now: float) -> None:
        self.index = index
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=processes.die_with_parent
        )
        self.ready = False
        self.progress = "starting python"
        self.beat: EngineBeat | None = None
        self.failed: RankFailed | None = None
        self.heard_at = now
        self.exited_at: float | None = None
        self._killed = False

    def hear(self, message: RankMessage, now: float) -> None:
        self.heard_at = now
        if isinstance(message, RankReady):
            self.ready = True
        elif isinstance(message, RankProgress):
            self.progress = message.what
        elif isinstance(message, RankFailed):
            self.failed = message
        else:
            self.beat = message

    def poll(self, now: float) -> int | None:
        """The return code once the process has ended, as subprocess has it."""
        code = self.process.poll()
        if code is not None and self.exited_at is None:
            self.exited_at = now
        return code

    def kill(self) -> None:
        """SIGKILL to the rank and to its children, which may outlive it."""
        if not self._killed:
            self._killed = True
            processes.kill_group(self.process.pid)


class RankGroup:
    """All ranks of one epoch. Times are monotonic seconds that the caller gives."""

    def __init__(self, commands: Sequence[Sequence[str]], now: float) -> None:
        self.started_at = now
        self.ranks: list[Rank] = []
        try:
            for index, command in enumerate(commands):
                self.ranks.append(Rank(index, command, now))
        except OSError:
            self.kill()
            raise

    @property
    def ready(self) -> bool:
        return all(rank.ready for rank in self.ranks)

    @property
    def load(self) -> tuple[int, int]:
        """Sequences that run and that wait, as rank 0 last said."""
        beat = self.ranks[0].beat
        return (beat.running, beat.waiting) if beat else (0, 0)

    def hear(self, message: RankMessage, now: float) -> None:
        if 0 <= message.rank < len(self.ranks):
            self.ranks[message.rank].hear(message, now)

    def forgive(self, now: float, pause_s: float) -> None:
        """Count silence from now on: this process itself stood still for pause_s."""
        self.started_at += pause_s
        for rank in self.ranks:
            rank.heard_at = now

    def progress(self) -> str:
        """The progress of the ranks that are not ready."""
        if len(self.ranks) == 1:
            return self.ranks[0].progress
        late = [f"rank {rank.index}: {rank.progress}" for rank in self.ranks if not rank.ready]
        return "; ".join(late) or "all ranks are ready"

    def check(self, now: float, start_timeout_s: float, step_timeout_s: float) -> Failure | None:
        """The first cause found of why the epoch is over, or None while all is well."""
        return (
            self._killed(now)
            or self._failed()
            or self._ended(now)
            or self._silent(now)
            or self._stuck(step_timeout_s)
            or self._slow_start(now, start_timeout_s)
        )

    def _killed(self, now: float) -> Failure | None:
        """A rank that a signal ended comes first: the others fail because of it."""
        for rank in self.ranks:
            code = rank.poll(now)
            if code is not None and code < 0 and rank.failed is None:
                return Failure(f"rank {rank.index} was killed by signal {-code}{_signal_hint(-code)}")
        return None

    def _failed(self) -> Failure | None:
        for rank in self.ranks:
            if rank.failed is not None:
                return Failure(f"rank {rank.index}: {rank.failed.error}", rank.failed.fatal)
        return None

    def _ended(self, now: float) -> Failure | None:
        for rank in self.ranks:
            if rank.exited_at is not None and now - rank.exited_at >= EXIT_GRACE_S:
                where = "" if rank.ready else f" while {rank.progress}"
                return Failure(f"rank {rank.index} ended with exit code {rank.process.returncode}{where}")
        return None

    def _silent(self, now: float) -> Failure | None:
        for rank in self.ranks:
            silent = now - rank.heard_at
            if silent < SILENCE_S or rank.exited_at is not None:
                continue
            state = processes.state(rank.process.pid)
            if (
                rank.ready or state == "T"
            ):  # a start may hold the interpreter for long, but it is never stopped
                why = processes.STATE_WORDS.get(state, f"process state {state}")
                return Failure(f"rank {rank.index} has been silent for {silent:.1f} s ({why})")
        return None

    def _stuck(self, step_timeout_s: float) -> Failure | None:
        for rank in self.ranks:
            if rank.beat is not None and rank.beat.busy_s > step_timeout_s:
                return Failure(
                    f"rank {rank.index} has been in one step for {rank.beat.busy_s:.3g} s; "
                    f"step_timeout_s is {step_timeout_s:g}"
                )
        return None

    def _slow_start(self, now: float, start_timeout_s: float) -> Failure | None:
        if self.ready or now - self.started_at < start_timeout_s:
            return None
        doing = "; ".join(
            f"rank {rank.index} {'is ready' if rank.ready else 'was still ' + rank.progress}"
            f"{self._silence(rank, now)}"
            for rank in self.ranks
        )
        return Failure(f"not ready after {start_timeout_s:g} s (start_timeout_s): {doing}")

    @staticmethod
    def _silence(rank: Rank, now: float) -> str:
        silent = now - rank.heard_at
        return f" (silent for {silent:.1f} s)" if silent > SILENCE_S else ""

    def kill(self) -> None:
        """SIGKILL to every rank and its children; `gone` says when they have ended."""
        for rank in self.ranks:
            rank.kill()

    def gone(self) -> bool:
        return all(rank.process.poll() is not None for rank in self.ranks)

    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self.ranks if rank.process.poll() is None]


def _signal_hint(signum: int) -> str:
    hints: dict[int, str] = {
        signal.SIGSEGV: " (segmentation fault)",
        signal.SIGABRT: " (abort)",
        signal.SIGBUS: " (bus error; is /dev/shm or a weight file truncated?)",
    }
    return hints.get(signum, "")


def kill_strays(control: str) -> None:
    """Kill ranks of an earlier supervisor, which hold the devices; their arguments name the endpoint."""
    for pid in processes.all_pids():
        arguments = processes.command_line(pid)
        if pid != os.getpid() and "--control" in arguments and control in arguments:
            process = processes.identify(pid)
            if process is not None:
                processes.kill(process)
