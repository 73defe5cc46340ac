"""The progress of `LLM.generate` on a terminal."""

from __future__ import annotations

import time

from tridecode.tools.progress import Bar


class PromptProgress:
    """A context manager that counts prompts and tokens. shows: whether to show them, on a terminal."""

    def __init__(self, prompts: int, shows: bool):
        self._bar = Bar(shows and prompts > 1)
        self._prompts, self._done, self._tokens = prompts, 0, 0
        self._began = time.monotonic()

    def add(self, tokens: int) -> None:
        """Count a prompt; tokens: of its answers."""
        self._done += 1
        self._tokens += tokens
        if self._bar.is_shown:
            self._bar.show(self._done, self._prompts, self._text(time.monotonic() - self._began))

    def _text(self, elapsed_s: float) -> str:
        left_s = elapsed_s / self._done * (self._prompts - self._done)
        done = f"{self._done:,} of {self._prompts:,} prompts"
        return f"{done}, {self._tokens / max(1e-9, elapsed_s):,.0f} tokens/s, {left_s:,.0f} s left"

    def __enter__(self) -> PromptProgress:
        self._bar.__enter__()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._bar.close()
