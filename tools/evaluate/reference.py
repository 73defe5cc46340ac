"""Runs the same questions through transformers with teacher forcing.

An answer is right if each of its tokens is the most likely one after the tokens before it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from tridecode.backend.weights.reader import TORCH_DTYPES
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.tools.evaluate.lambada import Question

_BATCH_TOKENS = 2048  # tokens of a forward pass, padding included


def reference_answers(
    checkpoint: str | Path, dtype: str, questions: Sequence[Question], progress: Callable[[int], None]
) -> list[bool]:
    """Return for each question whether transformers' model of `checkpoint` answers it right.

    dtype: "fp32", "fp16" or "bf16". A GPU computes in it; a CPU computes in float32 with weights rounded to
    it. progress: called with the number of questions answered. One forward pass per question is enough,
    because greedy decoding gives the answer exactly if each of its tokens is the most likely one.
    """
    model: Any = open_checkpoint(checkpoint).reference_model(TORCH_DTYPES[dtype])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device=device, dtype=TORCH_DTYPES[dtype] if device.type == "cuda" else torch.float32)
    right = [False] * len(questions)
    rows: dict[tuple[int, ...], list[int]] = {}  # both definitions of an item often need the same sequence
    for index, question in enumerate(questions):
        rows.setdefault((*question.prompt, *question.target[:-1]), []).append(index)
    try:
        done = 0
        with torch.inference_mode():
            for batch in _batches(list(rows)):
                for row, best in zip(batch, _best_tokens(model, batch, device)):
                    for index in rows[row]:
                        first, target = len(questions[index].prompt) - 1, questions[index].target
                        right[index] = tuple(best[first : first + len(target)]) == target
                    done += len(rows[row])
                progress(done)
    finally:
        del model
        gc.collect()
    return right


def _batches(rows: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Yield batches of sequences of similar length, at most _BATCH_TOKENS each."""
    batch: list[tuple[int, ...]] = []
    for row in sorted(rows, key=len):
        if batch and (len(batch) + 1) * len(row) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _best_tokens(model: Module, batch: list[tuple[int, ...]], device: torch.device) -> list[list[int]]:
    """Return the most likely token after each token of each sequence.

    Padding follows the tokens, so causal attention does not see it.
    """
    width = max(map(len, batch))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in batch], device=device)
    return model(ids, use_cache=False).logits.argmax(-1).tolist()
