"""The values that cross from the scheduler to the engine and, broadcast unchanged, to every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from tridecode.backend.engine.parts.part import StepPart
from tridecode.backend.wire.sampling_params import SamplingParams

P = TypeVar("P", bound=StepPart)


@dataclass
class SlotStart:
    """A sequence takes a batch slot in this step, and the sampler starts from what the host knows of it.

    history: int32, the prompt and the output so far.
    generated: number of output tokens in it; the counter of the sequence's random generator.
    top_p: its value now, after `generated` tokens of decay.
    """

    slot: int
    params: SamplingParams
    history: np.ndarray
    generated: int
    top_p: float


@dataclass
class StepPlan:
    """What one step does. Arrays are int32; T tokens, B rows, M block-table columns.

    Row b has the tokens from query_starts[b] to query_starts[b + 1]. The first num_decodes rows decode: one
    token a row, or several where draft tokens are verified, rows of one token first. The other rows are
    prompts or chunks of them. A row that is not sampled with the state of a slot has slot -1 (beams). A token
    id of -1 stands for the newest sampled token of the row's slot, which
    only the device knows yet; only a decoding row of one token has it.
    samples[b]: how many of row b's last tokens are sampled from: 0 for an inner chunk of a prompt, else 1, or
    more where draft tokens are verified. Their sum is at most the engine's max_sequences.
    positions: of the tokens; all of them max_sequence_tokens more in a sequence that longrope rotates with
    its long factors throughout (backend.models.rope.rope_table).
    parts: the optional features that this step has, in the order of their work.
    """

    step: int
    token_ids: np.ndarray  # (T,)
    positions: np.ndarray  # (T,)
    kv_slots: np.ndarray  # (T,)
    block_tables: np.ndarray  # (B, M)
    context_lens: np.ndarray  # (B,)
    query_starts: np.ndarray  # (B + 1,)
    slots: np.ndarray  # (B,)
    samples: np.ndarray  # (B,)
    num_decodes: int
    starts: list[SlotStart] = field(default_factory=list)
    parts: list[StepPart] = field(default_factory=list)
    #: the scheduler's sequence of each row; stays on rank 0
    sequences: list = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_samples(self) -> int:
        return int(self.samples.sum())

    def part(self, kind: type[P]) -> P | None:
        """The part of this class, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)


#: in place of a token, as kernels.sampling_state has them: the logits are not numbers; no id is possible
BROKEN_LOGITS, NO_TOKEN = -1, -2


@dataclass
class StepResult:
    """tokens: (R,) int32 and log_probs: (R,) float32, R = num_samples, in row order. A token may be
    BROKEN_LOGITS or NO_TOKEN.

    parts: the result of each of the plan's parts, None for a part without one.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    parts: list[Any] = field(default_factory=list)
