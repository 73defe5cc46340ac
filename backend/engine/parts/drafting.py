"""Drafts that a drafter on the device computes after a step. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.encoding import ints, read, read_ints
from tridecode.backend.engine.speculation.records import NEVER
from tridecode.backend.engine.step.plan import MOST_QUERIES, StepPart, StepPlan


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    count: Annotated[int, msgspec.Meta(ge=1, lt=MOST_QUERIES)]
    rows: bytes
    least: Annotated[int, msgspec.Meta(ge=1, le=NEVER)] = NEVER
    masked: bytes = b""


_decoder = msgspec.msgpack.Decoder(_Frame)


@dataclass
class Drafting(StepPart):
    """count: drafts after the newest token of each row. rows: (n,) int32, ascending rows of the plan that are
    sampled and have a slot. least: a row with a match of this many tokens or more keeps the drafts of the
    match instead. masked: (m,) int32, ascending rows among them that obey a grammar; their drafts go to the
    host (StepResult.found), which computes the masks. The plan's block tables have room for `count` tokens
    more than each row's tokens. No result: the drafts stay on the device.
    """

    tag = "drafting"
    count: int
    rows: np.ndarray
    least: int = NEVER
    masked: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def captures(self) -> bool:
        return True

    @property
    def reads_samples(self) -> bool:
        return True

    def encode(self) -> Any:
        return _Frame(self.count, ints(self.rows), self.least, ints(self.masked))

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> Drafting:
        found = read(_decoder, data, where)
        rows = read_ints(found.rows, len(found.rows) // 4, where)
        wrong = (rows < 0) | (rows >= plan.num_rows)
        wrong[1:] |= rows[1:] <= rows[:-1]
        if not len(rows) or wrong.any():
            raise TridecodeError(
                f"{where} has rows {rows[:8].tolist()}; wanted some of {plan.num_rows}, ascending"
            )
        if ((plan.slots[rows] < 0) | (plan.samples[rows] < 1)).any():
            raise TridecodeError(f"{where} has a row without a slot or without a sample")
        masked = read_ints(found.masked, len(found.masked) // 4, where)
        if (masked[1:] <= masked[:-1]).any() or not np.isin(masked, rows).all():
            shown = masked[:8].tolist()
            raise TridecodeError(f"{where} has masked rows {shown}; wanted some of its rows, ascending")
        return cls(found.count, rows, found.least, masked)
