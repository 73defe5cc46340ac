"""Runs a function in a process of its own and measures what it costs: for files that exhaust a reader.

The process is forked from one that has imported the readers, so that their imports do not count.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests import forkserver

_KILLED_AFTER_S = 30  # of processor time


@dataclass(frozen=True)
class Outcome:
    """error: of the function, as "Class: text"; "" if it returned. seconds: of processor time, its children's
    included. peak_bytes: memory that it used beyond what its process had; mapped files count."""

    error: str
    seconds: float
    peak_bytes: int


def bounded(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """Measure the cost of function(*arguments). Both must be picklable; the return value is dropped."""
    context = forkserver.context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return Outcome(f"the process ended with {process.exitcode}", float("inf"), 0)
    finally:
        process.join()


def _run(sender: Connection, function: Callable[..., Any], arguments: tuple) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_KILLED_AFTER_S, _KILLED_AFTER_S))
    held = _data_bytes() + (3 << 30)  # no more can be taken from this machine
    resource.setrlimit(resource.RLIMIT_DATA, (held, held))
    before, started = _peak(resource.RUSAGE_SELF), _seconds()
    try:
        function(*arguments)
        error = ""
    except BaseException as fault:
        error = f"{type(fault).__name__}: {fault}"[:2000]
    peak = max(_peak(resource.RUSAGE_SELF) - before, _peak(resource.RUSAGE_CHILDREN))
    sender.send(Outcome(error, _seconds() - started, peak))


def _peak(who: int) -> int:
    return resource.getrusage(who).ru_maxrss * 1024


def _seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _data_bytes() -> int:
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024
