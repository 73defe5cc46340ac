"""Tokens that a drafter with its own cache reads after a step, because it has missed them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.encoding import ints, read, read_ints
from tridecode.backend.engine.step.plan import StepPart, StepPlan

#: maximum tokens and rows that the drafter reads per step: a draft model of a billion parameters reads this
#: many tokens in the time of a decode step of LLaMA-3-8B, and a fixed buffer holds them
MOST_TOKENS, MOST_ROWS = 256, 8


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    rows: bytes
    firsts: bytes
    counts: bytes
    token_ids: bytes


_decoder = msgspec.msgpack.Decoder(_Frame)


@dataclass
class DraftReads(StepPart):
    """rows: (n,) int32, ascending rows of the plan with a slot. firsts, counts: (n,) int32, position of the
    first token of each row, and number of tokens. token_ids: (sum of counts,) int32. After the step, the
    drafter writes its keys and values of these tokens to the blocks of the row, before it drafts. No result.
    """

    tag = "draft_reads"
    rows: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    token_ids: np.ndarray

    @property
    def captures(self) -> bool:
        return True

    def encode(self) -> Any:
        return _Frame(ints(self.rows), ints(self.firsts), ints(self.counts), ints(self.token_ids))

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> DraftReads:
        found = read(_decoder, data, where)
        count = len(found.rows) // 4
        rows, firsts, counts = (
            read_ints(one, count, where) for one in (found.rows, found.firsts, found.counts)
        )
        wrong = (rows < 0) | (rows >= plan.num_rows)
        wrong[1:] |= rows[1:] <= rows[:-1]
        if not 0 < count <= MOST_ROWS or wrong.any():
            raise TridecodeError(
                f"{where} has rows {rows[:8].tolist()}; wanted 1 to {MOST_ROWS} of {plan.num_rows}, ascending"
            )
        total = int(counts.sum(dtype=np.int64))
        if (plan.slots[rows] < 0).any() or (firsts < 0).any() or (counts < 1).any() or total > MOST_TOKENS:
            raise TridecodeError(
                f"{where} has {total} tokens of {count} rows; wanted 1 to {MOST_TOKENS} from position 0 on, "
                "of rows with a slot"
            )
        ids = read_ints(found.token_ids, total, where)
        if (ids < 0).any():
            raise TridecodeError(f"{where} has token id {int(ids.min())}; wanted 0 or more")
        return cls(rows, firsts, counts, ids)
