"""The values that the scheduler passes to the engine; they are broadcast unchanged to every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.wire.sampling_params import SamplingParams

#: tokens of a decode row, at most: kernels.operands.MOST_QUERIES
MOST_QUERIES = 16


@dataclass
class SlotStart:
    """A sequence that takes a batch slot in this step, with the state that its sampler starts from.

    history: int32, the prompt and the output so far.
    generated: number of output tokens in it; the counter of the sequence's random generator.
    top_p: its value now, after `generated` tokens of decay.
    masked: whether a mask limits its tokens, which the steps bring (engine/parts/masks.py).
    """

    slot: int
    params: SamplingParams
    history: np.ndarray
    generated: int
    top_p: float
    masked: bool = False


class StepPart:
    """One optional feature in one step: its bytes in the plan frame, and how its results are filed.

    Base of the classes in engine/parts; their device side is in device/parts. A plan has at most one part of
    each class.
    """

    #: names the part in a plan frame
    tag: ClassVar[str]

    @property
    def captures(self) -> bool:
        """Return whether the step may run as a CUDA graph."""
        return False

    @property
    def reads_samples(self) -> bool:
        """Return whether the part reads the samples' logits or last hidden states after a CUDA graph."""
        return False

    def encode(self) -> Any:
        """Return the part as a value that msgspec can encode."""
        raise NotImplementedError

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> StepPart:
        """Return the part of a frame for this plan, whose own fields are complete.

        Raises TridecodeError, whose text begins with `where`, for a value or a length that does not fit.
        """
        raise NotImplementedError

    def commit(self, step: Commit, found: Any) -> None:
        """Apply the result of the device side, which is not None."""

    def digest(self, tokens: np.ndarray, found: Any) -> np.ndarray:
        """Return int32 values that the ranks compare after a step, given its tokens and this part's
        result.
        """
        return tokens


P = TypeVar("P", bound=StepPart)


@dataclass
class StepPlan:
    """The work of one step. Arrays are int32; T tokens, B rows, M block-table columns.

    Row b has the tokens from query_starts[b] to query_starts[b + 1]. The first num_decodes rows decode. The
    other rows are prefill: prompts or chunks of them. A row that is sampled without the state of a slot has
    slot -1 (beams). samples[b]: how many of row b's last tokens are sampled from: 0 for an inner chunk of a
    prompt, else 1; all tokens of a decode row. Their sum is at most the engine's max_sequences.

    queries 0: each decode row has one token. Else the step verifies drafts: a decode row has the sequence's
    newest token and the drafts behind it, `queries` tokens at most, and keeps those that are sampled.

    Only the device knows yet: a token id of -1, which is the newest sampled token of the row's slot, or the
    slot's next draft; and, in a step that verifies, the place of a decode row whose context_lens is -1: it
    follows the tokens that earlier steps have accepted, and its positions hold only what is added to them.

    positions: position of each token; max_sequence_tokens is added to those of a sequence that longrope
    rotates with its long factors throughout (backend.models.rope.rope_table). parts: this step's optional
    features, in the order in which they run.
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
    queries: int = 0
    starts: list[SlotStart] = field(default_factory=list)
    parts: list[StepPart] = field(default_factory=list)
    #: the scheduler's sequence of each row; stays on rank 0
    sequences: list = field(default_factory=list)
    #: decode rows whose masks come after the launch; `Engine.sample_late` samples them
    late: list[int] = field(default_factory=list)
    #: late rows that were not sampled, because their masks came too late; stays on rank 0
    missed: list[int] = field(default_factory=list)

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
        """Return the part of this class, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)


@dataclass
class LateSamples:
    """The masks for sampling late rows of a launched plan. Rank 0 sends them after the plan.

    step: number of the plan. rows: a subset of plan.late, ascending. masks: (n, W) int32, one per row, as in
    SamplingState.masks.
    """

    step: int
    rows: list[int]
    masks: np.ndarray


#: a message from rank 0 to the other ranks
PlanMessage = StepPlan | LateSamples

#: values instead of a token, as in kernels.sampling_state: the logits are not finite; no id is allowed
BROKEN_LOGITS, NO_TOKEN = -1, -2


@dataclass
class StepResult:
    """tokens: (R,) int32 and log_probs: (R,) float32, R = num_samples, in row order. A token may be
    BROKEN_LOGITS or NO_TOKEN. accepted: (num_decodes,) int32 in a step that verifies: the samples of each
    decode row that it keeps, its first ones; the others are undefined.

    parts: the result of each of the plan's parts, None for a part without a result. found: of a drafter on
    the device: (n,) rows of the plan that have drafts, and (n, 3) int32, what Ops.look_up found for them; in
    a step with rows that obey a grammar with further columns, the ids of the drafts.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    parts: list[Any] = field(default_factory=list)
    accepted: np.ndarray | None = None
    found: tuple[np.ndarray, np.ndarray] | None = None


#: files the result of the parts of one class; a scheduler passes one for each class whose results it needs.
#: It may return sequences
Handler = Callable[[list, Any], list | None]


@dataclass
class Commit:
    """A step whose results are being filed.

    sampled: the sequence of each sample. handlers: by the class of the part. taken: indices of the samples
    that a part has dealt with, for which the scheduler does nothing more. news: sequences that may have
    results which no token's event carries. ended: sequences that this step completes without a token, each
    with its error or None. accepted: StepResult.accepted.
    """

    plan: StepPlan
    sampled: list
    handlers: Mapping[type[StepPart], Handler] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)
    news: list = field(default_factory=list)
    ended: list[tuple[Any, TridecodeError | None]] = field(default_factory=list)
    accepted: np.ndarray | None = None

    @property
    def kept(self) -> list[bool]:
        """Return whether each sample is one that its row keeps."""
        plan = self.plan
        if self.accepted is None:
            return [True] * len(self.sampled)
        most = plan.samples.copy()
        most[: plan.num_decodes] = self.accepted
        first = np.cumsum(plan.samples) - plan.samples
        place = np.arange(plan.num_samples) - np.repeat(first, plan.samples)  # within its row
        return (place < np.repeat(most, plan.samples)).tolist()
