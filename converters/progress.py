"""A progress bar in bytes, for long operations."""

from __future__ import annotations

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


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show `title` on stderr while the block runs; call the value with each number of bytes done.

    Without a terminal it prints one line.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{title}: {total:,} bytes", highlight=False, markup=False, soft_wrap=True)
        yield lambda done: None
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
