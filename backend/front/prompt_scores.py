"""Log probabilities of a prompt's own tokens, from the logits that the engine returns at each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tridecode.backend.front.fields.completions import CompletionLogprobs
from tridecode.backend.front.logprobs import LOWEST, by_text, completion_label
from tridecode.backend.text.token_texts import TextOffsets, TokenTexts


class PromptScores:
    """One prompt. The logits at token i are those of token i + 1; each part of them is dropped once read."""

    def __init__(self, ids: Sequence[int], count: int, vocab_size: int):
        """count: number of most likely tokens at each position."""
        self._ids, self._count, self._vocab_size = list(ids), count, vocab_size
        self._log_probs: list[float | None] = [None]  # the first token follows nothing
        self._best: list[list[tuple[int, float]]] = [[]]

    @property
    def complete(self) -> bool:
        """Return whether every token has its log probability."""
        return len(self._log_probs) == len(self._ids)

    def add(self, data: bytes) -> None:
        """Take the logits, float32, of the next positions."""
        if not data:
            return
        done = len(self._log_probs) - 1
        rows = np.frombuffer(data, "<f4").reshape(-1, self._vocab_size)
        for logit in rows[: len(self._ids) - 1 - done]:
            values = logit.astype(np.float64)
            values -= values.max()
            values -= np.log(np.exp(values).sum())
            token = self._ids[len(self._log_probs)]
            self._log_probs.append(max(float(values[token]), LOWEST))
            self._best.append(self._most_likely(values))

    def _most_likely(self, values: np.ndarray) -> list[tuple[int, float]]:
        if not self._count:
            return []
        count = min(self._count, len(values))
        best = np.argpartition(-values, count - 1)[:count]
        best = best[np.argsort(-values[best], kind="stable")]
        return [(int(token), max(float(values[token]), LOWEST)) for token in best]

    def logprobs(self, texts: TokenTexts, length: int) -> CompletionLogprobs:
        """Return the prompt's part of an answer. texts: as the answer shows them. length: of the prompt's
        text, in characters, which lacks the space that some tokenizers put before the first word."""
        found = CompletionLogprobs([], [], [] if self._count else None, [])
        whole = TextOffsets(texts)
        for token in self._ids:
            whole.next(token)
        offsets = TextOffsets(texts, length - whole.end)
        for token, log_prob, best in zip(self._ids, self._log_probs, self._best):
            text = completion_label(texts, token)
            found.tokens.append(text)
            found.token_logprobs.append(log_prob)
            found.text_offset.append(max(0, offsets.next(token)))
            if found.top_logprobs is not None:
                alternatives = by_text(best, texts)
                if log_prob is not None:
                    alternatives.setdefault(text, log_prob)
                found.top_logprobs.append(alternatives if log_prob is not None else None)
        return found
