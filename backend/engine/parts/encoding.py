"""Encodes and decodes the values of a part in a plan frame. No torch."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError

_INT = np.dtype("<i4")
F = TypeVar("F")


def ints(values: np.ndarray) -> bytes:
    """Return an int32 array as little-endian bytes."""
    assert values.dtype == np.int32, values.dtype
    return values.astype(_INT, copy=False).tobytes()


def read_ints(data: bytes, count: int, where: str) -> np.ndarray:
    """Return (count,) int32, read-only. Raises TridecodeError if the number of bytes differs."""
    if len(data) != count * _INT.itemsize:
        raise TridecodeError(
            f"{where} has {len(data):,} bytes; {count:,} values of {_INT} need {count * _INT.itemsize:,}"
        )
    return np.frombuffer(data, _INT)


def read(decoder: msgspec.msgpack.Decoder[F], data: msgspec.Raw, where: str) -> F:
    """Return the value that a part has encoded. Raises TridecodeError."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TridecodeError(f"{where} cannot be read: {error}") from None
