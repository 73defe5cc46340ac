"""Drafts on the device of each rank: what followed the newest tokens where they occurred before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter, SampledStep
from tridecode.backend.engine.device.drafters.row_inputs import RowInputs
from tridecode.backend.engine.device.pending import Found
from tridecode.backend.engine.device.step_sampler import StepSampler
from tridecode.backend.engine.parts.draft_sources import DraftSources, Entry
from tridecode.backend.engine.parts.forks import Forks
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.query_graphs import ROWS
from tridecode.backend.engine.step.results import empty_host, to_host
from tridecode.kernels.draft_history import SEPARATOR, DraftHistory


@dataclass(frozen=True)
class _Searched:
    """A decode step: slots and samples of its plan, whether it verifies, and its (n,) rows with drafts."""

    slots: np.ndarray
    samples: np.ndarray
    verifies: bool
    rows: np.ndarray

    def has_rows_of(self, plan: StepPlan) -> bool:
        """Return whether the rows of another decode step have the same table."""
        is_equal = np.array_equal(plan.slots, self.slots) and np.array_equal(plan.samples, self.samples)
        return is_equal and bool(plan.queries) == self.verifies


class LookupDrafter(DeviceDrafter):
    """Keeps the tokens of each slot on the device and drafts from them after each step (Ops.look_up).

    ring: tokens of the ring of finished answers. turns: host buffers of results, more than steps in flight.
    """

    is_planned = False

    def __init__(self, state: DeviceState, sampler: StepSampler, ring: int, turns: int):
        config, device = state.config, state.device
        assert config.max_sequence_tokens is not None
        self._ops, self._sampler, self._device = state.ops, sampler, device
        self._longest, self._block_tokens = config.max_sequence_tokens, config.block_tokens
        self.history = DraftHistory.allocate(config.slots, self._longest, ring, device)
        #: results of the newest search, by its rows
        self.found = torch.zeros((config.slots, 3), dtype=torch.int32, device=device)
        self._most = config.max_draft_tokens
        size = config.slots * (3 + self._most)
        self._host = [empty_host((size,), torch.int32, device) for _ in range(turns)]
        self._inputs = RowInputs({"table": (3 * config.slots, np.int32)}, device, turns)
        self._table = self._inputs.device["table"].view(-1, 3)
        self._drafts = np.zeros(config.slots, bool)  # by slot: whether its rows have drafts
        self._masked = np.zeros(config.slots, bool)  # whether it obeys a grammar: the host needs the drafts
        self._newest: _Searched | None = None  # the decode step whose table the device has
        self._next = self._used = 0  # place of the ring that is written next; written places

    @torch.inference_mode()
    def propose(self, step: SampledStep) -> Found | None:
        """Write state.drafts behind the newest tokens of a launched step.

        Return the (n,) rows of the plan that have drafts, and (n, 3) int32 of the host, which holds what
        Ops.look_up has found for them once the device has done the step; if a row obeys a grammar, with the
        drafts of all rows in further columns. None: no row has drafts.
        """
        rows = self.search(step)
        return None if rows is None else self.to_host(step, rows)

    def search(self, step: SampledStep) -> np.ndarray | None:
        """Write state.drafts and `found` behind a launched step; return the (n,) rows that have drafts."""
        plan, state = step.plan, step.state
        self._take_slots(plan)
        rows, table = self._searched_rows(plan)
        if not len(rows):
            return None
        self._ops.look_up(
            self.history,
            table,
            self._sampler.tokens,
            self._sampler.accepted,
            state.drafts,
            longest=self._longest_history(plan) if plan.num_decodes <= ROWS[-1] else 0,
            used=self._used,
            found=self.found[: len(rows)],
        )
        return rows

    def _searched_rows(self, plan: StepPlan) -> tuple[np.ndarray, Tensor]:
        """Return the (n,) rows of a plan that have drafts, and Ops.look_up's table of them. Most steps have
        the rows of the step before: with a small model, making and copying the table takes longer than
        searching."""
        is_decode = plan.num_decodes == plan.num_rows
        if is_decode and self._newest is not None and self._newest.has_rows_of(plan):
            return self._newest.rows, self._table[: len(self._newest.rows)]
        is_mine = (plan.samples > 0) & (plan.slots >= 0)
        is_mine[is_mine] = self._drafts[plan.slots[is_mine]]
        rows = np.flatnonzero(is_mine)
        self._newest = None
        if not len(rows):
            return rows, self._table[:0]
        table = self._inputs.next()["table"][: 3 * len(rows)].reshape(-1, 3)
        table[:, 0] = plan.slots[rows]
        table[:, 1] = (np.cumsum(plan.samples) - plan.samples)[rows]
        table[:, 2] = np.where(rows < plan.num_decodes, rows, -1) if plan.queries else -1
        self._inputs.send("table", table.size)
        if is_decode:
            self._newest = _Searched(plan.slots.copy(), plan.samples.copy(), bool(plan.queries), rows)
        return rows, self._table[: len(rows)]

    def to_host(self, step: SampledStep, rows: np.ndarray) -> Found:
        """Start the copy of what `propose` returns. rows: of the newest search."""
        plan, state, found = step.plan, step.state, self.found[: len(rows)]
        slots = plan.slots[rows]
        if self._masked[slots].any():
            places = _on_device(torch.from_numpy(slots.astype(np.int64)), self._device)
            found = torch.cat([found, state.drafts[places, : self._most]], 1)
        host = self._host[plan.step % len(self._host)][: found.numel()]
        return rows, to_host(found, host.view(found.shape))

    def _longest_history(self, plan: StepPlan) -> int:
        """Return an upper bound of the tokens of a history after the step."""
        return min(plan.block_tables.shape[1] * self._block_tokens + 1, self._longest)

    def _take_slots(self, plan: StepPlan) -> None:
        """Apply the copies of slots, the slots that start and the new texts of a plan."""
        history, forks, sources = self.history, plan.part(Forks), plan.part(DraftSources)
        if plan.starts or forks is not None or sources is not None:
            self._newest = None
        if forks is not None and forks.slots:
            pairs = np.array(forks.slots).T
            both = _on_device(torch.from_numpy(pairs.astype(np.int64)), self._device)
            for tensor in (history.tokens, history.lengths, history.scopes):
                tensor[both[1]] = tensor[both[0]]
            self._drafts[pairs[1]] = self._drafts[pairs[0]]
            self._masked[pairs[1]] = self._masked[pairs[0]]
        for start in plan.starts:
            self._drafts[start.slot], self._masked[start.slot] = False, start.masked
        if sources is None:
            return
        known = {start.slot: start.history for start in plan.starts}
        for slot, shared, private in sources.slots:
            tokens = known[slot][: self._longest]
            self._drafts[slot] = True
            history.tokens[slot, : len(tokens)] = self._ints(tokens)
            history.lengths[slot] = len(tokens)
            history.scopes[slot] = self._ints([shared, private])
        for entry in sources.entries:
            self._append(entry)

    def _append(self, entry: Entry) -> None:
        """Write a text into the ring, between two separators."""
        ring, scopes = self.history.ring, self.history.ring_scopes
        size = len(ring)
        tokens = np.concatenate([[SEPARATOR], entry.tokens[: size - 2], [SEPARATOR]])
        first = self._next
        while len(tokens):
            part = tokens[: size - first]
            ring[first : first + len(part)] = self._ints(part)
            scopes[first : first + len(part)] = entry.scope
            self._used = max(self._used, first + len(part))
            tokens, first = tokens[len(part) :], (first + len(part)) % size
        self._next = (first - 1) % size  # the next text begins at the last separator

    def _ints(self, values: object) -> Tensor:
        return _on_device(torch.from_numpy(np.asarray(values, np.int32).copy()), self._device)


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, made without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
