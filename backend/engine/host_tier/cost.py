"""Decides by measured times whether blocks are copied from the host tier or computed again. No torch."""

from __future__ import annotations

#: weight of a new measurement in the running means
_WEIGHT = 0.3
#: refused copies after which one is made nevertheless, so that a mean that was wrong once is corrected
_TRIES = 32
#: fewest prompt tokens of a step whose time says what a token costs
LEAST_TOKENS = 64


class CopyCost:
    """block_tokens: tokens of a block. copy_s: seconds to copy a block in; token_s: seconds to compute a
    token of a prompt; None until measured. While one of them is unknown, blocks are copied.
    """

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self.copy_s: float | None = None
        self.token_s: float | None = None
        self._refused = 0

    def note_copy(self, blocks: int, seconds: float) -> None:
        """Take the time of a copy of blocks into the cache."""
        self.copy_s = _mean(self.copy_s, seconds / blocks)

    def note_prompt(self, tokens: int, seconds: float) -> None:
        """Take the time of a step with that many tokens of prompts."""
        if tokens >= LEAST_TOKENS:
            self.token_s = _mean(self.token_s, seconds / tokens)

    def pays(self) -> bool:
        """Return whether copying a block takes less time than computing its tokens."""
        if self.copy_s is None or self.token_s is None or self.copy_s <= self.token_s * self._block_tokens:
            return True
        self._refused += 1
        return self._refused % _TRIES == 0


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else (1 - _WEIGHT) * mean + _WEIGHT * value
