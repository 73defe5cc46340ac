"""Texts and scopes in which the drafter of each rank finds drafts. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.encoding import ints, read, read_ints
from tridecode.backend.engine.step.plan import StepPart, StepPlan

_Index = Annotated[int, msgspec.Meta(ge=0)]
_Scope = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]


class SlotScopes(NamedTuple):
    """A slot that starts in this step with drafts. shared, private: scopes of the finished answers and of
    the client's drafts that it may find; -1: none."""

    slot: int
    shared: int
    private: int


class Entry(NamedTuple):
    """A text for the ring. tokens: (n,) int32."""

    scope: int
    tokens: np.ndarray


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    slots: list[tuple[_Index, _Scope, _Scope]]
    scopes: list[_Scope]
    lengths: list[_Index]
    tokens: bytes


_decoder = msgspec.msgpack.Decoder(_Frame)


@dataclass
class DraftSources(StepPart):
    """slots: those of the plan's `starts` whose rows have drafts. entries: new texts of the ring, in order.
    The drafter takes them after the step, before it drafts. No result.
    """

    tag = "draft_sources"
    slots: list[SlotScopes] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def captures(self) -> bool:
        return True

    def encode(self) -> Any:
        tokens = [np.zeros(0, np.int32), *(entry.tokens for entry in self.entries)]
        return _Frame(
            [(slot.slot, slot.shared, slot.private) for slot in self.slots],
            [entry.scope for entry in self.entries],
            [len(entry.tokens) for entry in self.entries],
            ints(np.concatenate(tokens)),
        )

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> DraftSources:
        found = read(_decoder, data, where)
        started = {start.slot for start in plan.starts}
        unknown = [slot for slot, _, _ in found.slots if slot not in started]
        if unknown:
            raise TridecodeError(f"{where} has slot {unknown[0]}, which does not start in this step")
        if len(found.scopes) != len(found.lengths):
            raise TridecodeError(f"{where} has {len(found.scopes)} scopes of {len(found.lengths)} texts")
        tokens = read_ints(found.tokens, sum(found.lengths), where)
        if (tokens < 0).any():
            raise TridecodeError(f"{where} has token id {int(tokens.min())}; wanted 0 or more")
        texts = np.split(tokens, np.cumsum(found.lengths[:-1])) if found.lengths else []
        slots = [SlotScopes(*slot) for slot in found.slots]
        return cls(slots, [Entry(scope, text) for scope, text in zip(found.scopes, texts)])
