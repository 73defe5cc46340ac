"""Rows of a step of one kind (decode, beams, prefill), and how they are joined. Host only: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tridecode.backend.engine.prompt_tables.book import vocabulary_tokens
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.step.plan import SlotStart


@dataclass
class Rows:
    """B rows with T tokens. Arrays are int32 and have the meaning of StepPlan's fields of the same name.

    sequences: of each row. adapters: (B,) the number of its adapter, -1 for none. top_log_probs: (B,) how
    many of the most likely tokens it returns, -1 for none. starts: forks among the rows whose sampling state
    this step starts. masked: the sequences whose mask this step brings. late: indices of rows whose masks
    come after the launch (StepPlan.late); only rows that decode.
    """

    sequences: list[Sequence]
    token_ids: np.ndarray  # (T,)
    positions: np.ndarray  # (T,)
    kv_slots: np.ndarray  # (T,)
    query_starts: np.ndarray  # (B + 1,)
    slots: np.ndarray  # (B,)
    context_lens: np.ndarray  # (B,)
    samples: np.ndarray  # (B,)
    adapters: np.ndarray  # (B,)
    top_log_probs: np.ndarray  # (B,)
    queries: int = 0
    starts: list[SlotStart] = field(default_factory=list)
    masked: list[Sequence] = field(default_factory=list)
    late: list[int] = field(default_factory=list)


@dataclass
class DecodeBatch:
    """The decoding sequences as arrays, while they are the same from step to step.

    slots: (B,) int32. positions: (B,) int32, of the next token. shifts: (B,) int32, added to them for the
    rotary table. rings: (B,) int32, see CacheManager; None if none has one. adapters, top_log_probs: as in
    Rows. query_starts, samples: as in StepPlan, one token a row. steps_left: until the last token of one of
    them is in flight. masked: those with a constraint.
    """

    slots: np.ndarray
    positions: np.ndarray
    shifts: np.ndarray
    rings: np.ndarray | None
    adapters: np.ndarray
    top_log_probs: np.ndarray
    query_starts: np.ndarray
    samples: np.ndarray
    steps_left: int
    masked: list[Sequence]


_JOINED = (
    "token_ids", "positions", "kv_slots", "slots", "context_lens", "samples", "adapters", "top_log_probs"
)  # fmt: skip


def join(kinds: list[Rows]) -> Rows:
    """Return all rows of a step, in the given order. kinds: 1 or more; at most one has `queries`."""
    if len(kinds) == 1:
        return kinds[0]
    tokens, query_starts = 0, [kinds[0].query_starts[:1]]
    for rows in kinds:
        query_starts.append(rows.query_starts[1:] + tokens)
        tokens += len(rows.token_ids)
    return Rows(
        sequences=[sequence for rows in kinds for sequence in rows.sequences],
        query_starts=np.concatenate(query_starts).astype(np.int32, copy=False),
        queries=max(rows.queries for rows in kinds),
        starts=[start for rows in kinds for start in rows.starts],
        masked=[sequence for rows in kinds for sequence in rows.masked],
        late=kinds[0].late,  # decode rows come first
        **{name: np.concatenate([getattr(rows, name) for rows in kinds]) for name in _JOINED},
    )


def slot_start(sequence: Sequence) -> SlotStart:
    """Return the sampling state with which a sequence takes its slot."""
    history = vocabulary_tokens(sequence)
    masked = sequence.constraint is not None
    return SlotStart(sequence.slot, sequence.params, history, len(sequence.output), sequence.top_p, masked)


def adapters_of(sequences: list[Sequence]) -> np.ndarray:
    """Return (n,) int32, Rows.adapters of these sequences."""
    return np.array([sequence.group.adapter for sequence in sequences], np.int32)


def top_log_probs_of(sequences: list[Sequence]) -> np.ndarray:
    """Return (n,) int32, Rows.top_log_probs of these sequences."""
    return np.array([sequence.params.top_log_probs for sequence in sequences], np.int32)
