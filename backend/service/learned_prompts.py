"""Learned prompts of a request's rows, and the positions of their virtual tokens among its ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.wire.messages import Limits
from tridecode.backend.wire.prompt_learning import P_TUNING, LearnedPrompt
from tridecode.backend.wire.prompt_tables import virtual_ids


@dataclass(frozen=True)
class RowPrompt:
    """The learned prompt of one row.

    kind: one of TYPES. rows: number of rows of its table. start_id: with P_TUNING, the client's id of row 0.
    """

    learned: LearnedPrompt
    kind: int
    rows: int
    start_id: int


def place(
    ids: np.ndarray, prompt: RowPrompt, start_token: int, limits: Limits, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids that the client sees, ids of the engine), int64, for a row's ids (n,).

    P_TUNING: ids from start_id on are virtual; if a row has none, the whole table precedes it, as with the
    other types. start_token: for a row without ids. Raises RequestError for an id beyond the table.
    """
    if prompt.kind == P_TUNING and (virtual := ids >= prompt.start_id).any():
        rows = ids - prompt.start_id
        wrong = ids[virtual & (rows >= prompt.rows)]
        if wrong.size:
            first, last = prompt.start_id, prompt.start_id + prompt.rows - 1
            raise RequestError(
                f"{where} has the virtual token id {wrong[0]}; its prompt table has {prompt.rows} rows, the "
                f"ids {first} to {last}"
            )
        return ids[~virtual], np.where(virtual, limits.vocab_size + rows, ids)
    own = ids if len(ids) else np.array([start_token], np.int64)
    return ids, np.concatenate([virtual_ids(limits.vocab_size, prompt.rows), own])
