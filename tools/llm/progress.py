"""The progress of `LLM.generate` on a terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """Counts prompts and tokens. Without a terminal, or with shows False, it shows nothing."""

    def __init__(self, prompts: int, shows: bool):
        console = Console(stderr=True)
        self._progress: Progress | None = None
        if shows and prompts > 1 and console.is_terminal:
            self._progress = Progress(
                TextColumn("prompts"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[rate]}"),
                console=console,
            )
            self._task = self._progress.add_task("", total=prompts, rate="")
        self._tokens, self._began = 0, time.monotonic()

    def add(self, tokens: int) -> None:
        """Count a prompt; tokens: of its answers."""
        self._tokens += tokens
        if self._progress is not None:
            rate = self._tokens / max(1e-9, time.monotonic() - self._began)
            self._progress.update(self._task, advance=1, rate=f"{rate:,.0f} tokens/s")

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
