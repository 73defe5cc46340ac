"""Admission: limits, checks of a request, queue and totals. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from tridecode.backend.base.errors import CapacityError, RequestError, UnsupportedError
from tridecode.backend.wire import sampling_params, structured_output
from tridecode.backend.wire.messages import SequenceRequest
from tridecode.backend.wire.sampling_params import MAX_TOP_LOG_PROBS, SamplingParams

Item = TypeVar("Item")


@dataclass(frozen=True)
class SchedulerLimits:
    """Sizes the scheduler works with. max_step_tokens >= max_sequences.

    long_prompt_tokens, recompute_long: ModelConfig.long_prompt_tokens, .recomputes_long. ring_fault: why this
    model cannot run with a ring (sessions.py); "" if it can. micro_batches: plans in flight over which the
    decoding sequences are spread, so that no pipeline stage idles; a plan then has the ids of all its tokens.
    1: a plan has all decoding sequences. spread_tokens: minimum prefill budget of a step while sequences
    queue for few slots (prompt_spread.py); 0: no budget. cache_scope: see prompt_keys.py.
    late_masks: a row may be launched before its mask is known (StepPlan.late). draft_rows: tokens of all
    decode rows of a step with drafts; 0: max_sequences.
    """

    num_blocks: int
    block_tokens: int
    max_sequences: int
    max_sequence_tokens: int
    max_step_tokens: int
    max_queued_requests: int
    vocab_size: int
    request_timeout_s: float
    max_bad_word_tokens: int = 256
    max_stop_word_tokens: int = 1024
    max_logits_bytes: int = 256 << 20
    long_prompt_tokens: int = 0
    recompute_long: bool = False
    ring_fault: str = ""
    micro_batches: int = 1
    spread_tokens: int = 0
    cache_scope: str = "all"
    max_grammar_bytes: int = structured_output.MAX_GRAMMAR_BYTES
    late_masks: bool = False
    draft_rows: int = 0

    @property
    def rows(self) -> int:
        """Return the most rows of a step, in which each token of a sequence takes one."""
        return self.draft_rows or self.max_sequences


@dataclass
class Counters:
    """Totals since the engine started, for the metrics."""

    requests: int = 0
    refused: int = 0
    resumed: int = 0  # requests that a previous engine had begun
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0  # also outputs that are computed again
    output_tokens: int = 0
    preemptions: int = 0
    cancelled: int = 0


def check_room(
    count: int, waiting: int, free_slots: int, limits: SchedulerLimits, resumed: bool = False
) -> None:
    """Raise RequestError if `count` more sequences never fit, CapacityError if they do not fit now.

    max_queued_requests counts sequences that wait beyond those for which a slot is free. resumed: an engine
    that is gone had accepted them, so sequences that arrived since do not count.
    """
    most = limits.max_sequences + limits.max_queued_requests
    if count > most:
        raise RequestError(
            f"the request has {count:,} sequences; this model accepts {most:,} "
            "(max_sequences and max_queued_requests in config.pbtxt)"
        )
    if waiting + count > limits.max_queued_requests + free_slots + (most if resumed else 0):
        raise CapacityError(
            f"{waiting:,} sequences are waiting already and the request has {count:,} more; "
            f"{limits.max_queued_requests:,} may wait (max_queued_requests in config.pbtxt); try again later"
        )


def fault_of(
    prompt: np.ndarray, params: SamplingParams, limits: SchedulerLimits, ring: int = 0, virtual: int = 0
) -> str | None:
    """Return why this model cannot run the sequence; None if it can. The engine does not rely on a door's
    checks.

    ring: tokens of it that the cache keeps; 0: all. virtual: number of ids after the vocabulary that the
    prompt may have, for prompt learning.
    """
    fault = sampling_params.check(params)
    if fault is not None:
        return fault
    if len(prompt) == 0:
        return "the prompt has no tokens; wanted 1 or more"
    if prompt.min() < 0 or prompt.max() >= limits.vocab_size + virtual:
        wrong = int(prompt[(prompt < 0) | (prompt >= limits.vocab_size + virtual)][0])
        return f"the prompt has token id {wrong}; this model has ids 0 to {limits.vocab_size - 1}"
    if any(token >= limits.vocab_size for token in params.end_ids):
        found = f"end_id {max(params.end_ids)}"
        return (
            f"{found} is not a token; this model has ids 0 to {limits.vocab_size - 1}, and -1 stands for none"
        )
    total = len(prompt) + params.max_tokens
    if total > limits.max_sequence_tokens:
        return (
            f"the prompt has {len(prompt)} tokens and {params.max_tokens} are wanted, {total} together; "
            f"this model accepts {limits.max_sequence_tokens} (max_sequence_tokens in config.pbtxt)"
        )
    if params.beam_width > 1 and (params.return_generation_logits or params.top_log_probs >= 0):
        wanted = "return_generation_logits" if params.return_generation_logits else "top_log_probs"
        return f"{wanted} is set and beam_width is {params.beam_width}; wanted one of them"
    if params.beam_width > limits.max_sequences:
        limit = f"{limits.max_sequences} (max_sequences in config.pbtxt)"
        return f"beam_width is {params.beam_width}; this model accepts {limit}"
    blocks = -(-(min(total, ring) if ring else total) // limits.block_tokens)
    beams = f" with {params.beam_width} beams" if params.beam_width > 1 else ""
    if beams:
        shared = len(prompt) // limits.block_tokens
        blocks = shared + params.beam_width * (blocks - shared)
    if blocks > limits.num_blocks:
        return (
            f"the prompt and the tokens wanted{beams} need {blocks} cache blocks; "
            f"the cache has {limits.num_blocks} (cache_bytes in config.pbtxt)"
        )
    if len(params.draft_tokens) > limits.max_sequence_tokens:
        return (
            f"draft_tokens has {len(params.draft_tokens):,} ids; this model accepts "
            f"{limits.max_sequence_tokens:,} (max_sequence_tokens in config.pbtxt)"
        )
    if any(not 0 <= token < limits.vocab_size for token in params.draft_tokens):
        return f"draft_tokens has a token id outside 0 to {limits.vocab_size - 1}"
    if not -1 <= params.top_log_probs <= MAX_TOP_LOG_PROBS:
        return f"top_log_probs is {params.top_log_probs}; wanted 0 to {MAX_TOP_LOG_PROBS}, or -1 for none"
    unknown = next((token for token in params.logit_bias if not 0 <= token < limits.vocab_size), None)
    if unknown is not None:
        return f"logit_bias has token id {unknown}; this model has ids 0 to {limits.vocab_size - 1}"
    if len(params.allowed_token_ids) > limits.vocab_size:
        found = f"allowed_token_ids has {len(params.allowed_token_ids):,} ids"
        return f"{found}; this model has {limits.vocab_size:,}"
    unknown = next((token for token in params.allowed_token_ids if not 0 <= token < limits.vocab_size), None)
    if unknown is not None:
        return f"allowed_token_ids has token id {unknown}; this model has ids 0 to {limits.vocab_size - 1}"
    if any(not word for word in params.bad_words):
        return "a bad word has no tokens"
    for name, words, most in (
        ("bad", params.bad_words, limits.max_bad_word_tokens),
        ("stop", params.stop_words, limits.max_stop_word_tokens),
    ):
        count = sum(len(word) for word in words)
        if count > most:
            limit = f"{most} (max_{name}_word_tokens in config.pbtxt)"
            return f"the {name} words have {count} tokens; this model accepts {limit}"
        if any(not 0 <= token < limits.vocab_size for word in words for token in word):
            return f"a {name} word has a token id outside 0 to {limits.vocab_size - 1}"
    return None


def check_structured(wanted: SequenceRequest, max_bytes: int, fault: str) -> None:
    """Raise RequestError or UnsupportedError if the answers to a prompt cannot obey its structured output.

    max_bytes, fault: see structured_output.check.
    """
    output, params = wanted.structured_output, wanted.params
    if output is None:
        return
    structured_output.check(output, max_bytes, fault)
    if params.beam_width > 1:
        raise UnsupportedError(
            f"structured_output is {output.kind} and beam_width is {params.beam_width}; wanted one of them"
        )


class LazyHeap(Generic[Item]):
    """Items by unique ascending key.

    A dead item stays until it is the first, or until the heap has doubled, so ending an item costs nothing.
    """

    def __init__(self, is_live: Callable[[Item], bool]):
        self._is_live = is_live
        self._entries: list[tuple[Any, Item]] = []
        self._sweep_at = 1024  # entries

    def __len__(self) -> int:
        """Return an upper bound of the live items."""
        return len(self._entries)

    def push(self, key: Any, item: Item) -> None:
        if len(self._entries) >= self._sweep_at:
            self._entries = [entry for entry in self._entries if self._is_live(entry[1])]
            heapq.heapify(self._entries)
            self._sweep_at = 2 * len(self._entries) + 1024
        heapq.heappush(self._entries, (key, item))

    def first(self) -> Item | None:
        """Return the live item with the smallest key, without removing it."""
        while self._entries and not self._is_live(self._entries[0][1]):
            heapq.heappop(self._entries)
        return self._entries[0][1] if self._entries else None

    def pop(self) -> None:
        """Remove the first item."""
        heapq.heappop(self._entries)
