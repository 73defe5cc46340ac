"""The base of drafters that draw one token after the other, with the noise of the target's sampler."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.draft_rows import DraftRows
from tridecode.backend.engine.device.drafters.draft_weights import FIRST, NEXT
from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter, SampledStep
from tridecode.backend.engine.device.drafters.draws import DraftDraws
from tridecode.backend.engine.device.drafters.missed_tokens import MissedTokens
from tridecode.backend.engine.device.pending import Found
from tridecode.backend.engine.device.step_sampler import StepSampler
from tridecode.backend.engine.parts.draft_reads import DraftReads
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.ranks.vocab_share import mask_padding
from tridecode.backend.engine.step.decode_graphs import Capturer, no_collection
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.query_graphs import ROWS
from tridecode.kernels.operands import Batch


class SequentialDrafter(DeviceDrafter):
    """Draws the drafts of a row one after the other, each behind the one before it.

    A draft is drawn as the target's sampler would draw it from the drafter's logits: by the rules of its
    slot, with the number of its token. So a draft is right where both give the same token, also at a
    temperature. The slots' state of the drafts is a copy, since only kept tokens may change the target's.

    The drafter's cache has every token of a row but its newest two, or one: the newest has just been drawn,
    and if the row has kept all of its drafts, the last of them was never an input. So the first draft of a
    row reads these two tokens, each other one the draft before it. A row that is not drafted for behind a
    decode step has no drafts until the part DraftReads brings the tokens that were missed. `follow` writes
    the keys and values of steps with prompts.

    sampler: of the steps. step_ids: memory that begins with the token ids of each step, if their address is
    fixed; else None. hidden: the largest activations of a draft, (most tokens, C). turns: host buffers, more
    than the steps in flight.
    """

    keeps_cache = True

    def __init__(
        self,
        state: DeviceState,
        sampler: StepSampler,
        step_ids: torch.Tensor | None,
        hidden: torch.Tensor,
        turns: int,
    ):
        config, device = state.config, state.device
        self._state, self._sampler, self._hidden = state, sampler, hidden
        self._captures = step_ids is not None
        #: until the first step, one id, which empty rows read
        self._step_ids = torch.zeros(1, dtype=torch.int32, device=device) if step_ids is None else step_ids
        self._draws = DraftDraws(state)
        #: what Ops.place_rows reads of the newest two tokens
        self._newest = replace(self._draws.sampling, drafts=state.sampling.drafts.clone())
        self._inputs = DraftRows(config, device, turns)
        self._missed = MissedTokens(state, turns)
        self._ids = torch.zeros(state.work.hidden.shape[0], dtype=torch.int32, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)  # number of the draft that is next
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.replayed = 0

    def _logits(self, batch: Batch) -> torch.Tensor:
        """Return the logits (R, V), or those of this rank's ids, behind the last token of each row, and write
        the drafter's keys and values of all tokens.

        batch: R rows of FIRST or NEXT tokens, placed, with an empty memo. May be captured in a CUDA graph.
        """
        raise NotImplementedError

    def _read(self, batch: Batch) -> None:
        """Write the drafter's keys and values of all tokens of a batch with prompts, or of one that verifies,
        whose ids are those of the vocabulary."""
        raise NotImplementedError

    def follow(self, batch: Batch, hidden: torch.Tensor) -> None:
        if batch.decode_tokens < batch.num_tokens or (self.reads_rows and batch.verifies):
            self._read(self._known_ids(batch))

    def _known_ids(self, batch: Batch) -> Batch:
        """Return a batch of a step with ids of the vocabulary: those of virtual tokens (prompt tables) are
        beyond it."""
        ids = self._ids[: batch.num_tokens]
        torch.clamp(batch.token_ids, 0, self._state.model_config.vocab_size - 1, out=ids)
        return replace(batch, token_ids=ids, memo={})

    def begin(self, plan: StepPlan) -> None:
        part = plan.part(Drafting)
        if part is not None and plan.num_decodes == plan.num_rows:
            self._send(plan, part, 0)

    @torch.inference_mode()
    def propose(self, step: SampledStep) -> Found | None:
        missed, part = step.plan.part(DraftReads), step.plan.part(Drafting)
        if missed is not None:
            self._read(self._missed.load(missed, step.plan))
        if part is None:
            return None
        plan, rows = step.plan, part.rows
        if not self._graphs:
            self._step_ids = step.batch.token_ids
        assert self._step_ids.data_ptr() == step.batch.token_ids.data_ptr()
        if plan.num_decodes < plan.num_rows:
            self._send(plan, part, step.batch.decode_tokens - int(plan.query_starts[plan.num_decodes]))
        self._draws.take_counts(plan.slots[rows])
        self._run(self._padded(len(rows)), part.count)
        return self.masked_drafts(step)

    def _send(self, plan: StepPlan, part: Drafting, gap: int) -> None:
        """Send the inputs of the rows of a part. gap: padding of the step's batch before its prompts."""
        rows, kept_all = part.rows, self._sampler.kept_all
        places, masked = self._places(plan, rows, gap), plan.slots[part.masked]
        padded = self._padded(len(rows))
        self._inputs.send(plan.slots[rows], plan.block_tables[rows], padded, places, masked, kept_all)

    def prepare(self, phase: Callable[[str], None]) -> None:
        """Capture graphs of the first draft and of another one, for each padded number of rows, on a GPU
        whose steps run as graphs."""
        state = self._state
        if not self._captures:
            return
        capture = Capturer(self._draw, phase, lambda: torch.cuda.synchronize(state.device))
        sizes = [
            (rows, tokens)
            for rows in ROWS
            for tokens in (NEXT, FIRST)
            if rows <= state.config.slots and state.ranks.captures(self._hidden[: rows * tokens])
        ]
        if sizes:
            self._send_empty(max(sizes)[0])
        with no_collection():
            for rows, tokens in reversed(sizes):
                self._turn.zero_()
                self._graphs[rows, tokens] = capture((rows, tokens), f"of a draft of {rows} rows")

    @torch.inference_mode()
    def rehearse(self, rows: int, drafts: int) -> None:
        padded = self._padded(rows)
        self._send_empty(padded)
        self._run(padded, drafts)

    def _send_empty(self, rows: int) -> None:
        slots, tables = np.full(rows, -1, np.int32), np.zeros((rows, 1), np.int32)
        self._inputs.send(slots, tables, rows, kept_all=self._sampler.kept_all)

    def _padded(self, rows: int) -> int:
        """Return the rows of the graphs for this many rows; `rows` if there are none."""
        place = bisect_left(ROWS, rows)
        return ROWS[place] if place < len(ROWS) and (ROWS[place], NEXT) in self._graphs else rows

    def _places(
        self, plan: StepPlan, rows: np.ndarray, gap: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return DraftRows' before, counted and known of these rows of a step. gap: see _send."""
        kept_all, is_prompt = self._sampler.kept_all, rows >= plan.num_decodes
        last = np.where(is_prompt, plan.query_starts[rows + 1] - 1 + gap, plan.query_starts[rows])
        if not plan.queries:
            return last - 1, np.full(len(rows), kept_all), plan.context_lens[rows]
        known = np.where(is_prompt, plan.context_lens[rows], -1)
        return last - 1, np.where(is_prompt, kept_all, rows), known

    def _take_state(self, rows: int) -> None:
        """Let Ops.place_rows place the newest two tokens of the rows of the inputs; may be captured."""
        state, own, given = self._state.sampling, self._newest, self._inputs.inputs.device
        where, known = given["where"][:rows], given["known"][:rows]
        self._draws.take(given["keeps"])
        before = given["before"][:rows] + self._sampler.counts.index_select(0, given["counted"][:rows])
        own.last_tokens.index_copy_(0, where, self._step_ids.index_select(0, before))
        place = torch.where(known >= 0, known, state.lengths.index_select(0, where))
        own.lengths.index_copy_(0, where, (place - 1).int())
        own.drafts[:, 0].index_copy_(0, where, state.last_tokens.index_select(0, where))
        self._turn.zero_()

    def _run(self, rows: int, count: int) -> None:
        """Write `count` drafts of each of the rows of the inputs to SamplingState.drafts."""
        for tokens in [FIRST, *[NEXT] * (count - 1)]:
            graph = self._graphs.get((rows, tokens))
            if graph is None:
                self._draw((rows, tokens))
            else:
                graph.replay()
                self.replayed += 1

    @torch.inference_mode()
    def _draw(self, size: tuple[int, int]) -> None:
        """Draw the next draft of each row. size: the rows, and the tokens of each: FIRST for the first draft,
        else NEXT."""
        state, own, (rows, tokens) = self._state, self._newest, size
        given = self._inputs.inputs.device
        if tokens == FIRST:
            self._take_state(rows)
        batch = replace(self._inputs.batch(rows, tokens), memo={})  # positions change from token to token
        self._inputs.reset(rows, tokens)
        state.ops.place_rows(batch, own, state.config.block_tokens)
        logits = mask_padding(self._logits(batch), state.vocab)
        drawn = self._draws.draw(logits, given["slots"][:rows])
        own.lengths.add_(tokens)  # of all slots: those of others are not read
        drafts, place = state.sampling.drafts.view(-1), given["drafts"][:rows] + self._turn
        drafts.index_copy_(0, place, drawn.index_select(0, given["source"][:rows]))
        self._turn.add_(1)
