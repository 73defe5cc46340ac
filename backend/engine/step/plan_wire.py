"""Splits a plan's frame into messages of known size: receivers of a broadcast post their buffers first. No
torch.

The first message always has FIRST_BYTES: the frame's length, then its beginning. Almost every plan fits into
it and takes one broadcast; a longer frame needs a second message.
"""

from __future__ import annotations

import numpy as np

from tridecode.backend.engine.step import plan_frame

FIRST_BYTES = 16 << 10
_LENGTH = np.dtype("<i8")
_ROOM = FIRST_BYTES - _LENGTH.itemsize


def messages(frame: bytes) -> list[np.ndarray]:
    """Return one or two writable arrays of uint8. frame: from plan_frame.encode; b"" ends the plans."""
    first = np.zeros(FIRST_BYTES, np.uint8)
    first[: _LENGTH.itemsize].view(_LENGTH)[0] = len(frame)
    data = np.frombuffer(frame, np.uint8)
    head = data[:_ROOM]
    first[_LENGTH.itemsize : _LENGTH.itemsize + len(head)] = head
    return [first] if len(data) <= _ROOM else [first, data[_ROOM:].copy()]


def read_first(first: np.ndarray) -> tuple[bytes, int]:
    """Return (start of the frame, bytes in the second message) from a first message (FIRST_BYTES,) uint8.

    Raises TridecodeError for an impossible length.
    """
    size = int(first[: _LENGTH.itemsize].view(_LENGTH)[0])
    if size == 0:
        return b"", 0
    plan_frame.check_size(size)
    return first[_LENGTH.itemsize : _LENGTH.itemsize + size].tobytes(), max(size - _ROOM, 0)
