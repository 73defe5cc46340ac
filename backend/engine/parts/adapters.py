"""The LoRA adapters of a step's rows, and the adapters to unload. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tridecode.backend.engine.parts.encoding import ints, read, read_ints
from tridecode.backend.engine.step.plan import StepPart, StepPlan


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    numbers: bytes | None
    dropped: list[int]


_decoder = msgspec.msgpack.Decoder(_Frame)


@dataclass
class AdapterRows(StepPart):
    """numbers: (B,) int32, the number of each row's adapter, -1 for none; None if no row has one. dropped:
    the numbers of adapters that this plan and later ones no longer use. No result.
    """

    tag = "adapters"
    numbers: np.ndarray | None = None
    dropped: list[int] = field(default_factory=list)

    @property
    def captures(self) -> bool:
        return self.numbers is None

    def encode(self) -> Any:
        return _Frame(None if self.numbers is None else ints(self.numbers), self.dropped)

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> AdapterRows:
        found = read(_decoder, data, where)
        numbers = None if found.numbers is None else read_ints(found.numbers, plan.num_rows, where)
        return cls(numbers, found.dropped)


def drop_adapters(plan: StepPlan, dropped: list[int]) -> None:
    """Add the adapters to unload to a plan."""
    part = plan.part(AdapterRows)
    if part is None:
        part = AdapterRows()
        plan.parts.append(part)
    part.dropped = dropped
