"""Lookup and a planned drafter in one engine: the drafts of a long match replace those of the planned one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter, SampledStep
from tridecode.backend.engine.device.drafters.lookup import LookupDrafter
from tridecode.backend.engine.device.pending import Found
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.kernels.draft_history import MATCHED
from tridecode.kernels.operands import Batch


class CombinedDrafter(DeviceDrafter):
    """Searches after each step, and drafts with `planned` after the steps whose plan has the part Drafting. A
    row that has both keeps the drafts of a match of Drafting.least tokens or more.

    The tokens of a match differ from those that the planned drafter has drafted. A planned drafter with a
    cache therefore reads the rows of steps that verify (reads_rows): its cache is complete whichever drafts a
    row keeps.
    """

    looks_up = True

    def __init__(self, state: DeviceState, lookup: LookupDrafter, planned: DeviceDrafter):
        self._device, self._lookup, self.planned = state.device, lookup, planned
        self.source, self.keeps_cache = planned.source, planned.keeps_cache
        self.most_planned, self.weights = planned.most_drafts, planned.weights
        self.reads_rows = planned.reads_rows = planned.keeps_cache

    def begin(self, plan: StepPlan) -> None:
        self._lookup.begin(plan)
        self.planned.begin(plan)

    def follow(self, batch: Batch, hidden: torch.Tensor) -> None:
        self.planned.follow(batch, hidden)

    def sampled(self, batch: Batch) -> None:
        self._lookup.sampled(batch)

    @torch.inference_mode()
    def propose(self, step: SampledStep) -> Found | None:
        rows, part = self._lookup.searched_rows(step), step.plan.part(Drafting)
        if rows is None or part is None:
            found = self.planned.propose(step)
            return found if rows is None else self._lookup.to_host(step, rows)
        drafts = step.state.drafts
        place = np.minimum(np.searchsorted(rows, part.rows), len(rows) - 1)
        place[rows[place] != part.rows] = -1  # was not searched for
        packed = np.stack([step.plan.slots[part.rows], place]).astype(np.int64)
        slots, place_there = on_device(torch.from_numpy(packed), self._device).unbind(0)
        matched = self._lookup.found[:, MATCHED].index_select(0, place_there.clamp(min=0))
        is_long = (place_there >= 0) & (matched >= part.least)
        of_match = drafts.index_select(0, slots)
        self.planned.propose(step)
        drafts.index_copy_(0, slots, torch.where(is_long[:, None], of_match, drafts.index_select(0, slots)))
        return self._lookup.to_host(step, rows)

    def prepare(self, phase: Callable[[str], None]) -> None:
        self.planned.prepare(phase)

    def rehearse(self, rows: int, drafts: int) -> None:
        self.planned.rehearse(rows, min(drafts, self.most_planned))
