"""Finds the rank that caused the end of an epoch, rather than the ranks that failed because of it.

A rank that dies breaks the connections of the others, and a rank that hangs makes them wait. Their reports
may arrive first, so a report of a lost peer waits LOST_GRACE_S for its cause.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tridecode.backend.supervisor import processes
from tridecode.backend.supervisor.rank import Rank
from tridecode.backend.wire.messages import SILENCE_S

EXIT_GRACE_S = 0.2  # the last messages of a rank that ended arrive within this time
LOST_GRACE_S = 1.5  # a rank that lost another one is not blamed before this time
# sleep of a loop's thread (loop_watch); the watch starts again, within 5 s, while other threads are busy
ASLEEP_S = 2.5
SUSPECT_S = 1.0  # four heartbeats: silence that is not a fault by itself, but explains why others wait


@dataclass
class Failure:
    """The reason for the end of an epoch. fatal: a restart would fail again in the same way."""

    reason: str
    fatal: bool = False


def find_cause(
    ranks: Sequence[Rank], now: float, started_at: float, start_timeout_s: float, step_timeout_s: float
) -> Failure | None:
    """Return why the epoch is over, or None while all is well or the cause may still show."""
    return (
        _killed(ranks, now)
        or _failed(ranks)
        or _ended(ranks, now)
        or _silent(ranks, now)
        or _lost(ranks, now)
        or _asleep(ranks)
        or _stuck(ranks, now, step_timeout_s)
        or _slow_start(ranks, now, started_at, start_timeout_s)
    )


# ---------------------------------------------------------------- each cause


def _killed(ranks: Sequence[Rank], now: float) -> Failure | None:
    """Check ranks that a signal ended first: the others fail because of them. An abort may itself be a
    consequence: libraries of communication abort when a peer is lost.
    """
    dead = []
    for rank in ranks:
        code = rank.poll(now)
        if code is not None and code < 0 and (rank.failed is None or rank.failed.cause == "peer"):
            dead.append((rank, -code))
    others = [(rank, number) for rank, number in dead if number != signal.SIGABRT]
    late = all(rank.exited_at is not None and now - rank.exited_at >= LOST_GRACE_S for rank, _ in dead)
    if others or (dead and (late or len(ranks) == 1)):
        first = min(others or dead, key=lambda item: item[0].exited_at or now)[1]
        same = [rank.index for rank, number in others or dead if number == first]
        were = "was" if len(same) == 1 else "were"
        return Failure(f"{ranks_text(same)} {were} killed by signal {first}{_signal_hint(first)}")
    return None


def _failed(ranks: Sequence[Rank]) -> Failure | None:
    """Check faults of a single rank, and faults whose error names the ranks."""
    for rank in ranks:
        if rank.failed is not None and rank.failed.cause != "peer":
            where = "" if rank.failed.cause == "group" else f"rank {rank.index}: "
            return Failure(where + rank.failed.error, rank.failed.fatal)
    return None


def _ended(ranks: Sequence[Rank], now: float) -> Failure | None:
    for rank in ranks:
        code = rank.process.poll()
        if rank.failed is not None or rank.exited_at is None or code is None or code < 0:
            continue
        if now - rank.exited_at >= EXIT_GRACE_S:
            where = "" if rank.ready else f" while {rank.progress}"
            return Failure(f"rank {rank.index} ended with exit code {code}{where}")
    return None


def _silent(ranks: Sequence[Rank], now: float) -> Failure | None:
    """Check silence.

    A ready rank must send heartbeats; a starting one may hold the interpreter for long, but must not be
    stopped.
    """
    found = []
    for rank in _living(ranks):
        if now - rank.heard_at >= SILENCE_S:
            state = rank.process.state()
            if rank.ready or _stopped(state):
                found.append((not _stopped(state), rank.heard_at, rank, state))
    if not found:
        return None
    rank, state = min(found, key=lambda item: item[:2])[2:]
    return Failure(f"rank {rank.index} has been silent for {now - rank.heard_at:.1f} s ({_words(state)})")


def _lost(ranks: Sequence[Rank], now: float) -> Failure | None:
    """Check ranks that report the loss of another one whose own failure is not known."""
    victims = [rank for rank in ranks if rank.failed is not None and rank.failed.cause == "peer"]
    if not victims:
        return None
    first = min(victims, key=lambda rank: rank.failed_at)
    names = ranks_text(rank.index for rank in victims)
    seen = f"{names} lost the connection to it"
    for rank in _living(ranks):
        if rank not in victims and _stopped(rank.process.state()):
            return Failure(f"rank {rank.index} is {_words(rank.process.state())}; {seen}")
    waited = now - first.failed_at
    ending = [rank for rank in ranks if rank not in victims and rank.process.state() in ("X", "Z")]
    if waited < LOST_GRACE_S or (ending and waited < 2 * LOST_GRACE_S):
        return None
    if ending:
        return Failure(f"rank {ending[0].index} is ending; {seen}")
    assert first.failed is not None
    silent = [rank for rank in _living(ranks) if rank not in victims and now - rank.heard_at >= SUSPECT_S]
    if silent:
        since = now - silent[0].heard_at
        return Failure(f"rank {silent[0].index} has been silent for {since:.1f} s; {seen}")
    return Failure(f"{names} lost the connection to another rank: {first.failed.error}")


def _asleep(ranks: Sequence[Rank]) -> Failure | None:
    """Check for a rank whose loop sleeps without a reason while all other ranks wait."""
    for rank in _living(ranks):
        if rank.beat is None or rank.beat.asleep_s < ASLEEP_S or any(map(_computes, ranks)):
            continue
        where = "a step" if rank.beat.busy_s else "its loop between two steps"
        return Failure(
            f"rank {rank.index} has been asleep in {where} for {rank.beat.asleep_s:.1f} s, in "
            f"{rank.beat.asleep_in}, and waits for no other rank nor its GPU{_waits(ranks)}"
        )
    return None


def _computes(rank: Rank) -> bool:
    """Return whether the rank is in a step and neither waits nor sleeps."""
    beat = rank.beat
    return beat is not None and beat.busy_s > 0.0 and not beat.waits and not beat.asleep_s


def _waits(ranks: Sequence[Rank]) -> str:
    """Describe the calls in which ranks of a step wait, each part prefixed with "; "."""
    waiting = [(rank.beat.waits, rank) for rank in ranks if rank.beat is not None and rank.beat.waits]
    return "".join(
        f"; {ranks_text(rank.index for rank in group)} wait{'s' if len(group) == 1 else ''} in {what}"
        for what, group in _grouped(waiting)
    )


def _stuck(ranks: Sequence[Rank], now: float, step_timeout_s: float) -> Failure | None:
    """Check for a step that takes too long, and blame the rank that the others wait for."""
    stuck = [rank for rank in ranks if rank.beat is not None and rank.beat.busy_s > step_timeout_s]
    if not stuck:
        return None
    longest = max(rank.beat.busy_s for rank in stuck if rank.beat is not None)
    where = f"has been in one step for {longest:.3g} s; step_timeout_s is {step_timeout_s:g}"
    if len(ranks) == 1:
        return Failure(f"rank {stuck[0].index} {where}")
    waiting = [rank for rank in ranks if rank.beat is not None and rank.beat.waits]
    waits = _waits(ranks)
    for rank in _living(ranks):
        state, silent = rank.process.state(), now - rank.heard_at
        if _stopped(state) or silent >= SUSPECT_S:
            found = f"rank {rank.index} has been silent for {silent:.1f} s ({_words(state)})"
            return Failure(f"{found}; a step {where}{waits}")
    culprits = _slowest([rank for rank in ranks if rank not in waiting] or list(ranks))
    return Failure(f"{ranks_text(rank.index for rank in culprits)} {_plural(where, culprits)}{waits}")


def _slow_start(
    ranks: Sequence[Rank], now: float, started_at: float, start_timeout_s: float
) -> Failure | None:
    if all(rank.ready for rank in ranks) or now - started_at < start_timeout_s:
        return None
    return Failure(f"not ready after {start_timeout_s:g} s (start_timeout_s): {describe_start(ranks, now)}")


def describe_start(ranks: Sequence[Rank], now: float) -> str:
    """Describe which ranks wait for which, and what the awaited ranks do."""
    if len(ranks) == 1:
        return f"rank {ranks[0].index} was still {ranks[0].progress}{_silence(ranks[0], now)}"
    by_index = {rank.index: rank for rank in ranks}
    waiting = [rank for rank in ranks if not rank.ready and rank.waits_for]
    awaited = {index for rank in waiting for index in rank.waits_for}
    exchanging = [rank for rank in ranks if not rank.ready and rank not in waiting and rank.exchange]
    late = [rank for rank in ranks if not rank.ready and rank not in waiting + exchanging]
    named = [by_index[index] for index in sorted(awaited) if index in by_index and by_index[index] in late]
    parts = [
        f"{ranks_text(rank.index for rank in group)} wait{'s' if len(group) == 1 else ''} in {what!r} for "
        f"{ranks_text(awaited_by)}"
        for (what, awaited_by), group in _grouped(
            ((rank.progress, tuple(rank.waits_for)), rank) for rank in waiting
        )
    ]
    parts += [
        f"{ranks_text(rank.index for rank in group)} wait{'s' if len(group) == 1 else ''} in {what} "
        f"({progress!r})"
        for (what, progress), group in _grouped(((rank.exchange, rank.progress), rank) for rank in exchanging)
    ]
    which = ", which is " if len(named) == 1 and len(parts) == 1 and late == named else "; "
    doing = "; ".join(
        f"{'' if which != '; ' else f'rank {rank.index} is '}{rank.progress!r}{_silence(rank, now)}"
        for rank in late
    )
    ready = [rank.index for rank in ranks if rank.ready]
    tail = f"; {ranks_text(ready)} {'is' if len(ready) == 1 else 'are'} ready" if ready else ""
    return ("; ".join(parts) + which if parts else "") + doing + tail if doing else "; ".join(parts) + tail


# ---------------------------------------------------------------- words


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 2" or "ranks 0, 1"."""
    numbers = sorted(ranks)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _plural(where: str, ranks: Sequence[Rank]) -> str:
    return where if len(ranks) == 1 else "have" + where[3:]


def _living(ranks: Sequence[Rank]) -> list[Rank]:
    return [rank for rank in ranks if rank.exited_at is None]


def _slowest(ranks: Sequence[Rank]) -> list[Rank]:
    """Return the ranks that have done the fewest steps."""
    fewest = min(rank.beat.steps if rank.beat else 0 for rank in ranks)
    return [rank for rank in ranks if (rank.beat.steps if rank.beat else 0) == fewest]


def _grouped(items: Iterable[tuple]) -> list[tuple]:
    """Group (key, value) pairs into (key, [value, …]), in order of each key's first value."""
    found: dict = {}
    for key, value in items:
        found.setdefault(key, []).append(value)
    return list(found.items())


def _stopped(state: str) -> bool:
    return state in ("T", "t")


def _words(state: str) -> str:
    return processes.STATE_WORDS.get(state, f"process state {state or 'unknown'}")


def _silence(rank: Rank, now: float) -> str:
    silent = now - rank.heard_at
    if silent <= SILENCE_S:
        return ""
    stopped = _stopped(rank.process.state())
    return f" and has been silent for {silent:.0f} s" + (f" ({_words('T')})" if stopped else "")


def _signal_hint(signum: int) -> str:
    hints: dict[int, str] = {
        signal.SIGSEGV: " (segmentation fault)",
        signal.SIGABRT: " (abort)",
        signal.SIGBUS: " (bus error; is /dev/shm or a weight file truncated?)",
    }
    return hints.get(signum, "")
