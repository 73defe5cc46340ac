"""Serialises the texts of responses in a fraction of the time that python_backend needs.

For each text tensor Triton 2.51 calls `serialize_byte_tensor` of its Python module, which walks the array
with numpy's iterator. Most responses hold one text; `install` puts a function in its place that treats one
text separately.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_length = struct.Struct("<I").pack


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
