"""Context embeddings: sums of the last layer's output over tokens of prompts. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.encoding import read
from tridecode.backend.engine.step.plan import Commit, StepPart, StepPlan

_decoder = msgspec.msgpack.Decoder(list[tuple[int, int]])


@dataclass
class ContextEmbeddings(StepPart):
    """rows: (row, n) pairs: the sum over the first n tokens of that plan row is returned. Result: (C,)
    float32 for each.
    """

    tag = "embeddings"
    rows: list[tuple[int, int]]

    def encode(self) -> Any:
        return self.rows

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> ContextEmbeddings:
        rows, queries = read(_decoder, data, where), np.diff(plan.query_starts)
        for row, count in rows:
            if not (0 <= row < plan.num_rows and 0 <= count <= queries[row]):
                raise TridecodeError(
                    f"{where} has {count} tokens of row {row}; the plan has {plan.num_rows} rows"
                )
        return cls(rows)

    def commit(self, step: Commit, found: list[np.ndarray]) -> None:
        for (row, _), embedding in zip(self.rows, found):
            sequence = step.plan.sequences[row]
            before = sequence.embedding
            sequence.embedding = embedding if before is None else before + embedding
