"""The tables of prompt learning on the device."""

from __future__ import annotations

from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.parts.prompt_tables import PromptTables
from tridecode.kernels.operands import Batch
from tridecode.kernels.ops import Ops


class PromptTablesRun(PartRun[PromptTables]):
    def before(self) -> None:
        self.state.prompts.prepare(self.part.tables, self.state.caches)

    def ops(self, ops: Ops, batch: Batch) -> Ops:
        return self.state.prompts.ops(ops, self.part.tables.virtual)
