"""Definitions of prompt learning (trained vectors instead of prompt tokens) for doors and engine.

Imports neither numpy nor torch.

A virtual token has no id of the vocabulary. In the engine's prompts the id vocab_size + i stands for row i of
the request's table: an embedding, or the keys and values of a prefix. Contracts spell these inputs
differently (`doors/requests/prompt_inputs.py`). Types are FasterTransformer's prompt_learning_type.
"""

from __future__ import annotations

import msgspec

NO_PROMPT = 0
SOFT_PROMPT = 1  # embeddings before the prompt
PREFIX_PROMPT = 2  # keys and values of every layer, before position 0
P_TUNING = 3  # embeddings replace the ids from prompt_learning_start_id on
TYPES = (NO_PROMPT, SOFT_PROMPT, PREFIX_PROMPT, P_TUNING)

#: limit of the bytes of one table in a request
MAX_TABLE_BYTES = 64 << 20
#: up to this many ids after end_id count as padding of the vocabulary: Megatron pads to a multiple of 128 *
#: ranks
_MOST_PADDING = 1024


class PromptTask(msgspec.Struct, frozen=True):
    """A task of config.ini. kind: one of TYPES. fault: why it cannot be served; "": it can."""

    name: str
    length: int
    kind: int
    fault: str = ""


class PromptLimits(msgspec.Struct, frozen=True):
    """Prompt-learning limits that the doors check.

    kind: prompt_learning_type of the model. start_id: with P_TUNING, the first virtual id of clients. tasks:
    by number. prefix_size: values per row of a prefix, layers * 2 * kv heads * D; 0: the model has no
    prefixes. largest: the largest value that the engine's dtype holds.
    """

    kind: int = NO_PROMPT
    start_id: int = 0
    tasks: list[PromptTask] = []
    prefix_size: int = 0
    largest: float = 3e38


class LearnedPrompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """The table of one sequence's virtual tokens.

    task: the number of a task of the model; -1: the table is `values`, little-endian in one of TABLE_DTYPES
    (prompt_tables.py), `rows` rows. is_prefix: a row holds the keys and values of a position,
    (layers, 2, kv heads, D); else it is an embedding (C,).
    """

    task: int = -1
    is_prefix: bool = False
    rows: int = 0
    dtype: str = "fp16"
    values: bytes = b""


def default_start_id(vocab_size: int, end_id: int) -> int:
    """Return the default of prompt_learning_start_id in config.ini.

    It is end_id + 1, as in FasterTransformer, if only padding of the vocabulary can follow; else vocab_size,
    because ordinary ids would count as virtual.
    """
    padding = vocab_size - (end_id + 1)
    if end_id >= 0 and 0 <= padding <= min(_MOST_PADDING, vocab_size // 32):
        return end_id + 1
    return vocab_size
