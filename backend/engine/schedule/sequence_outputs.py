"""Optional outputs of a request besides its tokens: logits, the prompt's log probability, performance
metrics.

Host only: no torch. A sequence that returns any of them has `ExtraOutputs`; the others have None, and a step
without such sequences does nothing here. `note_step` adds to a plan what it returns
(parts/returned_logits.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items

import numpy as np

from tridecode.backend.base.errors import CapacityError, RequestError
from tridecode.backend.engine.parts.returned_logits import LogitRows, ReturnedLogits
from tridecode.backend.engine.prompt_tables.book import ordinary_runs
from tridecode.backend.engine.schedule.extra_outputs import ExtraOutputs
from tridecode.backend.engine.schedule.prompt_embedding import PromptEmbedding
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.wire.messages import SequenceRequest
from tridecode.backend.wire.sampling_params import SamplingParams

_ITEM = 4  # bytes of a logit: float32
#: the logits of all open requests may have this many times the bytes of one request's limit
_OPEN_REQUESTS = 4
#: outputs that need every token of the prompt to be computed in this request
_OF_COMPUTED_PROMPTS = (
    "return_context_embedding",
    "pooling",
    "return_context_logits",
    "return_context_log_prob",
)


def wants_extra_outputs(params: SamplingParams) -> bool:
    return params.returns_logits or params.return_perf_metrics


def begin_outputs(sequence: Sequence) -> None:
    """Give a new sequence a place for each output that its request wants."""
    sequence.embedding = PromptEmbedding.wanted(sequence.params)
    if wants_extra_outputs(sequence.params):
        sequence.extra_outputs = ExtraOutputs()


def needs_prompt(params: SamplingParams) -> bool:
    """Return whether the prompt must run even for a request of no new tokens."""
    return any(getattr(params, name) for name in _OF_COMPUTED_PROMPTS)


def logits_bytes(prompt: int, params: SamplingParams, vocab_size: int) -> int:
    """Return the bytes of the logits that a sequence returns. prompt: the number of its tokens."""
    rows = prompt if params.return_context_logits else 0
    rows += params.max_tokens * params.num_sequences if params.return_generation_logits else 0
    return rows * vocab_size * _ITEM


def check_round(params: SamplingParams) -> None:
    """Raise RequestError for a round of a session that needs results of a computed prompt, because most of
    its prompt is already in the cache. The interactive contract has no input for them.
    """
    for name in _OF_COMPUTED_PROMPTS:
        if getattr(params, name):
            raise RequestError(
                f"{name} is set in a session, which does not compute its earlier tokens again; send the "
                "prompt as a request of its own"
            )


def note_step(plan: StepPlan, chunks: Items[tuple[Sequence, int, int]]) -> None:
    """Add to a plan the logits that its sequences want. chunks: (sequence, first, count) of its last rows."""
    ends, wanted = np.cumsum(plan.samples), ReturnedLogits()
    for row, sequence in enumerate(plan.sequences):
        if sequence.extra_outputs is None:
            continue
        sequence.extra_outputs.blocks = max(sequence.extra_outputs.blocks, len(sequence.blocks))
        params = sequence.params
        if params.return_generation_logits and params.max_tokens:
            wanted.samples += range(int(ends[row] - plan.samples[row]), int(ends[row]))
    for row, (sequence, first, count) in enumerate(chunks, start=plan.num_rows - len(chunks)):
        if sequence.extra_outputs is not None:
            extra = sequence.extra_outputs
            extra.scheduled_ns = extra.scheduled_ns or time.time_ns()
            wanted.rows += _prompt_rows(sequence, extra, row, first, count)
    if wanted.rows or wanted.samples:
        plan.parts.append(wanted)


def _prompt_rows(
    sequence: Sequence, extra: ExtraOutputs, row: int, first: int, count: int
) -> list[LogitRows]:
    """Return the rows of a chunk, positions first .. first + count, that belong to the prompt and were not
    planned before.
    """
    begin, end = max(first, extra.planned), min(first + count, len(sequence.prompt))
    if begin >= end:
        return []
    extra.planned, wanted, params = end, [], sequence.params
    following = sequence.prompt[begin + 1 : end + 1]
    if params.return_context_logits:
        for start, stop in ordinary_runs(sequence, sequence.prompt[begin:end]):
            wanted.append(LogitRows(row, begin - first + start, stop - start))
    if params.return_context_log_prob and len(following):
        for start, stop in ordinary_runs(sequence, following):
            wanted.append(LogitRows(row, begin - first + start, stop - start, following[start:stop]))
    return wanted


class LogitsBudget:
    """The limit on the bytes of logits: of one request, and of all open ones together.

    most: of one request (max_logits_bytes in config.pbtxt).
    """

    def __init__(self, most: int, vocab_size: int):
        self._most, self._vocab_size = most, vocab_size
        self._held: dict[object, int] = {}

    def reserve(self, key: object, sequences: Items[SequenceRequest], resumed: bool = False) -> None:
        """Count a request's logits until `release`.

        Raise RequestError if they exceed the limit of a request, CapacityError if they are too many now.
        resumed: the engine that accepted them is gone, so twice as many are allowed.
        """
        sizes = [logits_bytes(len(one.prompt) // 4, one.params, self._vocab_size) for one in sequences]
        total = sum(sizes)
        if not total:
            return
        if total > self._most:
            raise RequestError(
                f"the request wants {total:,} bytes of logits; this model accepts {self._most:,} "
                "(max_logits_bytes in config.pbtxt)"
            )
        held = sum(self._held.values())
        if held + total > _OPEN_REQUESTS * self._most * (2 if resumed else 1):
            raise CapacityError(
                f"open requests want {held:,} bytes of logits and this one {total:,} more; together they may "
                f"have {_OPEN_REQUESTS * self._most:,} ({_OPEN_REQUESTS} times max_logits_bytes); try again "
                "later"
            )
        self._held[key] = total

    def release(self, key: object) -> None:
        if self._held:
            self._held.pop(key, None)
