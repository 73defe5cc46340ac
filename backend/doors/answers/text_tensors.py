"""Makes the texts of responses into tensors in a fraction of the time that python_backend needs.

For each text tensor Triton 2.51 calls `serialize_byte_tensor` of its Python module. That function walks the
array by numpy's iterator. `install` replaces it by one that treats a single text separately, since most
responses hold one text. Most texts are one or two tokens, and some hundred of those are half of a language:
TextTensors sends their tensors again.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_length = struct.Struct("<I").pack
#: bytes of a text whose tensor is sent again, and number of such tensors of a thread
_LONGEST, _MOST = 24, 512


class TextTensors(threading.local):
    """Tensors of short texts, for each sender thread its own.

    A tensor gets its place in shared memory when it is sent first, and two threads might then both give it
    one. Sending it again only counts its users, which python_backend does under a lock.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, bytes], Any] = {}

    def tensor(self, name: str, text: bytes, make: Callable[[], Any]) -> Any:
        """Return a tensor of this name and text; make: returns a new one."""
        if len(text) > _LONGEST:
            return make()
        found = self._made.get((name, text))
        if found is None:
            if len(self._made) >= _MOST:
                self._made.clear()
            found = self._made[name, text] = make()
        return found


def install() -> None:
    """Replace the function in this process, once."""
    original = getattr(pb_utils, "serialize_byte_tensor", None)
    if original is None or hasattr(original, "general"):  # tests have no python_backend
        return

    def serialize(texts: np.ndarray) -> Any:
        """texts: an array of bytes objects. Returns each text after its length, as one bytes object."""
        if texts.size == 1:
            text = texts.item()
            if type(text) is bytes:
                return _length(len(text)) + text
        return original(texts)

    serialize.general = original  # type: ignore[attr-defined]
    pb_utils.serialize_byte_tensor = serialize
