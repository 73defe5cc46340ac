"""The values that cross from the scheduler to the engine and, broadcast unchanged, to every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tridecode.backend.messages import SamplingParams


@dataclass
class SlotStart:
    """A sequence takes a batch slot in this step: what the sampler has to know of it.

    history: int32, the prompt and, for a sequence that was preempted, what it has generated since.
    generated: how many of these it generated; the counter of its random generator.
    top_p: its value now, after `generated` tokens of decay.
    """

    slot: int
    params: SamplingParams
    history: np.ndarray
    generated: int
    top_p: float


@dataclass
class StepPlan:
    """What one step does. Arrays are int32; T tokens, B rows; the first num_decodes rows have one token each.

    A token id of -1 stands for the newest sampled token of the row's slot, which only the device knows yet.
    samples[b] says that row b's last token is one whose successor is wanted (all but the inner chunks of a
    prompt).
    """

    step: int
    token_ids: np.ndarray  # (T,)
    positions: np.ndarray  # (T,)
    kv_slots: np.ndarray  # (T,)
    block_tables: np.ndarray  # (B, M)
    context_lens: np.ndarray  # (B,)
    query_starts: np.ndarray  # (B + 1,)
    slots: np.ndarray  # (B,)
    samples: np.ndarray  # (B,) bool
    num_decodes: int
    starts: list[SlotStart] = field(default_factory=list)
    #: (row, n): the sum of the last layer's output over the first n tokens of the row is wanted
    embeds: list[tuple[int, int]] = field(default_factory=list)
    #: rows of the plan in the scheduler's own terms; stays on rank 0
    sequences: list = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.slots)


@dataclass
class StepResult:
    """tokens: (R,) int32 and log_probs: (R,) float32 for the rows with samples set, in row order.

    embeddings: (C,) float32, one for each of the plan's embeds.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    embeddings: list[np.ndarray] = field(default_factory=list)
