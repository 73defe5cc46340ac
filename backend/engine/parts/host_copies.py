"""Copies of cache blocks to the host tier and from it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.encoding import read
from tridecode.backend.engine.step.plan import Commit, StepPart, StepPlan

_Index = Annotated[int, msgspec.Meta(ge=0)]
_Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    outs: list[tuple[_Index, _Index, _Key, _Key]]
    ins: list[tuple[_Index, _Index]]
    drops: list[_Index]
    asks: bool
    layered: _Index = 0


_decoder = msgspec.msgpack.Decoder(_Frame)


class BlockOut(NamedTuple):
    """A block of the cache that is copied to a slot. key, parent: see host_tier/region.py."""

    block: int
    slot: int
    key: bytes
    parent: bytes


class Copied(NamedTuple):
    """The result on all ranks. intact: for each copy from the tier, whether its checksum was right. seconds:
    time of the copies on rank 0. shares: the answer to a query, see Readiness.answer.
    """

    intact: list[bool]
    seconds: float
    shares: int = 0


@dataclass
class HostCopies(StepPart):
    """outs: blocks to copy to the host tier. ins: (slot, block) pairs to copy from it. drops: slots to clear.
    asks: a query to the ranks how much of the tier's memory they have pinned. layered: the number of first
    `ins` that this plan's prompts read: a layer waits for them, and does not wait for those of later layers.

    No step writes the blocks before the result is committed, and earlier plans have written those of `outs`.
    A plan may have only this part, without rows.
    """

    tag = "host_copies"
    outs: list[BlockOut] = field(default_factory=list)
    ins: list[tuple[int, int]] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    asks: bool = False
    layered: int = 0

    @property
    def captures(self) -> bool:
        return not self.layered

    def encode(self) -> Any:
        return _Frame([(*out,) for out in self.outs], self.ins, self.drops, self.asks, self.layered)

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> HostCopies:
        found = read(_decoder, data, where)
        for name, numbers in (
            ("block", [out[0] for out in found.outs] + [block for _, block in found.ins]),
            ("slot", [out[1] for out in found.outs] + [slot for slot, _ in found.ins]),
        ):
            if len(set(numbers)) != len(numbers):
                raise TridecodeError(f"{where} names a {name} twice; wanted each at most once")
        if found.layered > len(found.ins):
            raise TridecodeError(f"{where} has {len(found.ins)} copies; {found.layered} are read by its rows")
        outs = [BlockOut(*out) for out in found.outs]
        return cls(outs, found.ins, found.drops, found.asks, found.layered)

    def commit(self, step: Commit, found: Copied) -> None:
        lost = step.handlers[HostCopies]([self], found) or ()
        step.taken += [index for index, sequence in enumerate(step.sampled) if sequence in lost]


def empty_plan(step: int, part: HostCopies) -> StepPlan:
    """Return a plan without rows, which only copies."""
    none, table, starts = np.zeros(0, np.int32), np.zeros((0, 0), np.int32), np.zeros(1, np.int32)
    return StepPlan(step, none, none, none, table, none, starts, none, none, 0, parts=[part])
