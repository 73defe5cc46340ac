"""Copies of cache blocks and sampling state for forked sequences. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from tridecode.backend.engine.parts.encoding import read
from tridecode.backend.engine.step.plan import StepPart, StepPlan

_Index = Annotated[int, msgspec.Meta(ge=0)]


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    slots: list[tuple[_Index, _Index]]
    blocks: list[tuple[_Index, _Index]]


_decoder = msgspec.msgpack.Decoder(_Frame)


@dataclass
class Forks(StepPart):
    """slots, blocks: (source, destination) pairs, executed before the step and before its `starts`; all
    sources are read before any destination is written. No result.
    """

    tag = "forks"
    slots: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int]] = field(default_factory=list)

    @property
    def captures(self) -> bool:
        return True

    def encode(self) -> Any:
        return _Frame(self.slots, self.blocks)

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> Forks:
        found = read(_decoder, data, where)
        return cls(found.slots, found.blocks)
