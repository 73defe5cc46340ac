"""Converts texts of responses to tensors in a fraction of the time that python_backend needs.

For each text tensor Triton 2.51 calls `serialize_byte_tensor` of its Python module, which walks the array
with numpy's iterator. `install` replaces that function by one with a fast path for a single text, because
most responses hold one text. Most texts are one or two tokens, and a few hundred of them make up half of
a language: TextTensors reuses their tensors.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_length = struct.Struct("<I").pack
#: maximum bytes of a text whose tensor is reused, and maximum number of such tensors per thread
_LONGEST, _MOST = 24, 512


class TextTensors(threading.local):
    """Tensors of short texts, per sender thread.

    python_backend allocates shared memory for a tensor when it is first sent, and two threads could do so at
    the same time. Sending it again only increments its reference count, under a lock.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, bytes], Any] = {}

    def tensor(self, name: str, text: bytes, make: Callable[[], Any]) -> Any:
        """Return a tensor with this name and text, an existing one if possible. make: creates a new one."""
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
        """Return each text after its length, as one bytes object. texts: an array of bytes objects."""
        if texts.size == 1:
            text = texts.item()
            if type(text) is bytes:
                return _length(len(text)) + text
        return original(texts)

    serialize.general = original  # type: ignore[attr-defined]
    pb_utils.serialize_byte_tensor = serialize
