"""Prompt-learning part of a step plan, sent to every rank unchanged."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.wire.prompt_learning import MAX_TABLE_BYTES
from tridecode.backend.wire.prompt_tables import TABLE_DTYPES

_INT = np.dtype("<i4")
_Index = Annotated[int, msgspec.Meta(ge=0)]


class TableUpload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A table that a request sent, in the first plan that names it. values: (rows, n) of dtype."""

    number: _Index
    is_prefix: bool
    rows: _Index
    dtype: str
    values: bytes


class PrefixCopy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Copies the prefix `number` into `blocks`, in order, as the first cached tokens."""

    number: _Index
    blocks: list[_Index]


class VirtualTokens(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens of a step whose embeddings are rows of the table `number`.

    tokens: (n,) int32, indices of the step's tokens. rows: (n,) int32.
    """

    number: _Index
    tokens: bytes
    rows: bytes

    @classmethod
    def of(cls, number: int, tokens: np.ndarray, rows: np.ndarray) -> VirtualTokens:
        return cls(number, tokens.astype(_INT).tobytes(), rows.astype(_INT).tobytes())

    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """tokens and rows, (n,) int32 each."""
        return np.frombuffer(self.tokens, _INT), np.frombuffer(self.rows, _INT)


class StepPrompts(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Executed before the step, in this order.

    dropped: tables that neither this plan nor a later one names. cleared: cache blocks to set to zero,
    because a request's table may have filled them with non-finite values. uploads, prefixes: see TableUpload
    and PrefixCopy. virtual: the step's virtual tokens.
    """

    dropped: list[_Index] = []
    cleared: list[_Index] = []
    uploads: list[TableUpload] = []
    prefixes: list[PrefixCopy] = []
    virtual: list[VirtualTokens] = []


def check_prompts(prompts: StepPrompts, num_tokens: int, where: str) -> None:
    """Raise TridecodeError for a table whose bytes do not match its rows, or a token outside of the step."""
    for table in prompts.uploads:
        item = TABLE_DTYPES.get(table.dtype)
        size = len(table.values)
        if item is None or not table.rows or size > MAX_TABLE_BYTES or size % (table.rows * item.itemsize):
            found = f"table {table.number} has {size:,} bytes for {table.rows} rows of {table.dtype[:20]}"
            raise TridecodeError(f"{where}: {found}")
    for virtual in prompts.virtual:
        if len(virtual.tokens) % _INT.itemsize or len(virtual.tokens) != len(virtual.rows):
            raise TridecodeError(
                f"{where}: table {virtual.number} has {len(virtual.tokens):,} bytes of tokens and "
                f"{len(virtual.rows):,} of rows"
            )
        tokens, rows = virtual.indices()
        if (tokens < 0).any() or (tokens >= num_tokens).any() or (rows < 0).any():
            raise TridecodeError(f"{where}: table {virtual.number} names a token outside of the step")
