"""Computes a drafter's tokens per step on held-back texts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tridecode.tools.train_draft.texts import Text


def tokens_per_step(drafted: Iterable[tuple[Text, Tensor]], depth: int) -> list[float]:
    """Return the mean number of tokens per step with 1, 2, … `depth` drafts, over all texts.

    drafted: texts, each with the drafts (n, depth) after each token of its answer except the last. A step
    keeps the drafts before the first one that differs from the text, and adds one token. The first token of
    an answer is not counted, because the prompt's step generates it.
    """
    tokens, steps = 0, [0] * depth
    for text, drafts in drafted:
        accepted = _accepted(drafts, text)
        tokens += len(accepted)
        for most in range(1, depth + 1):
            place = 0
            while place < len(accepted):
                place += min(accepted[place], most) + 1
                steps[most - 1] += 1
    return [tokens / count for count in steps]


def _accepted(drafts: Tensor, text: Text) -> list[int]:
    """Return how many leading drafts of each row equal the text."""
    ids = torch.from_numpy(text.ids).long()
    newest = torch.arange(text.prompt, len(ids) - 1)
    wanted = newest[:, None] + torch.arange(1, drafts.shape[1] + 1)
    following = torch.where(wanted < len(ids), ids[wanted.clamp(max=len(ids) - 1)], -1)
    return (drafts.cpu() == following).int().cumprod(1).sum(1).tolist()
