"""Progress of long operations on stderr: a spinner or a bar on a terminal, plain lines without one."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as RichProgress
from rich.status import Status

QUIET_S = 2.0  # without a terminal: minimum time between two lines
REPEAT_S = 15.0  # … and between two equal lines, which show that the operation still waits

_log = logging.getLogger("tridecode.serve")


class Progress:
    """A context manager; `show` may be called at any rate. Without a terminal it logs."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._status: Status | None = console.status("starting") if console.is_terminal else None
        self._last = ""
        self._logged_at = 0.0

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._status is not None:
            self._status.stop()
        sys.stderr.flush()

    def show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
        elif time.monotonic() - self._logged_at > (REPEAT_S if text == self._last else QUIET_S):
            _log.info("%s", text)
            self._last, self._logged_at = text, time.monotonic()


class Bar:
    """A context manager that shows a bar and a text on a terminal, and nothing without one.

    console: of stderr; `print` to it while the bar is shown. shows: False shows nothing on a terminal either.
    """

    def __init__(self, shows: bool = True) -> None:
        self.console = Console(stderr=True)
        self._bar: RichProgress | None = None
        if shows and self.console.is_terminal:
            columns = (BarColumn(), TextColumn("{task.description}", markup=False))
            self._bar = RichProgress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task("", total=None)

    @property
    def is_shown(self) -> bool:
        return self._bar is not None

    def __enter__(self) -> Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, total: int | None, text: str) -> None:
        """Called at any rate. total: None while it is not known."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=text)


@contextmanager
def spinner(title: str) -> Iterator[Callable[[str], None]]:
    """Show `title` and the elapsed seconds while the block runs; the value replaces the title.

    Without a terminal each title is one plain line.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(title, highlight=False, markup=False)
        yield lambda text: console.print(text, highlight=False, markup=False)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with RichProgress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda text: bar.update(task, description=text)


@contextmanager
def counter(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many of `total` are done while the block runs; the value is called with that number.

    Without a terminal the title is one plain line.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{title}: {total} to do", highlight=False, markup=False)
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)
