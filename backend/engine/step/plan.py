"""The values that cross from the scheduler to the engine and, broadcast unchanged, to every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tridecode.backend.engine.prompt_tables.plan import StepPrompts
from tridecode.backend.wire.messages import TopLogProbs
from tridecode.backend.wire.sampling_params import SamplingParams


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


@dataclass(frozen=True)
class LogitRows:
    """Logits of a prompt that a step returns: of `count` tokens of the plan's row `row`, from its token
    `first` on.

    targets: (count,) int32, the ids that follow these tokens: their log probabilities are summed and only the
    sum is returned. None: the logits are returned.
    """

    row: int
    first: int
    count: int
    targets: np.ndarray | None = None


@dataclass
class BeamRows:
    """The samples of a step for which the most likely tokens are wanted in place of one token.

    rows: (n,) int32, index among the step's samples; the slot of such a row is -1 in the plan. width: tokens
    for each. slots: (n,) int32, the batch slots with the sampling state of the beams. tokens: (n,) int32, the
    token that the beam's slot does not know yet, -1 for none: the slot takes it before the candidates are
    chosen. The host chooses the tokens of beams, so each step brings the choice of the one before.
    """

    rows: np.ndarray
    width: int
    slots: np.ndarray
    tokens: np.ndarray


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
    adapters: the number of each row's LoRA adapter, -1 for none; None if no row has one. drop_adapters: the
    numbers of adapters that neither this plan nor a later one names.
    top_log_probs: SamplingParams.top_log_probs of each row, -1 for none; None if no row has one.
    positions: of the tokens; all of them max_sequence_tokens more in a sequence that longrope rotates with
    its long factors throughout (backend.models.rope.rope_table).
    slot_copies, block_copies: (source, destination) pairs, executed before the step and before `starts`; all
    sources are read before any destination is written.
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
    #: (row, n): the sum of the last layer's output over the first n tokens of the row is returned
    embeds: list[tuple[int, int]] = field(default_factory=list)
    logit_rows: list[LogitRows] = field(default_factory=list)
    #: the samples, counted in row order, whose logits are returned; such a step does not run as a CUDA graph
    logit_samples: list[int] = field(default_factory=list)
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    adapters: np.ndarray | None = None  # (B,)
    drop_adapters: list[int] = field(default_factory=list)
    prompts: StepPrompts | None = None  # of prompt learning
    beams: BeamRows | None = None
    top_log_probs: np.ndarray | None = None  # (B,)
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


#: in place of a token, as kernels.sampling_state has them: the logits are not numbers; no id is possible
BROKEN_LOGITS, NO_TOKEN = -1, -2


@dataclass
class StepResult:
    """tokens: (R,) int32 and log_probs: (R,) float32, R = num_samples, in row order. A token may be
    BROKEN_LOGITS or NO_TOKEN.

    embeddings: (C,) float32, one for each of the plan's embeds. top_log_probs: one per sample, None where it
    wants none; [] if no sequence of the step wants them. logit_rows: for each of the plan's logit_rows (n, V)
    float32, or () float64 with targets. sample_logits: (n, V) float32, n = len(plan.logit_samples).
    candidates: (n, W) int32 token ids and (n, W) float32 log probabilities of the plan's beams, most likely
    first; tokens and log_probs of these rows are undefined.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    embeddings: list[np.ndarray] = field(default_factory=list)
    top_log_probs: list[TopLogProbs | None] = field(default_factory=list)
    logit_rows: list[np.ndarray] = field(default_factory=list)
    sample_logits: np.ndarray | None = None
    candidates: tuple[np.ndarray, np.ndarray] | None = None
