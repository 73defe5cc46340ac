"""Drafts of a draft model: it draws the next tokens of each row with the noise of the target's sampler."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter, SampledStep
from tridecode.backend.engine.device.drafters.draws import DraftDraws
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.ranks.vocab_share import mask_padding
from tridecode.backend.engine.step.decode_graphs import Capturer, no_collection
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.query_graphs import ROWS, empty_rows
from tridecode.backend.engine.step.step_buffers import StepBuffers
from tridecode.backend.models.context import Context
from tridecode.kernels.operands import Batch
from tridecode.kernels.sampling_state import MOST_DRAFTS


class ModelDrafter(DeviceDrafter):
    """Runs DeviceState.draft: over the tokens of each forward, so that its cache is as full as the target's,
    and then, behind a step, one token at a time.

    A draft is drawn as the target's sampler would draw it from the draft model's logits: by the rules of its
    slot, with the number of its token. So a draft is right where both models give the same token, also at a
    temperature. The slots' state of the drafts is a copy, since only kept tokens may change the target's.

    turns: host buffers of plans, more than steps in flight.
    """

    def __init__(self, state: DeviceState, turns: int):
        assert state.draft is not None and state.config.max_sequence_tokens is not None
        config, device = state.config, state.device
        self._state, self._draft, self._longest = state, state.draft, state.config.max_sequence_tokens
        self._first = len(state.model.layers) + len(state.draft_layers)
        self._num_layers = self._draft.config.num_layers
        state.draft_layers += self._draft.block_shapes(config.block_tokens, state.ranks.tensor_size)
        self._draws = DraftDraws(state)
        columns = -(-self._longest // config.block_tokens)
        self.buffers = StepBuffers(config.slots, config.slots, columns, device, turns)
        self._ids = torch.zeros(state.work.hidden.shape[0], dtype=torch.int32, device=device)
        self._drawn = torch.zeros((MOST_DRAFTS + 1, config.slots), dtype=torch.int32, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)  # row of _drawn that is written next
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Batch]] = {}
        self.replayed = 0

    def follow(self, batch: Batch, hidden: torch.Tensor) -> None:
        ids = self._ids[: batch.num_tokens]
        # ids of virtual tokens (prompt tables) are beyond the vocabulary
        torch.clamp(batch.token_ids, 0, self._draft.config.vocab_size - 1, out=ids)
        self._forward(replace(batch, token_ids=ids, memo={}))

    @torch.inference_mode()
    def propose(self, step: SampledStep) -> None:
        part = step.plan.part(Drafting)
        if part is None:
            return
        slots = step.plan.slots[part.rows]
        self._draws.take(step.state, slots)
        drawn = self._run(self._first_rows(step.plan, part.rows), part.count)
        where = on_device(torch.from_numpy(slots.astype(np.int64)), self._state.device)
        step.state.drafts[:, : part.count].index_copy_(0, where, drawn.T)

    def prepare(self, phase: Callable[[str], None]) -> None:
        """Capture a graph of one draft of each padded number of rows, on a GPU whose steps run as graphs."""
        state = self._state
        capture = Capturer(self._draw, phase, lambda: torch.cuda.synchronize(state.device))
        sizes = [
            rows
            for rows in ROWS
            if rows <= state.config.slots and state.ranks.captures(self._draft.work.hidden[:rows])
        ]
        with no_collection():
            for rows in reversed(sizes):
                batch = self.buffers.load_rows(empty_rows(rows, 1), rows, 1, self._longest)
                self._turn.zero_()
                self._graphs[rows] = capture(batch, f"of a draft of {rows} rows"), batch

    @torch.inference_mode()
    def rehearse(self, rows: int, drafts: int) -> None:
        self._run(empty_rows(rows, 1), drafts)

    def _first_rows(self, plan: StepPlan, rows: np.ndarray) -> StepPlan:
        """Return a plan of the newest token of each row, whose id only the device knows.

        Its place is known behind a prompt and behind a row that kept its one token for certain; else it
        follows the accepted tokens (Ops.place_rows).
        """
        count, size = len(rows), self._state.config.block_tokens
        place = plan.context_lens[rows]
        is_known = np.full(count, True) if plan.queries == 0 else rows >= plan.num_decodes
        tables = plan.block_tables[rows]
        address = (
            tables[np.arange(count), np.minimum(place // size, tables.shape[1] - 1)] * size + place % size
        )
        return StepPlan(
            step=plan.step,
            token_ids=np.full(count, -1, np.int32),
            positions=np.where(is_known, place, 0).astype(np.int32),
            kv_slots=np.where(is_known, address, -1).astype(np.int32),
            block_tables=tables,
            context_lens=np.where(is_known, place + 1, -1).astype(np.int32),
            query_starts=np.arange(count + 1, dtype=np.int32),
            slots=plan.slots[rows],
            samples=np.ones(count, np.int32),
            num_decodes=count,
            queries=1,
        )

    def _run(self, plan: StepPlan, count: int) -> torch.Tensor:
        """Draw `count` tokens behind each row of a plan; return (count, rows) int32."""
        rows = plan.num_rows
        place = bisect_left(ROWS, rows)
        graph = self._graphs.get(ROWS[place]) if place < len(ROWS) else None
        padded = rows if graph is None else ROWS[place]
        batch = self.buffers.load_rows(plan, padded, 1, self._longest)
        self._turn.zero_()
        for _ in range(count):
            if graph is None:
                self._draw(batch)
            else:
                graph[0].replay()
                self.replayed += 1
        return self._drawn[:count, :rows]

    @torch.inference_mode()
    def _draw(self, batch: Batch) -> None:
        """Draw the next token of each row into a row of _drawn, and let the batch be that of this token."""
        state = self._state
        batch = replace(batch, memo={})  # positions change from token to token
        state.ops.place_rows(batch, self._draws.sampling, state.config.block_tokens)
        context, x = self._forward(batch)
        self._draws.sampler.sample(mask_padding(self._draft.model.logits(context, x), state.vocab), batch)
        tokens = self._draws.sampler.tokens[: batch.num_rows].clamp(min=0)
        self._drawn[:, : batch.num_rows].index_copy_(0, self._turn, tokens[None])
        self._turn.add_(1)
        unknown = torch.where(batch.sample_slots >= 0, -1, 0).int()  # one token a row: of rows, too
        batch.token_ids.copy_(unknown)
        batch.context_lens.copy_(unknown)
        batch.positions.zero_()
        batch.kv_slots.fill_(-1)

    def _forward(self, batch: Batch) -> tuple[Context, torch.Tensor]:
        state, draft = self._state, self._draft
        context = Context(state.ops, state.ranks, draft.work, batch)
        x = draft.work.hidden[: batch.num_tokens]
        draft.model.embed(context, x)
        draft.model.forward(context, x, state.caches[self._first : self._first + self._num_layers])
        return context, x
