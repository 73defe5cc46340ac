"""The kernels' tables of a rank's adapters, by slot, at addresses that loads and evictions do not change.

Captured graphs read the slots of a step's rows and, through the entries of a slot, the adapter's matrices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.base.errors import CapacityError
from tridecode.backend.engine.adapters.place import Table
from tridecode.kernels.adapters.matrices import entry_of
from tridecode.kernels.adapters.operation import ADAPTER_VECTOR, MOST_ADAPTED_COLUMNS
from tridecode.kernels.operands import AdapterSlots, AdapterTable, Linear

#: slots for each adapter that may be loaded: an evicted adapter keeps its slot until a plan drops it
_SLOTS_OF_ONE = 2


def fits(linears: Iterable[Linear]) -> bool:
    """Return whether Ops.add_adapters supports GEMMs with these weights.

    GEMMs that quantise their input are excluded: in a GPU test their graphs differed too much from torch."""
    linears = list(linears)
    shapes = [linear.weight.shape for linear in linears]
    return not any(_rounds_input(linear) for linear in linears) and all(
        outputs % (2 * ADAPTER_VECTOR) == 0
        and inputs % ADAPTER_VECTOR == 0
        and outputs <= MOST_ADAPTED_COLUMNS
        for outputs, inputs in shapes
    )


def _rounds_input(linear: Linear) -> bool:
    return bool(linear.activations) or linear.kind in ("int8", "fp8", "fp8_blocks")


class AdapterTables:
    """A table for each GEMM of a rank. tables: id of a weight -> its table.

    The thread that loads adapters calls `place`; the thread of the steps calls the other methods. Any prefix
    of a step's row order is a valid order of that many rows, because rows without adapters follow in
    ascending order.
    """

    def __init__(
        self,
        linears: Iterable[Linear],
        max_loras: int,
        max_rows: int,
        max_tokens: int,
        ring: int,
        device: torch.device,
        ranks: int = 0,
    ):
        """max_rows: most decode rows of a captured step. max_tokens: most tokens of any step. ring: number of
        host buffers, more than the plans in flight. ranks: most ranks that the adapters of a GEMM have; 0:
        any."""
        weights = [id(linear.weight) for linear in linears]
        slots = _SLOTS_OF_ONE * max_loras
        self._entries = torch.zeros(slots, len(weights), 4, dtype=torch.int64, device=device)
        self.tables = {
            weight: AdapterTable(self._entries[:, i], ranks=ranks) for i, weight in enumerate(weights)
        }
        self._free: deque[tuple[int, torch.cuda.Event | None]] = deque((slot, None) for slot in range(slots))
        self._slots: dict[int, int] = {}
        self._max_rows, self._groups = max_rows, slots + 1
        words = 2 * max(max_tokens, max_rows) + 2 * self._groups
        pinned = device.type == "cuda"
        self._ring = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(ring)]
        self._rows = torch.zeros(words, dtype=torch.int32, device=device)
        self._turn = 0
        self.load(np.zeros(0, np.int32))

    def slot(self, number: int) -> int:
        """Return the slot of an adapter."""
        return self._slots[number]

    def load(self, slots: np.ndarray, tokens: int = 0) -> None:
        """Start copying the slots of a step's tokens, (T,) int32, to the device. tokens: of the step with
        those that follow as padding."""
        count = self._count = max(len(slots), tokens, self._max_rows)
        host, self._turn = self._ring[self._turn], (self._turn + 1) % len(self._ring)
        words = host.numpy()
        words[: len(slots)], words[len(slots) : count] = slots, -1
        words[count : 2 * count] = np.argsort(words[:count].view(np.uint32), kind="stable")
        used = 2 * count + 2 * self._groups
        _write_groups(slots[slots >= 0], words[2 * count : used].reshape(-1, 2))
        self._rows[:used].copy_(host[:used], non_blocking=True)

    def rows(self, tokens: int) -> AdapterSlots:
        """Return the adapters of the step passed to `load`, for `tokens` tokens. A padded decode step may
        have more rows, up to max_rows; the addresses depend only on the number of rows. If the step has
        another number, as when a graph is captured, rows without an adapter are loaded."""
        count = max(tokens, self._max_rows)
        if count != self._count:
            self.load(np.zeros(0, np.int32), tokens)
        groups = self._rows[2 * count : 2 * count + 2 * self._groups].view(-1, 2)
        return AdapterSlots(self._rows[:tokens], self._rows[count : count + tokens], groups)

    def place(
        self, number: int, table: Table, spans: dict[int, Tensor], write: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Assign a slot to an adapter and fill its entries.

        spans: id of a weight -> spans of b on the device. write: Upload.write. Raises CapacityError if
        evicted adapters hold all slots.
        """
        if not self._free:
            raise CapacityError("evicted adapters still hold every slot; the next step frees them: try again")
        slot, last_step = self._free.popleft()
        if last_step is not None:
            last_step.synchronize()
        try:
            self._fill(slot, table, spans, write)
        except BaseException:
            self._free.append((slot, None))
            raise
        self._slots[number] = slot

    def _fill(
        self, slot: int, table: Table, spans: dict[int, Tensor], write: Callable[[Tensor, Tensor], None]
    ) -> None:
        entries = torch.zeros(self._entries.shape[1:], dtype=torch.int64)
        for row, (weight, held) in enumerate(self.tables.items()):
            pair = table.get(weight)
            if pair is None:
                held.pairs.pop(slot, None)
                continue
            a, b = pair[0].t(), pair[1]
            assert not held.ranks or len(a) <= held.ranks
            held.pairs[slot] = a, b
            entries[row] = entry_of(a, b, spans[weight])
        write(entries, self._entries[slot])

    def release(self, number: int) -> None:
        """Free the slot of an adapter that no later step uses; steps in flight may still read it."""
        slot = self._slots.pop(number, None)
        if slot is None:
            return
        event = None
        if self._entries.is_cuda:
            event = torch.cuda.Event()
            event.record()
        for held in self.tables.values():
            held.pairs.pop(slot, None)
        self._free.append((slot, event))


def _write_groups(slots: np.ndarray, groups: np.ndarray) -> None:
    """Write AdapterSlots.groups. slots: of the rows with an adapter."""
    distinct, counts = np.unique(slots, return_counts=True)
    groups[:] = -1, len(slots)
    groups[: len(distinct), 0], groups[: len(distinct), 1] = distinct, np.cumsum(counts) - counts
