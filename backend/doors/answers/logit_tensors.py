"""Builds the outputs context_logits, generation_logits and performance metrics from an event's `extra`.

Also checks the size limit of the logits before they are allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.service.limits import check_logits
from tridecode.backend.wire.messages import EventExtra, Limits, Perf

_ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class WantedLogits:
    """The logits that a request wants: of its prompts, of its new tokens."""

    context: bool
    generation: bool

    @classmethod
    def of(cls, inputs: Inputs) -> WantedLogits:
        return cls(inputs.flag("return_context_logits"), inputs.flag("return_generation_logits"))

    def params(self) -> dict[str, bool]:
        """Return the sampling parameters that request these logits."""
        return {"return_context_logits": self.context, "return_generation_logits": self.generation}

    def check(self, prompts: Sequence[int], counts: Sequence[int], limits: Limits) -> None:
        """Raise RequestError if the arrays, padded to the longest row, exceed the engine's limit in bytes.

        prompts, counts: for each row the tokens of its prompt and the maximum number of new tokens.
        """
        check_logits(self.context, self.generation, prompts, counts, limits)


class LogitsArrays:
    """The logits of one request's answer; rows are copied in as they arrive.

    context_logits: (B, L, V) float32, L the longest prompt. generation_logits: (B, 1, R, V), R the largest
    number of new tokens that a row may have. Zeros after the end of a row.
    """

    def __init__(self, wanted: WantedLogits, prompts: Sequence[int], counts: Sequence[int], vocab_size: int):
        self._arrays: dict[str, np.ndarray] = {}
        if wanted.context:
            self._arrays["context_logits"] = np.zeros((len(prompts), max(prompts), vocab_size), np.float32)
        if wanted.generation:
            shape = (len(prompts), 1, max(counts), vocab_size)
            self._arrays["generation_logits"] = np.zeros(shape, np.float32)
        self._filled = {name: [0] * len(prompts) for name in self._arrays}

    def take(self, row: int, extra: EventExtra) -> None:
        self._fill("context_logits", row, extra.context_logits)
        self._fill("generation_logits", row, extra.generation_logits)

    def _fill(self, name: str, row: int, data: bytes) -> None:
        if not data:
            return
        array, first = self._arrays[name], self._filled[name][row]
        rows = np.frombuffer(data, "<f4").reshape(-1, array.shape[-1])
        array[row].reshape(-1, array.shape[-1])[first : first + len(rows)] = rows
        self._filled[name][row] = first + len(rows)

    def arrays(self) -> dict[str, np.ndarray]:
        return self._arrays


def piece_logits(
    wanted: WantedLogits, pieces: Sequence[Sequence[tuple[int, EventExtra]]], vocab_size: int
) -> dict[str, np.ndarray]:
    """Return the logits that one response carries.

    pieces: for each of its n rows (tokens that count, extra). context_logits: (n, L, V), sent once, where a
    row has some. generation_logits: (n, 1, R, V) of the response's own tokens. Shorter rows are padded with
    zeros.
    """
    arrays = {}
    if wanted.context:
        rows = [b"".join(extra.context_logits for _, extra in piece) for piece in pieces]
        if any(rows):
            arrays["context_logits"] = _padded(rows, vocab_size)
    if wanted.generation:
        row_bytes = vocab_size * _ITEM
        rows = [
            b"".join(extra.generation_logits[: count * row_bytes] for count, extra in piece)
            for piece in pieces
        ]
        arrays["generation_logits"] = _padded(rows, vocab_size)[:, None]
    return arrays


def _padded(rows: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """(n, longest, V) float32."""
    found = [np.frombuffer(row, "<f4").reshape(-1, vocab_size) for row in rows]
    out = np.zeros((len(rows), max(map(len, found)), vocab_size), np.float32)
    for row, values in enumerate(found):
        out[row, : len(values)] = values
    return out


def metrics(pieces: Sequence[Sequence[tuple[int, EventExtra]]]) -> dict[str, list[Any]]:
    """Return TensorRT-LLM's performance metrics, the newest of each row; {} if a row has none.

    kv_cache_alloc_total_blocks: new and reused blocks. acceptance_rate: of the drafts; 0 without any.
    """
    perfs = newest_perfs(pieces)
    if not perfs:
        return {}
    return {
        "kv_cache_alloc_new_blocks": [perf.new_blocks for perf in perfs],
        "kv_cache_reused_blocks": [perf.reused_blocks for perf in perfs],
        "kv_cache_alloc_total_blocks": [perf.new_blocks + perf.reused_blocks for perf in perfs],
        "arrival_time_ns": [perf.arrival_ns for perf in perfs],
        "first_scheduled_time_ns": [perf.first_scheduled_ns for perf in perfs],
        "first_token_time_ns": [perf.first_token_ns for perf in perfs],
        "last_token_time_ns": [perf.last_token_ns for perf in perfs],
        "acceptance_rate": [perf.accepted_draft_tokens / max(perf.draft_tokens, 1) for perf in perfs],
        "total_accepted_draft_tokens": [perf.accepted_draft_tokens for perf in perfs],
        "total_draft_tokens": [perf.draft_tokens for perf in perfs],
    }


def newest_perfs(pieces: Sequence[Sequence[tuple[int, EventExtra]]]) -> list[Perf]:
    """Return the newest performance metrics of each row; [] if a row has none."""
    newest = [[extra.perf for _, extra in piece if extra.perf is not None][-1:] for piece in pieces]
    return [perf for row in newest for perf in row] if all(newest) else []
