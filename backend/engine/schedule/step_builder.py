"""Builds the plan of a step from its rows and adds the parts of optional features. Host only: no torch."""

from __future__ import annotations

import numpy as np

from tridecode.backend.engine.cache.cache_manager import CacheManager
from tridecode.backend.engine.parts.adapters import AdapterRows
from tridecode.backend.engine.parts.draft_masks import DraftMasks
from tridecode.backend.engine.parts.embeddings import PromptVectors, SummedRow, summed_row
from tridecode.backend.engine.parts.forks import Forks
from tridecode.backend.engine.parts.host_copies import HostCopies, empty_plan
from tridecode.backend.engine.parts.masks import Masks
from tridecode.backend.engine.parts.prompt_tables import PromptTables
from tridecode.backend.engine.parts.top_tokens import TopTokens
from tridecode.backend.engine.prompt_tables.book import PromptBook
from tridecode.backend.engine.schedule.prefill_planner import Chunk
from tridecode.backend.engine.schedule.rows import Rows, join
from tridecode.backend.engine.step.plan import SlotStart, StepPart, StepPlan


class StepBuilder:
    """Numbers the steps, and joins rows to StepPlans. cache: the lengths in it include the rows."""

    def __init__(self, cache: CacheManager, prompts: PromptBook):
        self._cache, self._prompts = cache, prompts
        self._steps = 0

    def build(
        self, decode: list[Rows], prefill: Rows | None, chunks: list[Chunk], starts: list[SlotStart]
    ) -> StepPlan:
        """Return the plan of the rows, in the given order.

        decode: one value for each kind of row that decodes. prefill: the rows of `chunks`, None for none. At
        least one of them has rows. starts: of admitted sequences.
        """
        cache, rows = self._cache, join(decode if prefill is None else [*decode, prefill])
        slots, lens = rows.slots, rows.context_lens
        num_decodes = len(slots) - len(chunks)
        if rows.queries:  # the context_lens of some rows are unknown
            lens = np.minimum(cache.lengths[slots], cache.rings[slots])
        columns = -(-int(lens.max()) // cache.block_tokens)
        parts = self._parts(rows, chunks, num_decodes)
        self._steps += 1
        return StepPlan(
            step=self._steps,
            token_ids=rows.token_ids,
            positions=rows.positions,
            kv_slots=rows.kv_slots,
            block_tables=cache.tables[slots, :columns],
            context_lens=rows.context_lens,
            query_starts=rows.query_starts,
            slots=slots,
            samples=rows.samples,
            num_decodes=num_decodes,
            queries=rows.queries,
            starts=starts + rows.starts,
            parts=parts,
            sequences=rows.sequences,
            late=rows.late,
        )

    def build_empty(self, copies: HostCopies) -> StepPlan:
        """Return a plan without rows."""
        self._steps += 1
        return empty_plan(self._steps, copies)

    def _parts(self, rows: Rows, chunks: list[Chunk], num_decodes: int) -> list[StepPart]:
        """Return the parts of features that are known from rows, cache and prompt tables, in the order in
        which they run."""
        slot_copies, block_copies = self._cache.take_copies()
        cleared = self._cache.take_cleared()
        prompts = self._prompts.take(
            chunks, rows.token_ids, rows.query_starts[num_decodes:], cleared, block_copies
        )
        parts: list[StepPart] = []
        if prompts is not None:
            parts.append(PromptTables(prompts))
        if (rows.adapters >= 0).any():
            parts.append(AdapterRows(rows.adapters))
        if slot_copies or block_copies:
            parts.append(Forks(slot_copies, block_copies))
        if rows.masked:
            parts += masks_of(rows)
        if chunks and (summed := _summed(chunks, num_decodes)):
            parts.append(PromptVectors(summed))
        if (rows.top_log_probs >= 0).any():
            parts.append(TopTokens(rows.top_log_probs))
        return parts


def masks_of(rows: Rows) -> list[StepPart]:
    """Return the parts with the masks of rows.masked: of rows with one sample, and of rows with drafts."""
    masked, parts = rows.masked, list[StepPart]()
    wide = [
        row
        for row in (np.flatnonzero(rows.samples > 1).tolist() if rows.queries else ())
        if rows.sequences[row].constraint is not None
    ]
    if wide:
        drafted = {rows.sequences[row] for row in wide}
        masked = [one for one in masked if one not in drafted]
    if masked:
        slots = np.array([one.slot for one in masked], np.int32)
        parts.append(Masks(slots, np.stack([one.constraint.mask for one in masked if one.constraint])))
    if wide:
        masks = []
        for row in wide:
            constraint = rows.sequences[row].constraint
            masks += [constraint.mask[None], constraint.draft_masks[: rows.samples.item(row) - 1]]
        parts.append(DraftMasks(np.array(wide, np.int32), np.concatenate(masks)))
    return parts


def _summed(chunks: list[Chunk], num_decodes: int) -> list[SummedRow]:
    """Return what is summed of each chunk for the vector of its prompt."""
    rows = [summed_row(row, *chunk) for row, chunk in enumerate(chunks, start=num_decodes)]
    return [row for row in rows if row is not None]
