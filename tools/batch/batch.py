"""One run of `tridecode batch`: opens the files, finds or starts the service, runs, and sums up."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.priority import LOWEST_PRIORITY
from tridecode.backend.batches.answer_files import AnswerFiles
from tridecode.backend.batches.lines import InputLines, count_lines
from tridecode.backend.batches.meter import Meter
from tridecode.backend.batches.runner import Runner
from tridecode.backend.batches.sender import Sender
from tridecode.backend.batches.target import Described, Target, describe, service_url
from tridecode.tools.batch.own_service import own_service
from tridecode.tools.batch.progress import BatchProgress, summary
from tridecode.tools.build_repo.cache import Conversion
from tridecode.tools.progress import spinner


@dataclass(frozen=True)
class BatchOptions:
    """The options of the command, with its names. url or model: one of the two; "": not this one."""

    source: Path
    answers: Path
    errors: Path
    url: str = ""
    model: str = ""
    concurrency: int | None = None
    priority: int = LOWEST_PRIORITY
    api_key: str = ""
    served_model_name: tuple[str, ...] = ()
    conversion: Conversion = field(default_factory=Conversion)
    cache: Path | None = None
    timeout_s: float = 3600.0
    patience_s: float = 600.0
    start_timeout_s: float = 900.0

    def check(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        if bool(self.url) == bool(self.model):
            found = "both --url and --model" if self.url else "neither --url nor --model"
            raise ConfigError(f"{found}; wanted the address of a service, or the model to start one for")
        if self.url and (given := self._of_models()):
            raise ConfigError(f"{given} with --url; it is for --model")
        names = {"IN": self.source, "OUT": self.answers, "--errors": self.errors}
        seen: dict[str, str] = {}
        for name, path in names.items():
            real = os.path.realpath(path)
            if real in seen:
                raise ConfigError(f"{seen[real]} and {name} are both {path}; wanted different files")
            seen[real] = name

    def _of_models(self) -> str:
        given = self.conversion.options() + (["--cache"] if self.cache else [])
        return (given + (["--served-model-name"] if self.served_model_name else []) or [""])[0]


def run_batch(options: BatchOptions) -> int:
    """Answer the lines of a file; return the exit code.

    0: every line has an answer. 1: some have an error. 130, 143: stopped by SIGINT or SIGTERM; the same
    command continues. Raises TridecodeError for wrong options and files, and where the service does not start
    or stays away; OSError for files that cannot be read or written.
    """
    options.check()
    with closing(InputLines(options.source)) as lines, AnswerFiles(options.answers, options.errors) as files:
        meter = Meter()
        with _service(options) as (target, described), BatchProgress(meter) as progress:
            lines.priority = options.priority if described.is_ours else None
            meter.restart()
            concurrency = options.concurrency or described.concurrency()
            progress.print(f"{target.url}: {concurrency} requests at a time")
            stopped = -1
            try:
                run = _run(Runner(lines, files, meter), target, concurrency, progress, options)
                stopped = asyncio.run(run)
            finally:
                progress.close()
                progress.print(summary(meter, str(options.errors), stopped != 0))
    if stopped:
        return 128 + stopped
    return 1 if meter.totals.errors else 0


async def _run(
    runner: Runner, target: Target, concurrency: int, progress: BatchProgress, options: BatchOptions
) -> int:
    """Return the signal that stopped the run, 0 at its end."""
    sender = Sender(target, options.patience_s, options.timeout_s)
    stopping = asyncio.Event()
    try:
        with _signals(stopping) as caught, _counted(options.source, runner.meter):
            await runner.run(sender, concurrency, stopping, lambda: progress.show(sender.absence))
    finally:
        await sender.close()
    return caught[0] if caught else 0


@contextmanager
def _counted(source: Path, meter: Meter) -> Iterator[None]:
    """Count the lines of the input in a thread meanwhile."""
    stop = threading.Event()

    def count() -> None:
        with suppress(OSError):  # reading the lines reports it
            lines = count_lines(source, stop.is_set)
            if not stop.is_set():
                meter.counted = lines

    thread = threading.Thread(target=count, name="counting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def _signals(stopping: asyncio.Event) -> Iterator[list[int]]:
    """Let SIGINT and SIGTERM end the run in order; the value gets the first one."""
    loop, caught = asyncio.get_running_loop(), list[int]()

    def note(signum: int) -> None:
        caught.append(signum)
        stopping.set()

    handled = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    for signum in handled:
        loop.add_signal_handler(signum, note, signum)
    try:
        yield caught
    finally:
        for signum in handled:
            loop.remove_signal_handler(signum)


@contextmanager
def _service(options: BatchOptions) -> Iterator[tuple[Target, Described]]:
    """Find the service, or run one while the block runs, and wait until it is ready."""
    if options.url:
        target = Target(service_url(options.url), options.api_key)
        with spinner(f"waiting for {target.url}") as show:
            described = describe(target, options.patience_s, show)
        yield target, described
        return
    try:
        from tridecode.tools.build_repo.find_repository import find_repository  # imports torch
    except ImportError as error:
        raise ConfigError(f"{error}; wanted: pip install 'tridecode[engine,front]'") from None

    repository = find_repository(options.model, options.conversion, options.cache)
    with own_service(repository, options.served_model_name) as target:
        with spinner(f"starting the engine of {repository}") as show:
            described = describe(target, options.start_timeout_s, show, starts=True)
        yield target, described
