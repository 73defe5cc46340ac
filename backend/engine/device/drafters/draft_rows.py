"""The batches of the forwards that draw drafts, at fixed addresses."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.drafters.draft_weights import FIRST
from tridecode.backend.engine.device.drafters.row_inputs import RowInputs
from tridecode.kernels.operands import Batch
from tridecode.kernels.sampling_state import MOST_DRAFTS

_ALIGN = 4  # int32 words: every view is aligned to 16 bytes


class DraftRows:
    """Rows of FIRST or of one token, whose ids and places only the device knows.

    `inputs` has, for each row: slots, -1 for padding; pairs, the slots of FIRST tokens; lens, -1, or 0 for
    padding; where, the slot in which values of the row are stored; source, the row of its drafts (padding
    repeats row 0); drafts, the place of its first one in SamplingState.drafts; before, counted: the token
    before its newest one is token before + counts[counted] of the step; known, the place of the newest
    token, or -1 if only the device knows it. keeps: see DraftDraws.take. tables: block tables.

    turns: host buffers, more than the steps in flight.
    """

    def __init__(self, config: EngineConfig, device: torch.device, turns: int):
        assert config.max_sequence_tokens is not None
        rows = config.slots
        self._longest, self._device = config.max_sequence_tokens, device
        self._columns = -(-self._longest // config.block_tokens)
        self.inputs = RowInputs(
            {
                "slots": (rows, np.int32),
                "pairs": (FIRST * rows, np.int32),
                "lens": (rows, np.int32),
                "keeps": (rows, np.int32),
                **{name: (rows, np.int64) for name in ("where", "source", "drafts", "before", "counted")},
                "known": (rows, np.int64),
                "tables": (rows * self._columns, np.int32),
            },
            device,
            turns,
        )
        self._made: dict[tuple[int, int], tuple[Batch, Tensor, Tensor]] = {}

    def send(
        self,
        slots: np.ndarray,
        tables: np.ndarray,
        padded: int,
        places: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        masked: np.ndarray | None = None,
        kept_all: int = 0,
    ) -> None:
        """Send the inputs of n rows, padded to `padded`.

        slots: (n,) int32, -1 for an empty row. tables: (n, M) int32. places: before, counted and known, each
        (n,) int64; None for empty rows. masked: slots of sequences that obey a grammar. kept_all:
        StepSampler.kept_all.
        """
        count, host = len(slots), self.inputs.next()
        is_empty = places is None
        host["slots"][:count] = slots
        host["slots"][count:padded] = -1
        host["pairs"][: FIRST * padded] = np.repeat(host["slots"][:padded], FIRST)
        host["lens"][:count] = 0 if is_empty else -1
        host["lens"][count:padded] = 0
        host["keeps"][:] = 1
        if masked is not None:
            host["keeps"][masked] = 0
        host["where"][:count] = 0 if is_empty else slots
        host["source"][:count] = 0 if is_empty else np.arange(count)
        for name, values in zip(("before", "counted", "known"), places or (-1, kept_all, 1)):
            host[name][:count] = values
        for name in ("where", "source", "before", "counted", "known"):
            host[name][count:padded] = host[name][0]
        host["drafts"][:padded] = host["where"][:padded] * MOST_DRAFTS
        rows = host["tables"].reshape(-1, self._columns)
        rows[:count, : tables.shape[1]] = tables
        self.inputs.send("tables", padded * self._columns)

    def batch(self, rows: int, tokens: int) -> Batch:
        """Return the batch of `rows` rows of this many tokens. Its rows are not placed until `reset`."""
        if (rows, tokens) not in self._made:
            self._made[rows, tokens] = self._make(rows, tokens)
        return self._made[rows, tokens][0]

    def reset(self, rows: int, tokens: int) -> None:
        """Undo Ops.place_rows; may be captured."""
        batch, placed, unplaced = self._made[rows, tokens]
        placed.copy_(unplaced)
        batch.context_lens.copy_(self.inputs.device["lens"][:rows])

    def _make(self, rows: int, tokens: int) -> tuple[Batch, Tensor, Tensor]:
        own, total, device = self.inputs.device, rows * tokens, self._device
        size = -(-total // _ALIGN) * _ALIGN
        placed = torch.zeros(3 * size, dtype=torch.int32, device=device)
        ids, positions, kv_slots = (part[:total] for part in placed.split(size))
        unplaced = placed.clone()
        unplaced[:size] = unplaced[2 * size :] = -1  # ids and cache slots
        batch = Batch(
            token_ids=ids,
            positions=positions,
            kv_slots=kv_slots,
            context_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            query_starts=torch.arange(0, total + 1, tokens, dtype=torch.int32, device=device),
            sample_tokens=torch.arange(total, dtype=torch.int32, device=device),
            sample_slots=own["pairs" if tokens == FIRST else "slots"][:total],
            token_slots=own["slots"][:rows],
            block_tables=own["tables"].view(-1, self._columns)[:rows],
            num_decodes=rows,
            max_query=0,
            max_context=self._longest,
            fresh_prompts=False,
            decode_queries=tokens,
            decode_tokens=total,
            verifies=True,
        )
        return batch, placed, unplaced
