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
from tridecode.kernels.operands import Batch


@dataclass(frozen=True)
class _Searched:
    """A decode step: slots and samples of its plan, and whether it verifies. given: the plan's own arrays; on
    rank 0 plans of equal rows share theirs."""

    slots: np.ndarray
    samples: np.ndarray
    verifies: bool
    given: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, plan: StepPlan) -> _Searched:
        given = plan.slots, plan.samples
        return cls(plan.slots.copy(), plan.samples.copy(), bool(plan.queries), given)

    def has_rows_of(self, plan: StepPlan) -> bool:
        """Return whether the rows of another decode step have the same table."""
        if bool(plan.queries) != self.verifies:
            return False
        if plan.slots is self.given[0] and plan.samples is self.given[1]:
            return True
        return np.array_equal(plan.slots, self.slots) and np.array_equal(plan.samples, self.samples)


class LookupDrafter(DeviceDrafter):
    """Keeps the tokens of each slot on the device and drafts from them in each step (Ops.look_up).

    In steps of decode rows alone the search is a part of the CUDA graph, and its results come to the host
    with the step's tokens: a step that finds nothing takes the host as long as one without a search. Other
    steps are searched after their launch, and so are all on stages that get the tokens from another one.

    ring: tokens of the ring of finished answers. turns: host buffers, more than steps in flight.
    """

    is_planned = False

    def __init__(self, state: DeviceState, sampler: StepSampler, ring: int, turns: int):
        config, device = state.config, state.device
        assert config.max_sequence_tokens is not None
        self._ops, self._sampler, self._device, self._state = state.ops, sampler, device, state.sampling
        self._longest = config.max_sequence_tokens
        self.history = DraftHistory.allocate(config.slots, self._longest, ring, device)
        assert sampler.found is not None
        self.found = sampler.found  # of the newest search, by its rows
        self._most = config.max_draft_tokens
        self._has_tokens = state.ranks.num_stages == 1  # within the step
        self._searches_later = not self._has_tokens  # whether `propose` searches for the newest plan
        size = config.slots * (3 + self._most)
        self._host = [empty_host((size,), torch.int32, device) for _ in range(turns)]
        self._inputs = RowInputs({"table": (3 * config.slots, np.int32)}, device, turns)
        self._table = self._inputs.device["table"].view(-1, 3).fill_(-1)
        self._drafts = np.zeros(config.slots, bool)  # by slot: whether its rows have drafts
        self._masked = np.zeros(config.slots, bool)  # whether it obeys a grammar: the host needs the drafts
        self._newest: _Searched | None = None  # the decode step whose table the device has
        self._rows = np.zeros(0, np.int64)  # of the newest plan, those with drafts
        self._has_masked = False  # whether one of them obeys a grammar
        self._is_empty = True  # whether the table of the device has no rows
        self._next = self._used = 0  # place of the ring that is written next; written places

    def begin(self, plan: StepPlan) -> None:
        is_decode = plan.num_decodes == plan.num_rows
        self._searches_later = not (is_decode and self._has_tokens) or bool(plan.starts)
        if not self._searches_later and (plan.parts or not self._has_table_of(plan)):
            with torch.inference_mode():
                self._copy_slots(plan)
                self._send_table(plan)

    def sampled(self, batch: Batch) -> None:
        if not self._searches_later and batch.num_decodes == len(batch.context_lens):
            self._search(len(batch.context_lens), batch.num_decodes)

    def propose(self, step: SampledStep) -> Found | None:
        """Return the (n,) rows of the plan that have drafts, and (n, 3) int32 of the host, which holds what
        Ops.look_up has found for them once the device has done the step; if a row obeys a grammar, with the
        drafts of all rows in further columns. None: no row has drafts.
        """
        rows = self.searched_rows(step)
        return None if rows is None else self.to_host(step, rows)

    def searched_rows(self, step: SampledStep) -> np.ndarray | None:
        """Return the (n,) rows of a launched plan that have drafts, whose `found` and state.drafts the device
        writes; None: there are none."""
        plan = step.plan
        if self._searches_later:
            with torch.inference_mode():
                self._copy_slots(plan)
                self._take_texts(plan)
                self._send_table(plan)
                if len(self._rows):
                    self._search(len(self._rows), plan.num_decodes)
            self._searches_later = not self._has_tokens  # graphs may be captured before the next plan
        elif plan.parts:
            with torch.inference_mode():
                self._take_texts(plan)
        return self._rows if len(self._rows) else None

    def _search(self, count: int, num_decodes: int) -> None:
        """Search for the first `count` rows of the table."""
        self._ops.look_up(
            self.history,
            self._table[:count],
            self._sampler.tokens,
            self._sampler.accepted,
            self._state.drafts,
            searches=num_decodes <= ROWS[-1],
            found=self.found[:count],
        )

    def _has_table_of(self, plan: StepPlan) -> bool:
        """Return whether the device has the table of a plan. Most steps have the rows of the step before:
        making and copying the table takes longer than searching."""
        is_decode = plan.num_decodes == plan.num_rows
        return is_decode and self._newest is not None and self._newest.has_rows_of(plan)

    def _send_table(self, plan: StepPlan) -> None:
        """Send Ops.look_up's table of the rows that have drafts, if the device does not have it."""
        if self._has_table_of(plan):
            return
        is_mine = (plan.samples > 0) & (plan.slots >= 0)
        is_mine[is_mine] = self._drafts[plan.slots[is_mine]]
        self._rows = rows = np.flatnonzero(is_mine)
        self._has_masked = bool(self._masked[plan.slots[rows]].any())
        self._newest = _Searched.of(plan) if plan.num_decodes == plan.num_rows else None
        if not len(rows) and self._is_empty:
            return
        table = self._inputs.next()["table"].reshape(-1, 3)
        table[: len(rows), 0] = plan.slots[rows]
        table[: len(rows), 1] = (np.cumsum(plan.samples) - plan.samples)[rows]
        table[: len(rows), 2] = np.where(rows < plan.num_decodes, rows, -1) if plan.queries else -1
        table[len(rows) :, 0] = -1
        self._inputs.send()
        self._is_empty = not len(rows)

    def to_host(self, step: SampledStep, rows: np.ndarray) -> Found:
        """Return what `propose` returns. rows: of the newest search."""
        plan, count = step.plan, len(rows)
        if not self._has_masked and self._has_tokens:
            return rows, self._sampler.fetched_found(plan, count)
        with torch.inference_mode():
            found = self.found[:count]
            if self._has_masked:
                places = _on_device(torch.from_numpy(plan.slots[rows].astype(np.int64)), self._device)
                found = torch.cat([found, self._state.drafts[places, : self._most]], 1)
            host = self._host[plan.step % len(self._host)][: found.numel()]
            return rows, to_host(found, host.view(found.shape))

    def _copy_slots(self, plan: StepPlan) -> None:
        """Apply the copies of slots of a plan."""
        history, forks = self.history, plan.part(Forks)
        if forks is None or not forks.slots:
            return
        self._newest = None
        pairs = np.array(forks.slots).T
        both = _on_device(torch.from_numpy(pairs.astype(np.int64)), self._device)
        for tensor in (history.tokens, history.lengths, history.scopes):
            tensor[both[1]] = tensor[both[0]]
        self._drafts[pairs[1]] = self._drafts[pairs[0]]
        self._masked[pairs[1]] = self._masked[pairs[0]]

    def _take_texts(self, plan: StepPlan) -> None:
        """Take the slots that start and the new texts of a plan."""
        history, sources = self.history, plan.part(DraftSources)
        if plan.starts:
            self._newest = None
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
        if sources.entries:
            history.used.fill_(self._used)

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
