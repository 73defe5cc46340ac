"""Log probabilities of a prompt's own tokens, from the logits that the engine returns at each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tridecode.backend.text.token_texts import TokenTexts

#: JSON has no infinity; as vLLM's OpenAI server
LOWEST = -9999.0

#: vLLM's form of the alternatives at one position: token id -> logprob, rank and decoded_token
Alternatives = dict[str, dict[str, Any]]


class PromptScores:
    """One prompt. The logits at token i are those of token i + 1; each part of them is dropped once read.

    log_probs: of each token, None for the first one. ranks: number of tokens that are at least as likely.
    best: the `count` most likely tokens at each position and their log probabilities.
    """

    def __init__(self, ids: Sequence[int], count: int, vocab_size: int):
        """count: number of most likely tokens at each position."""
        self.ids, self.count, self._vocab_size = list(ids), count, vocab_size
        self.log_probs: list[float | None] = [None]  # the first token has no score
        self.ranks = [0]
        self.best: list[list[tuple[int, float]]] = [[]]

    @property
    def complete(self) -> bool:
        """Return whether every token has its log probability."""
        return len(self.log_probs) >= len(self.ids)

    def add(self, data: bytes) -> None:
        """Take the logits, float32, of the next positions."""
        if not data:
            return
        done = len(self.log_probs) - 1
        rows = np.frombuffer(data, "<f4").reshape(-1, self._vocab_size)
        for logits in rows[: len(self.ids) - 1 - done]:
            below = logits - logits.max()
            total = float(np.log(np.exp(below).sum(dtype=np.float64)))
            own = below[self.ids[len(self.log_probs)]]
            self.log_probs.append(max(float(own) - total, LOWEST))
            self.ranks.append(int(np.count_nonzero(below >= own)))
            self.best.append(self._most_likely(below, total))

    def _most_likely(self, values: np.ndarray, total: float) -> list[tuple[int, float]]:
        if not self.count:
            return []
        count = min(self.count, len(values))
        best = np.argpartition(-values, count - 1)[:count]
        best = best[np.argsort(-values[best], kind="stable")]
        return [(int(token), max(float(values[token]) - total, LOWEST)) for token in best]

    def alternatives(self, texts: TokenTexts, count: int) -> list[Alternatives | None]:
        """Return vLLM's prompt_logprobs: None, then each token of the prompt with the `count` best ones."""
        found: list[Alternatives | None] = [None]
        rows = zip(self.ids, self.log_probs, self.ranks, self.best)
        next(rows, None)
        for token, log_prob, rank, best in rows:
            assert log_prob is not None
            found.append(alternatives(token, log_prob, rank, best[:count], texts))
        return found


def alternatives(
    token: int, log_prob: float, rank: int, best: Iterable[tuple[int, float]], texts: TokenTexts
) -> Alternatives:
    """Return vLLM's form of a token and the most likely ones of its step, best first."""
    found = {token: (log_prob, rank)}
    for place, (other, value) in enumerate(best, 1):
        found.setdefault(other, (value, place))
    return {
        str(other): {"logprob": max(value, LOWEST), "rank": place, "decoded_token": texts[other]}
        for other, (value, place) in found.items()
    }
