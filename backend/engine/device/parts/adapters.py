"""The LoRA adapters of a step on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from tridecode.backend.engine.adapters.adapted_ops import AdaptedOps
from tridecode.backend.engine.adapters.adapted_rows import AdaptedRows, Segment
from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.parts.adapters import AdapterRows
from tridecode.backend.engine.step.step_buffers import pad_decodes
from tridecode.kernels.operands import Batch
from tridecode.kernels.ops import Ops

#: prompts of at least this many tokens multiply their adapter separately from other rows
_SEGMENT = 32
#: the forms of graphs. Spread: a row with an adapter is spread over many blocks. Together: the rows of an
#: adapter are multiplied by it together
SPREAD, TOGETHER = "spread", "together"
#: rows with an adapter up to which they are spread: a number, and more for each adapter. LLaMA-3-8B in bf16,
#: 64 rows on an H200, multiples of a step without adapters, spread / together: 1 row 1.08 / 1.16; 32 rows of
#: eight adapters 1.34 / 1.37; 64 rows of eight 1.49 / 1.38, of one 1.38 / 1.18
_SPREAD_ROWS, _SPREAD_OF_ADAPTER = 12, 3


def form_of(numbers: np.ndarray) -> str:
    """Return the form of graphs for a step. numbers: (B,), the adapter of each row, -1 for none."""
    used = numbers[numbers >= 0]
    most = _SPREAD_ROWS + _SPREAD_OF_ADAPTER * len(np.unique(used))
    return SPREAD if len(used) <= most else TOGETHER


class AdaptersRun(PartRun[AdapterRows]):
    prompt_forms = (SPREAD,)

    def before(self) -> None:
        """Free dropped adapters and find the slots of the others."""
        numbers, state = self.part.numbers, self.state
        if state.adapters is not None:
            state.adapters.drop(self.part.dropped)
        if numbers is None or state.adapter_tables is None:
            return
        state.adapter_tables.load(self._slots())

    def pad(self, decodes: int, tokens: int) -> None:
        tables = self.state.adapter_tables
        assert tables is not None
        tables.load(pad_decodes(self._slots(), self.plan.num_decodes, decodes, -1), tokens)

    def _slots(self) -> np.ndarray:
        """Return the slots of the step's tokens, (T,) int32, -1 for those of segments."""
        numbers, tables = self.part.numbers, self.state.adapter_tables
        assert numbers is not None and tables is not None
        slots = np.array([tables.slot(one) if one >= 0 else -1 for one in numbers.tolist()], np.int32)
        slots[self._segment_rows()] = -1
        return np.repeat(slots, np.diff(self.plan.query_starts))

    def ops(self, ops: Ops, batch: Batch) -> Ops:
        numbers, state = self.part.numbers, self.state
        if numbers is None:
            return ops
        assert state.adapters is not None
        starts = self.plan.query_starts
        if state.adapter_tables is None:
            tables = {number: state.adapters.table(number) for number in set(numbers[numbers >= 0].tolist())}
            return cast(Ops, AdaptedOps(ops, numbers, starts, tables, state.device))
        segments = [
            Segment(slice(int(starts[row]), int(starts[row + 1])), state.adapters.table(int(numbers[row])))
            for row in self._segment_rows().tolist()
        ]
        return cast(Ops, _adapted(state, ops, batch, segments, self.form))

    @classmethod
    def graph_ops(cls, state: DeviceState) -> Mapping[str, Callable[[Batch], Ops]]:
        if state.adapter_tables is None:
            return {}

        def factory(form: str) -> Callable[[Batch], Ops]:
            return lambda batch: cast(Ops, _adapted(state, state.ops, batch, [], form))

        return {form: factory(form) for form in (SPREAD, TOGETHER)}

    @property
    def form(self) -> str:
        assert self.part.numbers is not None
        return form_of(self.part.numbers)

    @property
    def captures_prompts(self) -> bool:
        return self.part.numbers is not None and not len(self._segment_rows())

    def _segment_rows(self) -> np.ndarray:
        """Return the rows of prompts whose adapters are multiplied separately."""
        assert self.part.numbers is not None
        lengths = np.diff(self.plan.query_starts)
        return np.flatnonzero((self.part.numbers >= 0) & (lengths >= _SEGMENT))


def _adapted(state: DeviceState, ops: Ops, batch: Batch, segments: list[Segment], form: str) -> AdaptedRows:
    """Return the operations of a batch with adapters. With several ranks, all-reduces and stages read results
    without calling an operation, so nothing is deferred."""
    tables, ranks = state.adapter_tables, state.ranks
    assert tables is not None
    alone = ranks.tensor_size == ranks.num_stages == 1
    last = state.model.layers[-1].down.weight if alone else None
    rows = tables.rows(batch.num_tokens)
    return AdaptedRows(ops, tables.tables, rows, segments, alone, last, form == SPREAD)
