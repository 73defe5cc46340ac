"""The base of drafters that draw one token after the other, with the noise of the target's sampler."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.draft_weights import FIRST, NEXT
from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter, SampledStep
from tridecode.backend.engine.device.drafters.draws import DraftDraws
from tridecode.backend.engine.device.drafters.missed_tokens import MissedTokens
from tridecode.backend.engine.device.pending import Found
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.parts.draft_reads import DraftReads
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.ranks.vocab_share import mask_padding
from tridecode.backend.engine.step.decode_graphs import Capturer, no_collection
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.query_graphs import ROWS, empty_rows
from tridecode.backend.engine.step.step_buffers import StepBuffers
from tridecode.kernels.operands import Batch
from tridecode.kernels.sampling_state import MOST_DRAFTS


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

    hidden: the largest activations of a draft, (most tokens, C). turns: host buffers of plans, more than
    steps in flight.
    """

    keeps_cache = True

    def __init__(self, state: DeviceState, hidden: torch.Tensor, turns: int):
        config, device = state.config, state.device
        assert config.max_sequence_tokens is not None
        self._state, self._hidden = state, hidden
        self._longest: int = config.max_sequence_tokens
        self._draws = DraftDraws(state)
        #: what Ops.place_rows reads of the newest two tokens
        self._newest = replace(self._draws.sampling, drafts=state.sampling.drafts.clone())
        columns = -(-self._longest // config.block_tokens)
        tokens, rows = FIRST * config.slots, config.slots
        self.buffers = StepBuffers(tokens, tokens, columns, device, FIRST * turns)
        self._missed = MissedTokens(state, turns)
        self._ids = torch.zeros(state.work.hidden.shape[0], dtype=torch.int32, device=device)
        self._drawn = torch.zeros((MOST_DRAFTS + 1, rows), dtype=torch.int32, device=device)
        #: StepBuffers.placed of the newest batch before its rows are placed
        self._unplaced = torch.zeros(4 * (tokens + 4), dtype=torch.int32, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)  # row of _drawn that is written next
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Batch]] = {}
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

    @torch.inference_mode()
    def propose(self, step: SampledStep) -> Found | None:
        missed, part = step.plan.part(DraftReads), step.plan.part(Drafting)
        if missed is not None:
            self._read(self._missed.load(missed, step.plan))
        if part is None:
            return None
        slots = step.plan.slots[part.rows]
        where = on_device(torch.from_numpy(slots.astype(np.int64)), self._state.device)
        self._draws.take(step.state, slots, step.plan.slots[part.masked])
        self._take_state(step, part.rows, where)
        drawn = self._run(slots, step.plan.block_tables[part.rows], part.count)
        step.state.drafts[:, : part.count].index_copy_(0, where, drawn.T)
        return self.masked_drafts(step)

    def prepare(self, phase: Callable[[str], None]) -> None:
        """Capture graphs of the first draft and of another one, for each padded number of rows, on a GPU
        whose steps run as graphs."""
        state = self._state
        capture = Capturer(self._draw, phase, lambda: torch.cuda.synchronize(state.device))
        sizes = [
            (rows, tokens)
            for rows in ROWS
            for tokens in (NEXT, FIRST)
            if rows <= state.config.slots and state.ranks.captures(self._hidden[: rows * tokens])
        ]
        with no_collection():
            for rows, tokens in reversed(sizes):
                batch = self._load(empty_rows(rows, tokens), rows, tokens)
                self._turn.zero_()
                self._graphs[rows, tokens] = capture(batch, f"of a draft of {rows} rows"), batch

    @torch.inference_mode()
    def rehearse(self, rows: int, drafts: int) -> None:
        self._run(np.full(rows, -1, np.int32), np.zeros((rows, 1), np.int32), drafts)

    def _take_state(self, step: SampledStep, rows: np.ndarray, where: torch.Tensor) -> None:
        """Let Ops.place_rows place the newest two tokens of these rows of a step. where: (n,) int64, their
        slots."""
        plan, state, own, device = step.plan, step.state, self._newest, self._state.device
        # (3, n): the token before the newest, of the batch, plus the row that counts the kept ones, or -1;
        # the place of the newest, or -1 if only the device knows it
        is_prompt = rows >= plan.num_decodes
        counted = np.where(is_prompt | (plan.queries == 0), -1, rows)
        gap = step.batch.decode_tokens - int(plan.query_starts[plan.num_decodes])  # padding before prompts
        last = np.where(is_prompt, plan.query_starts[rows + 1] - 1 + gap, plan.query_starts[rows])
        known = np.where(counted < 0, plan.context_lens[rows], -1)
        packed = np.stack([last - (counted >= 0), counted, known]).astype(np.int64)
        before, counts, place = on_device(torch.from_numpy(packed), device).unbind(0)
        if plan.queries:
            kept = step.accepted.index_select(0, counts.clamp(min=0)).long()
            before = before + torch.where(counts >= 0, kept, 0)
            place = torch.where(place >= 0, place, state.lengths.index_select(0, where).long())
        own.last_tokens.index_copy_(0, where, step.batch.token_ids.index_select(0, before))
        own.lengths.index_copy_(0, where, (place - 1).int())
        own.drafts[:, 0].index_copy_(0, where, state.last_tokens.index_select(0, where))

    def _run(self, slots: np.ndarray, tables: np.ndarray, count: int) -> torch.Tensor:
        """Draw `count` tokens behind each row; return (count, rows) int32. slots: (n,) int32. tables: (n, M)
        int32, blocks for as many tokens more."""
        rows = len(slots)
        self._turn.zero_()
        self._draw_times(_rows_of(slots, tables, FIRST), 1)
        if count > 1:
            self._draw_times(_rows_of(slots, tables, NEXT), count - 1)
        return self._drawn[:count, :rows]

    def _draw_times(self, plan: StepPlan, times: int) -> None:
        rows, tokens = plan.num_rows, plan.queries
        place = bisect_left(ROWS, rows)
        graph = self._graphs.get((ROWS[place], tokens)) if place < len(ROWS) else None
        batch = self._load(plan, rows if graph is None else ROWS[place], tokens)
        for _ in range(times):
            if graph is None:
                self._draw(batch)
            else:
                graph[0].replay()
                self.replayed += 1

    def _load(self, plan: StepPlan, rows: int, tokens: int) -> Batch:
        """Load the rows of drafts, and keep a copy of what placing them overwrites."""
        batch = self.buffers.load_rows(plan, rows, tokens, self._longest)
        placed = self.buffers.placed
        self._unplaced[: len(placed)].copy_(placed)
        return batch

    @torch.inference_mode()
    def _draw(self, batch: Batch) -> None:
        """Draw the token behind the last of each row into a row of _drawn. A batch of one token a row is then
        that of the drawn token."""
        state, own, tokens = self._state, self._newest, batch.decode_queries
        batch = replace(batch, memo={})  # positions change from token to token
        state.ops.place_rows(batch, own, state.config.block_tokens)
        slots = batch.sample_slots[tokens - 1 :: tokens].contiguous()
        logits = mask_padding(self._logits(batch), state.vocab)
        drawn = self._draws.draw(logits, slots)
        own.lengths.add_(tokens)  # of all slots: those of others are not read
        self._drawn[:, : batch.num_rows].index_copy_(0, self._turn, drawn[None])
        self._turn.add_(1)
        if tokens == 1:
            self.buffers.placed.copy_(self._unplaced[: len(self.buffers.placed)])


def _rows_of(slots: np.ndarray, tables: np.ndarray, tokens: int) -> StepPlan:
    """Return a plan of rows of this many tokens, whose ids and places only the device knows."""
    rows = len(slots)
    total = rows * tokens
    return StepPlan(
        step=0,
        token_ids=np.full(total, -1, np.int32),
        positions=np.zeros(total, np.int32),
        kv_slots=np.full(total, -1, np.int32),
        block_tables=tables,
        context_lens=np.where(slots < 0, 0, -1).astype(np.int32),
        query_starts=np.arange(0, total + 1, tokens, dtype=np.int32),
        slots=slots,
        samples=np.full(rows, tokens, np.int32),
        num_decodes=rows,
        queries=tokens,
    )
