"""Batches of the tokens that a drafter has missed and reads behind a step."""

from __future__ import annotations

import numpy as np

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.parts.draft_reads import MOST_ROWS, MOST_TOKENS, DraftReads
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.step_buffers import StepBuffers
from tridecode.kernels.operands import Batch


class MissedTokens:
    """The buffers of such batches. turns: host buffers, more than steps in flight."""

    def __init__(self, state: DeviceState, turns: int):
        assert state.config.max_sequence_tokens is not None
        self._block_tokens = state.config.block_tokens
        columns = -(-state.config.max_sequence_tokens // self._block_tokens)
        self.buffers = StepBuffers(MOST_TOKENS, MOST_ROWS, columns, state.device, turns)

    def load(self, part: DraftReads, plan: StepPlan) -> Batch:
        """Return the batch of the tokens of a part: rows of prompts behind cached tokens, without samples."""
        owner = np.repeat(np.arange(len(part.rows)), part.counts)
        starts = np.concatenate([[0], np.cumsum(part.counts)]).astype(np.int32)
        positions = part.firsts[owner] + np.arange(len(owner), dtype=np.int32) - starts[owner]
        tables, size = plan.block_tables[part.rows], self._block_tokens
        kv_slots = tables[owner, positions // size] * size + positions % size
        return self.buffers.load(
            StepPlan(
                step=plan.step,
                token_ids=part.token_ids,
                positions=positions.astype(np.int32),
                kv_slots=kv_slots.astype(np.int32),
                block_tables=tables,
                context_lens=part.firsts + part.counts,
                query_starts=starts,
                slots=np.full(len(part.rows), -1, np.int32),
                samples=np.zeros(len(part.rows), np.int32),
                num_decodes=0,
            )
        )
