"""The interface between a step and a drafter on the device, which proposes the tokens that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.pending import Found
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.device.step_sampler import StepSampler
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.speculation.records import DRAFT_MODEL
from tridecode.backend.engine.step.plan import MOST_QUERIES, StepPlan
from tridecode.backend.engine.step.results import to_host
from tridecode.backend.models.context import Workspace
from tridecode.kernels.operands import Batch
from tridecode.kernels.sampling_state import SamplingState


@dataclass
class SampledStep:
    """A step whose tokens are drawn, in the order of the device's stream: the host does not know them yet.

    plan: as launched, without padding. batch: as the device has it, padded for a CUDA graph; token_ids,
    positions, kv_slots and context_lens are complete (the plan has -1 for what only the device knows).
    hidden: (T, C), output of the last layer before the final norm, for each token of the batch. tokens: (R,)
    int32, drawn tokens of the plan's samples, below 0 for a row without a token. accepted: (num_decodes,)
    int32, samples that each decode row of the plan keeps, valid where plan.queries is not 0; else all keep 1.
    state: as the step leaves it: last_tokens, and lengths of rows that were verified.
    """

    plan: StepPlan
    batch: Batch
    state: SamplingState
    _work: Workspace
    _sampler: StepSampler

    @property
    def hidden(self) -> Tensor:
        return self._work.hidden[: self.batch.num_tokens]

    @property
    def tokens(self) -> Tensor:
        return self._sampler.tokens[: self.plan.num_samples]

    @property
    def accepted(self) -> Tensor:
        return self._sampler.accepted[: self.plan.num_decodes]

    def batch_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows of the batch that are these rows of the plan: padding stands between decode rows
        and prompts."""
        gap = self.batch.num_decodes - self.plan.num_decodes
        return np.where(rows < self.plan.num_decodes, rows, rows + gap)


class DeviceDrafter:
    """Proposes tokens on the device of each rank, for a scheduler whose Drafter leaves their ids to it.

    Base class: a drafter overrides what it needs. `begin`, `follow`, `sampled` and `propose` run on every
    rank for each step, in this order, on the stream of the step; none may wait for the device. Cache layers
    of its own belong in DeviceState.draft_layers: they are further layers of the target's blocks, so that
    forks, prefix hits, sessions and the host tier carry them.

    When proposals are made: a step whose plan has the part Drafting wants `count` drafts behind the newest
    token of each of its `rows`, written to state.drafts[slot, :count]. The blocks of these rows hold count
    tokens more than the rows keep at most, so cache writes of the drafts have a place. A drafter that
    needs no such part (look-up) drafts whenever it likes.
    """

    #: drafts of a row, at most; max_draft_tokens may allow fewer
    most_drafts = MOST_QUERIES - 1
    #: DraftRecord.source of planned drafts
    source = DRAFT_MODEL
    #: whether proposals take time that the scheduler must plan (part Drafting)
    is_planned = True
    #: whether a row gets no drafts once a decode step has none behind it, since the drafter's own cache then
    #: lacks tokens; `propose` reads those that the part DraftReads brings, before it drafts
    keeps_cache = False
    #: whether `follow` also reads the rows of steps that verify: a row may keep drafts of another drafter
    reads_rows = False
    #: whether it also searches earlier text (combined.py)
    looks_up = False
    #: drafts of a row by the part Drafting, at most
    most_planned = MOST_QUERIES - 1
    #: a trained drafter's tensors, for the memory plan
    weights: object = None

    def begin(self, plan: StepPlan) -> None:
        """Send what `propose` needs of the plan, before the step is launched: a transfer between two kernels
        takes longer than one next to that of the plan."""

    def follow(self, batch: Batch, hidden: Tensor) -> None:
        """Take the tokens of a forward: write the drafter's own keys and values of the batch's tokens.

        It runs before the step samples, as a part of the step's CUDA graph: only launches, always the same
        for a batch of one shape. hidden: (T, C), the last layer's output.
        """

    def sampled(self, batch: Batch) -> None:
        """Launch what drafts need behind the step's samples, on a rank that draws them; a part of the step's
        CUDA graph, as `follow`. The samples are in StepSampler.tokens, in the order of the plan's rows."""

    def propose(self, step: SampledStep) -> Found | None:
        """Write state.drafts for the slots of a step that has just been launched; not part of its graph.

        Return the values of StepResult.found, if the drafter measures how good its proposals are."""
        return None

    def masked_drafts(self, step: SampledStep) -> Found | None:
        """Start the copy of the drafts of rows that obey a grammar to the host, after `propose` has written
        them. Return the rows and (m, 3 + count) int32: three columns for what a search has found, then the
        drafts; None: there are no such rows."""
        part = step.plan.part(Drafting)
        if part is None or not len(part.masked):
            return None
        slots = torch.from_numpy(step.plan.slots[part.masked].astype(np.int64))
        drafts = step.state.drafts.index_select(0, on_device(slots, step.state.drafts.device))
        return part.masked, to_host(torch.nn.functional.pad(drafts[:, : part.count], (3, 0)))

    def prepare(self, phase: Callable[[str], None]) -> None:
        """Capture CUDA graphs, after the cache is allocated. phase: called with the name of what begins."""

    def rehearse(self, rows: int, drafts: int) -> None:
        """Run what `propose` launches for `drafts` drafts of `rows` empty rows: its time is the cost of these
        drafts (measured_costs.py), which DepthPolicy weighs against the chance that they are right."""
