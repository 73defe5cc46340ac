"""Measures the prefix index alone: the time in which the loop finds a long prompt, and bytes per block."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from typing import Any

import numpy as np

from tridecode.backend.engine.cache.cache_manager import CacheManager
from tridecode.backend.engine.cache.prompt_keys import PromptHasher
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.sequence import Sequence, SequenceGroup
from tridecode.backend.wire.messages import SequenceRequest, Submit
from tridecode.backend.wire.sampling_params import SamplingParams

_BLOCK_TOKENS = 32
_REPEATS = 200


def measure_index(tokens: int = 8192, blocks: int = 100_000) -> dict[str, Any]:
    """Return microseconds to hash and to find a prompt of `tokens` tokens in an index of `blocks` blocks, and
    the bytes of host memory that an indexed block takes.
    """
    limits = SchedulerLimits(
        num_blocks=blocks, block_tokens=_BLOCK_TOKENS, max_sequences=4, max_sequence_tokens=tokens + 1,
        max_step_tokens=tokens, max_queued_requests=4, vocab_size=1 << 16, request_timeout_s=1e9,
    )  # fmt: skip
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cache = CacheManager(limits)
    random = np.random.default_rng(0)
    wanted = random.integers(0, 1 << 16, tokens + 1).astype("<i4")
    hasher = PromptHasher(cache.index.hasher, _BLOCK_TOKENS, "all", tokens + 1)
    _fill(cache, hasher, random, wanted, blocks)
    held = (tracemalloc.get_traced_memory()[0] - before) / blocks
    tracemalloc.stop()
    hashing, finding = [], []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        sequence = _sequence(hasher, wanted)
        hashed = time.perf_counter()
        found = cache.prefixes.find(sequence, 0)
        finding.append(1e6 * (time.perf_counter() - hashed))
        hashing.append(1e6 * (hashed - began))
        assert len(found) == tokens // _BLOCK_TOKENS, "the prompt is not in the index"
    return {
        "tokens": tokens,
        "blocks": blocks,
        "hash_us": round(statistics.median(hashing), 1),  # in the I/O thread
        "find_us": round(statistics.median(finding), 1),
        "bytes_per_block": round(held, 1),
    }


def _sequence(hasher: PromptHasher, prompt: np.ndarray) -> Sequence:
    params = SamplingParams(max_tokens=1)
    submit = Submit(0, [SequenceRequest(prompt.tobytes(), params)])
    group = SequenceGroup(b"", 0, prompt, 0, 0, 1e9)
    group.chain = hasher.keys(submit)[0]
    return Sequence(group, 0, params)


def _fill(
    cache: CacheManager, hasher: PromptHasher, random: np.random.Generator, wanted: np.ndarray, blocks: int
) -> None:
    """Index prompts until all blocks have an identity; `wanted` is among them."""
    index, prompt = cache.index, wanted
    while index.num_free:
        chain = _sequence(hasher, prompt).group.chain
        assert chain is not None
        keys = chain.keys[: index.num_free]
        held = index.allocate(len(keys))
        index.insert(chain.root, keys, held)
        index.release(held)
        prompt = random.integers(0, 1 << 16, len(wanted)).astype("<i4")
