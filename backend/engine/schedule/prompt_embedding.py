"""The vector that a request returns for its prompt, while its chunks are computed. No torch."""

from __future__ import annotations

import numpy as np

from tridecode.backend.wire.sampling_params import SamplingParams


class PromptEmbedding:
    """The context embedding of a prompt, or its pooled hidden state.

    pooling: "" for the context embedding, the sum over the tokens of the prompt before the final norm; else
    SamplingParams.pooling, after the final norm.
    """

    def __init__(self, pooling: str):
        self.pooling = pooling
        self._sum: np.ndarray | None = None  # (C,) float32
        self._tokens = 0  # in the sum
        self._planned = False

    @classmethod
    def wanted(cls, params: SamplingParams) -> PromptEmbedding | None:
        wants = params.pooling or params.return_context_embedding
        return cls(params.pooling) if wants else None

    def plan(self, first: int, end: int, prompt_tokens: int) -> tuple[int, int, bool] | None:
        """Return the summed tokens of the next chunk, or None if it has none.

        first, end: positions of the chunk. Returns (first of the summed tokens within the chunk, their
        number, whether the sum begins with them).
        """
        start, end = first, min(end, prompt_tokens)
        if self.pooling == "last":
            start = max(start, prompt_tokens - 1)
        if start >= end:
            return None
        begins, self._planned = not self._planned, True
        return start - first, end - start, begins

    def add(self, found: np.ndarray, tokens: int, begins: bool) -> None:
        """Add the sum (C,) over the tokens of a chunk. begins: forget what earlier chunks gave.

        A preempted prompt begins again, perhaps while a chunk of its first computation is in flight.
        """
        if begins or self._sum is None:
            self._sum, self._tokens = found, tokens
        else:
            self._sum, self._tokens = self._sum + found, self._tokens + tokens

    def value(self) -> np.ndarray | None:
        """Return (C,) float32; None if no chunk has been computed."""
        if self._sum is None or self.pooling != "mean":
            return self._sum
        return self._sum / np.float32(self._tokens)

    def restart(self) -> None:
        """Forget everything: the prompt is computed again."""
        self._sum, self._tokens, self._planned = None, 0, False
