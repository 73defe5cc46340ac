"""The load generator: worker processes that share one spec, and their records."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from tridecode.backend.base.errors import EngineDownError, TridecodeError
from tridecode.tools.bench.load.worker import LoadSpec, Record, clock, work

#: the model of a repository that streams token ids to FasterTransformer's clients
TOKEN_MODEL = "fastertransformer_streaming"

_STREAMS_PER_PROCESS = 16  # at 53 us per response, one process reads 19,000 per second of 64 streams
_HEAD_START_S = 0.2  # seconds from the last process's readiness to the first request
_LOOK_S = 0.1

Progress = Callable[[int], None]


def choose_processes(concurrency: int, cores: int | None = None) -> int:
    """Return one process per 16 streams, at most half the cores: the server uses the others."""
    cores = cores or os.cpu_count() or 1
    return max(1, min(cores // 2, -(-concurrency // _STREAMS_PER_PROCESS)))


def run_load(spec: LoadSpec, progress: Progress | None = None) -> list[Record]:
    """Send the requests of a spec that start within spec.start_within_s; returns their records in order.

    progress: called with the number of requests that have ended. A request that fails is a record with its
    error. Raises EngineDownError where no server answers.
    """
    spec = replace(spec, processes=max(1, min(spec.processes, spec.concurrency, spec.num_requests)))
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    taken, done = context.Value("q", 0), context.Value("q", 0)
    with _processes(context, spec, (taken, done)) as pipes:
        for pipe in pipes:
            said = _receive(pipe)
            if said != "ready":
                raise EngineDownError(said)
        start = clock() + _HEAD_START_S
        for pipe in pipes:
            pipe.send(start)
        while not all(pipe.poll() for pipe in pipes):
            if progress is not None:
                progress(done.value)
            time.sleep(_LOOK_S)
        records = [record for pipe in pipes for record in _receive(pipe)]
    return sorted(records, key=lambda record: record.index)


@contextmanager
def _processes(context: Any, spec: LoadSpec, counters: tuple) -> Iterator[list[Connection]]:
    """The pipes to spec.processes workers, which are ended with the block."""
    pipes, started = [], []
    try:
        for number in range(spec.processes):
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(number, spec, *counters, theirs), daemon=True)
            with _without_interrupts():
                process.start()
            theirs.close()
            pipes.append(mine)
            started.append(process)
        yield pipes
        for process in started:
            process.join(5.0)
    finally:
        for process in started:
            process.kill()
            process.join()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started in the block ignore Ctrl-C: the terminal signals all, and this process ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise TridecodeError("a process of the load generator died; its error is above") from None
