"""Progress of long operations, in bytes or in shares of the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

_LINE_S = 30.0


class _Lines:
    """Progress as lines of a log. Safe from several threads. in_bytes: also bytes done and MB/s."""

    def __init__(self, console: Console, title: str, total: int, in_bytes: bool):
        self._console, self._title, self._total, self._in_bytes = console, title, total, in_bytes
        self._done, self._started, self._lock = 0, time.monotonic(), threading.Lock()
        self._last_line = self._started

    def advance(self, done: int) -> None:
        with self._lock:
            self._done += done
            now = time.monotonic()
            if now - self._last_line < _LINE_S:
                return
            self._last_line = now
            share, speed = self._done / max(self._total, 1), self._done / (now - self._started)
            parts = [f"{self._title}: {share:.0%}"]
            if self._in_bytes:
                parts += [f"{self._done:,} bytes", f"{speed / 1e6:,.0f} MB/s"]
            parts.append(f"about {_left(share, now - self._started)} left")
        self._console.print(", ".join(parts), highlight=False, markup=False, soft_wrap=True)


def _left(share: float, elapsed_s: float) -> str:
    """Return the remaining time at the speed so far, as minutes:seconds or hours:minutes:seconds."""
    seconds = round(elapsed_s * (1 - share) / share) if share > 0 else None
    if seconds is None:
        return "-:--"
    minutes, seconds = divmod(max(seconds, 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class _LeftColumn(ProgressColumn):
    """A column of the remaining time: Rich's own forgets steps older than 30 s, so it shows none for slow
    work.
    """

    def render(self, task: Task) -> Text:
        share = task.completed / task.total if task.total else 0.0
        return Text(f"{_left(share, task.elapsed or 0.0)} left", style="progress.remaining")


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show `title` on stderr while the block runs; call the value with each number of bytes done.

    Without a terminal it prints a line at the start, and one with share, speed and the time left every 30
    seconds.
    """
    with _progress(title, total, f"{total:,} bytes", (DownloadColumn(), TransferSpeedColumn())) as advance:
        yield advance


@contextmanager
def work_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show `title`, the share that is done and the time left; call the value with each part of `total`.

    For work whose units are meaningless to a reader. Without a terminal it behaves like byte_progress.
    """
    with _progress(title, total, "", (TaskProgressColumn(), TimeElapsedColumn())) as advance:
        yield advance


@contextmanager
def _progress(
    title: str, total: int, size: str, shown: tuple[ProgressColumn, ...]
) -> Iterator[Callable[[int], None]]:
    """size: of the work in words, for the first line of a log; "" for work_progress."""
    console = Console(stderr=True)
    if not console.is_terminal:
        start = f"{title}: {size}" if size else title
        console.print(start, highlight=False, markup=False, soft_wrap=True)
        yield _Lines(console, title, total, bool(size)).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), *shown, _LeftColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)
