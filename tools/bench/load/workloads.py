"""Generates workloads: prompts of random ids with the lengths of a data set.

`lambada` is the run of FasterTransformer's bloom_lambada.py: the 5,153 texts of LAMBADA's test set without
their last words; the published run for BLOOM-7B1 used batches of 16. That script generates as many tokens as
the longest last word of the batch: 3 in the median of 16 consecutive texts (1 to 9, mean 2.8). The lengths
below were counted with SmolLM2's tokenizer, without BOS: mean 80.2, standard deviation 12.3, 58 to 222
tokens. BLOOM's vocabulary is five times as large, so its counts are probably slightly lower. The prompts are
shuffled, not in the data set's order.

`mix` is a load of chats: prompts and answers of log-normal lengths, as in traces of public chat services. It
is not derived from a data set.
"""

from __future__ import annotations

import numpy as np

from tridecode.backend.base.errors import ConfigError

LAMBADA, MIX = "lambada", "mix"
#: new tokens per prompt
LAMBADA_OUTPUT = 3
#: (median, least, most) tokens of prompts and of answers in `mix`; standard deviation of the logarithms
MIX_PROMPT, MIX_OUTPUT, MIX_SIGMA = (180, 16, 1024), (150, 4, 512), 0.8
_LAMBADA_SHORTEST = 58
#: number of prompts with 58, 59, ... tokens
_LAMBADA_COUNTS = (
    "2 1 7 15 34 62 70 98 114 132 171 187 196 186 213 195 200 215 221 189 179 177 176 172 152 160 147 "
    "115 104 116 96 103 96 80 71 62 56 48 54 48 46 37 35 27 26 22 24 16 19 17 13 5 11 10 16 14 9 10 7 7 "
    "3 7 0 8 7 0 5 3 2 2 1 1 0 0 2 3 1"
)
#: number of longer prompts, by tokens
_LAMBADA_LONG = {
    137: 1,
    138: 3,
    140: 2,
    142: 3,
    146: 1,
    148: 1,
    149: 1,
    152: 1,
    157: 1,
    161: 1,
    166: 1,
    222: 1,
}


def workload_prompts(
    name: str, vocab_size: int, limit: int | None = None, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Return the first `limit` prompts of a workload, determined by the seed. Raises ConfigError for an
    unknown workload.
    """
    if name != LAMBADA:
        raise ConfigError(f"no workload {name!r}; wanted {LAMBADA}")
    random = np.random.default_rng(seed)
    lengths = random.permutation(_lambada_lengths())[:limit]
    ids = random.integers(3, vocab_size, lengths.sum())  # ids 0 to 2 may be special
    return tuple(tuple(part.tolist()) for part in np.split(ids, np.cumsum(lengths)[:-1]))


def _lambada_lengths() -> np.ndarray:
    """Return (5153,), the tokens of each prompt, ascending."""
    counts = [int(count) for count in _LAMBADA_COUNTS.split()]
    usual = np.repeat(np.arange(len(counts)) + _LAMBADA_SHORTEST, counts)
    return np.concatenate([usual, np.repeat(list(_LAMBADA_LONG), list(_LAMBADA_LONG.values()))])


def mix_requests(
    vocab_size: int, count: int, seed: int = 0
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return (prompts, new tokens of each) for `count` requests of `mix`, determined by the seed."""
    random = np.random.default_rng(seed)
    prompts, outputs = (_log_normal(random, count, *shape) for shape in (MIX_PROMPT, MIX_OUTPUT))
    ids = random.integers(3, vocab_size, prompts.sum())  # ids 0 to 2 may be special
    parts = np.split(ids, np.cumsum(prompts)[:-1])
    return tuple(tuple(part.tolist()) for part in parts), tuple(outputs.tolist())


def _log_normal(random: np.random.Generator, count: int, median: int, least: int, most: int) -> np.ndarray:
    """Return (count,) integers, clamped to the bounds."""
    values = np.exp(random.normal(np.log(median), MIX_SIGMA, count))
    return np.clip(values.round().astype(np.int64), least, most)
