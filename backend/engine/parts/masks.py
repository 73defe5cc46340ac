"""The masks of the tokens that this step may draw, for sequences that obey a grammar. No torch."""

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
    slots: list[_Index]
    words: _Index
    masks: bytes


_decoder = msgspec.msgpack.Decoder(_Frame)


@dataclass
class Masks(StepPart):
    """slots: (n,) int32, each at most once. masks: (n, W) int32, as in SamplingState.masks. They are written
    before the step. No result.
    """

    tag = "masks"
    slots: np.ndarray
    masks: np.ndarray

    @property
    def captures(self) -> bool:
        return True

    def encode(self) -> Any:
        return _Frame(self.slots.tolist(), self.masks.shape[1], ints(self.masks))

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> Masks:
        found = read(_decoder, data, where)
        if len(set(found.slots)) != len(found.slots):
            raise TridecodeError(f"{where} has a slot twice")
        values = read_ints(found.masks, len(found.slots) * found.words, where)
        return cls(np.array(found.slots, np.int32), values.reshape(len(found.slots), found.words))
