"""Vectors of prompts: sums of the last layer's output over tokens, before or after the final norm. No torch.

The context embedding of FasterTransformer's contract is the sum before the final norm; the pooled hidden
state of OpenAI's API is the last token, or the mean over the tokens, after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.encoding import read
from tridecode.backend.engine.schedule.sequence import Sequence, Stage
from tridecode.backend.engine.step.plan import Commit, StepPart, StepPlan

_Index = Annotated[int, msgspec.Meta(ge=0)]


class SummedRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The tokens first .. first + count of the plan's row `row`, which are summed.

    normed: after the final norm. begins: the sum of the prompt begins with them. ends: they complete a
    request that wants no token.
    """

    row: _Index
    first: _Index
    count: _Index
    normed: bool
    begins: bool
    ends: bool


_decoder = msgspec.msgpack.Decoder(list[SummedRow])


@dataclass
class PromptVectors(StepPart):
    """Result: a (C,) float32 sum for each of `rows`."""

    tag = "embeddings"
    rows: list[SummedRow]

    @property
    def captures(self) -> bool:
        return True  # the sums are computed after the graph

    def encode(self) -> Any:
        return self.rows

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> PromptVectors:
        rows, queries = read(_decoder, data, where), np.diff(plan.query_starts)
        for one in rows:
            if not (one.row < plan.num_rows and one.first + one.count <= queries[one.row]):
                raise TridecodeError(
                    f"{where} has tokens {one.first} to {one.first + one.count} of row {one.row}, which the "
                    "plan does not have"
                )
        return cls(rows)

    def commit(self, step: Commit, found: list[np.ndarray]) -> None:
        for one, total in zip(self.rows, found):
            sequence: Sequence = step.plan.sequences[one.row]
            if sequence.embedding is None or sequence.stage is Stage.ENDED:
                continue
            sequence.embedding.add(total, one.count, one.begins)
            if one.ends:
                step.ended.append((sequence, _fault(sequence)))


def summed_row(row: int, sequence: Sequence, first: int, count: int) -> SummedRow | None:
    """Return what is summed of a chunk, positions first .. first + count, for the vector of its prompt."""
    if sequence.embedding is None:
        return None
    end, length = first + count, len(sequence.prompt)
    planned = sequence.embedding.plan(first, end, length)
    if planned is None:
        return None
    offset, tokens, begins = planned
    ends = sequence.params.only_pools and end >= length
    return SummedRow(row, offset, tokens, bool(sequence.embedding.pooling), begins, ends)


def _fault(sequence: Sequence) -> TridecodeError | None:
    """Return the error of a vector that is not numbers: no logits are computed that would show it."""
    value = sequence.embedding.value() if sequence.embedding is not None else None
    if value is not None and np.isfinite(value).all():
        return None
    return TridecodeError(
        f"the model's hidden states are not numbers (NaN or infinite) in a prompt of {len(sequence.prompt)} "
        "tokens; weights may be damaged, or overflow in data_type fp16"
    )
