"""Sequences that obey a grammar: when they wait, and the masks of their rows. Host only: no torch."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tridecode.backend.engine.grammars.service import Grammars
from tridecode.backend.engine.schedule.planner import Planner
from tridecode.backend.engine.schedule.request_table import RequestTable
from tridecode.backend.engine.schedule.sequence import Finish, Sequence, SequenceGroup, Stage
from tridecode.backend.engine.step.plan import StepPlan

#: how long a step is held back for masks that threads compute: while other rows could run, and else
MASK_WAIT_S, IDLE_MASK_WAIT_S = 0.001, 0.005
MASK_POLL_S = 0.0003  # interval at which a wait for masks looks at the device


class MaskedRows:
    """The sequences with a constraint, between the commit of a token and the step that draws the next one."""

    def __init__(self, grammars: Grammars, planner: Planner, requests: RequestTable):
        self._grammars, self._planner, self._requests = grammars, planner, requests

    def take_ready(self) -> list[SequenceGroup]:
        """Return the groups whose grammar was compiled since the last call; end those whose grammar is
        refused. Sequences whose masks are ready continue.
        """
        groups = []
        for group, error in self._grammars.take_ready():
            if error is not None:
                self._requests.end_group(group, Finish.ERROR, error)
                continue
            for sequence in list(group.sequences):
                self._end_if_over(sequence)
            if group.sequences:
                groups.append(group)
        if self._grammars.outstanding:
            self._settle(MASK_WAIT_S if self._planner.has_other_rows else IDLE_MASK_WAIT_S)
        return groups

    def _settle(self, seconds: float) -> None:
        """Wait for masks up to `seconds`; let the sequences continue whose masks are ready."""
        ready = self._grammars.settle(seconds)
        for sequence in ready:
            self._end_if_over(sequence)
        self._planner.resume(ready)

    def take_late(self, plan: StepPlan, is_done: Callable[[], bool]) -> tuple[list[int], np.ndarray]:
        """Return which rows of plan.late can be sampled now, and their masks (n, W).

        Waits until the plan's forward is done, which delays nothing, and MASK_WAIT_S longer. Rows without a
        mask are taken back (plan.missed). is_done: whether the forward is done. Call it for the newest plan,
        after the commit of the plan before it.
        """
        last: float | None = None  # when the wait ends
        while self._grammars.outstanding and (last is None or time.monotonic() < last):
            if last is None and is_done():
                last = time.monotonic() + MASK_WAIT_S
            self._settle(MASK_POLL_S)
        rows, masks = [], []
        for row in plan.late:
            sequence = plan.sequences[row]
            constraint = sequence.constraint
            if sequence.stage is Stage.ENDED:
                continue
            if constraint.ready:
                rows.append(row)
                masks.append(constraint.mask)
            else:
                plan.missed.append(row)
                self._grammars.counts.late_masks += 1
                self._planner.miss(sequence)
        return rows, np.stack(masks) if masks else np.zeros((0, 0), np.int32)

    def _end_if_over(self, sequence: Sequence) -> None:
        """End a sequence whose grammar failed, or whose answer is complete without a token that ends it."""
        constraint = sequence.constraint
        if constraint is None or sequence.stage is Stage.ENDED:
            return
        if constraint.error is not None:
            self._grammars.counts.fail(constraint.error)
            self._requests.end(sequence, Finish.ERROR, constraint.error)
        elif constraint.is_over:
            self._requests.end(sequence, Finish.END_ID)
