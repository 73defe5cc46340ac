"""Decides by measured times whether blocks are copied from the host tier or computed again. No torch."""

from __future__ import annotations

from collections import deque

#: weight of a new measurement in the running mean of a token's time
_WEIGHT = 0.3
#: number of recent copies; the fastest one counts. Other processes slow single copies down, on a busy CPU a
#: hundredfold, and a mean would then refuse copies for a long time
_RECENT = 8
#: refused copies after which one is made nevertheless, so that wrong measurements are corrected
_TRIES = 32
#: fewest prompt tokens of a step whose time says what a token costs
LEAST_TOKENS = 64


class CopyCost:
    """block_tokens: tokens of a block. copy_s: seconds to copy a block in; token_s: seconds to compute a
    token of a prompt; None until measured. While one of them is unknown, blocks are copied.
    """

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self.token_s: float | None = None
        self._copies: deque[float] = deque(maxlen=_RECENT)
        self._refused = 0

    @property
    def copy_s(self) -> float | None:
        return min(self._copies, default=None)

    def note_copy(self, blocks: int, seconds: float) -> None:
        """Take the time of a copy of blocks into the cache."""
        self._copies.append(seconds / blocks)

    def note_prompt(self, tokens: int, seconds: float) -> None:
        """Take the time of a step with that many tokens of prompts."""
        if tokens >= LEAST_TOKENS:
            value = seconds / tokens
            self.token_s = value if self.token_s is None else (1 - _WEIGHT) * self.token_s + _WEIGHT * value

    def pays(self) -> bool:
        """Return whether copying a block takes less time than computing its tokens."""
        copy_s = self.copy_s
        if copy_s is None or self.token_s is None or copy_s <= self.token_s * self._block_tokens:
            return True
        self._refused += 1
        return self._refused % _TRIES == 0
