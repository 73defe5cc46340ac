"""A progress bar in bytes, for long operations."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_LINE_S = 30.0


class _Lines:
    """Progress as lines of a log. Safe from several threads."""

    def __init__(self, console: Console, title: str, total: int):
        self._console, self._title, self._total = console, title, total
        self._done, self._started, self._lock = 0, time.monotonic(), threading.Lock()
        self._told = self._started

    def advance(self, done: int) -> None:
        with self._lock:
            self._done += done
            now = time.monotonic()
            if now - self._told < _LINE_S:
                return
            self._told = now
            share, speed = self._done / max(self._total, 1), self._done / (now - self._started)
            text = f"{self._title}: {share:.0%}, {self._done:,} bytes, {speed / 1e6:,.0f} MB/s"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show `title` on stderr while the block runs; call the value with each number of bytes done.

    Without a terminal it prints a line at the start, and one with share and speed every 30 seconds.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{title}: {total:,} bytes", highlight=False, markup=False, soft_wrap=True)
        yield _Lines(console, title, total).advance
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)
