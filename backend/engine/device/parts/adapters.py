"""The LoRA adapters of a step on the device."""

from __future__ import annotations

from typing import cast

from tridecode.backend.engine.adapters.adapted_ops import AdaptedOps
from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.parts.adapters import AdapterRows
from tridecode.kernels.ops import Ops


class AdaptersRun(PartRun[AdapterRows]):
    def before(self) -> None:
        if self.state.adapters is not None:
            self.state.adapters.drop(self.part.dropped)

    def ops(self, ops: Ops) -> Ops:
        numbers, store = self.part.numbers, self.state.adapters
        if numbers is None:
            return ops
        assert store is not None
        tables = {number: store.table(number) for number in set(numbers[numbers >= 0].tolist())}
        return cast(Ops, AdaptedOps(ops, numbers, self.plan.query_starts, tables, self.state.device))
