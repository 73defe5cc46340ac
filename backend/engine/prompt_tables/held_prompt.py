"""The prompt-learning table of one group of sequences. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class HeldPrompt:
    """The table of a group.

    number: id in plans. vocab_size: ids from it on are rows. values: a request's table, until it is sent.
    """

    number: int
    is_prefix: bool
    rows: int
    vocab_size: int
    dtype: str = ""
    values: bytes = b""
    size: int = 0  # bytes of a request's table; 0: a task's table
    sent: bool = True
