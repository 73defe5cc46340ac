"""The masks of rows that obey a grammar and have drafts: one behind each of their tokens. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.encoding import ints, read, read_ints
from tridecode.backend.engine.step.plan import StepPart, StepPlan

_Index = Annotated[int, msgspec.Meta(ge=0)]


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    rows: list[_Index]
    words: _Index
    masks: bytes


_decoder = msgspec.msgpack.Decoder(_Frame)


@dataclass
class DraftMasks(StepPart):
    """rows: (n,) int32, ascending decode rows of a plan that verifies. masks: (N, W) int32, of their N
    samples in order, as in SamplingState.masks; they replace those of the rows' slots. No result.
    """

    tag = "draft_masks"
    rows: np.ndarray
    masks: np.ndarray

    @property
    def captures(self) -> bool:
        return True

    def encode(self) -> Any:
        return _Frame(self.rows.tolist(), self.masks.shape[1], ints(self.masks))

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> DraftMasks:
        found = read(_decoder, data, where)
        decodes = plan.num_decodes if plan.queries else 0
        if not found.rows or found.rows != sorted(set(found.rows)) or found.rows[-1] >= decodes:
            raise TridecodeError(
                f"{where} has rows {found.rows[:8]}; wanted some of {decodes} that are verified, ascending"
            )
        rows = np.array(found.rows, np.int32)
        if (plan.slots[rows] < 0).any():
            raise TridecodeError(f"{where} has a row without a slot")
        count = int(plan.samples[rows].sum())
        masks = read_ints(found.masks, count * found.words, where)
        return cls(rows, masks.reshape(count, found.words))
