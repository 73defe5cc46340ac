"""Arrays of prompt learning: dtypes and checks of tables, and the ids of rows. Needs numpy, not torch."""

from __future__ import annotations

import numpy as np

#: dtypes of a table in a message (backend/wire/prompt_learning.py)
TABLE_DTYPES: dict[str, np.dtype] = {"fp16": np.dtype("<f2"), "fp32": np.dtype("<f4")}


def virtual_ids(vocab_size: int, rows: int) -> np.ndarray:
    """Return (rows,) int64, the engine's ids of a whole table in order."""
    return np.arange(vocab_size, vocab_size + rows, dtype=np.int64)


def not_finite(values: np.ndarray, largest: float) -> tuple[int, ...] | None:
    """Return the index of the first value that is NaN or beyond `largest`; None if all are valid."""
    # a NaN compares false; NumPy 2 would make `largest` a float16 next to float16 values, which is infinite
    fine = np.abs(values) <= np.float64(largest)
    return None if fine.all() else tuple(np.argwhere(~fine)[0].tolist())
