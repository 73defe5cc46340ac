"""Keeps a tensor whose shape exceeds any memory from aborting the door's process.

Triton 2.51 accepts a tensor of shape [1, 2^32, 2^32] with zero bytes as consistent, because the product wraps
to 0. python_backend makes a numpy array of it before execute() is called. numpy refuses, no C++ code catches
the error, and the process aborts with all of its requests.

`install` replaces the two functions with which python_backend makes arrays: PyArray_NewFromDescr in the table
that numpy exports to C++ (numbers), and deserialize_bytes_tensor (texts). For such a shape they return an
array without elements; `check` then refuses the request. Where the functions cannot be replaced, the process
aborts as before.
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tridecode.backend.base.errors import RequestError

_NEW_FROM_DESCR = 94  # index in numpy's C API, the same in all releases of 1 and 2
_ENTRY = re.compile(r"PyArray_API\[(\d+)\]")
_MOST_BYTES = 2**63 - 1
_MOST_ITEM_BYTES = 16
_SHORT = 1 << 32  # arrays of up to this many elements are not checked further
_POINTER = ctypes.c_void_p
#: called with the GIL held. PyArray_NewFromDescr(type, descr, nd, dims, strides, data, flags, object)
_NewFromDescr = ctypes.PYFUNCTYPE(
    _POINTER, _POINTER, _POINTER, ctypes.c_int, _POINTER, _POINTER, _POINTER, ctypes.c_int, _POINTER
)

_log = logging.getLogger("tridecode.door")
_kept: list[Any] = []  # objects that C++ refers to


def check(name: str, tensor: Any, array: np.ndarray) -> None:
    """Raise RequestError if the array replaces a tensor whose shape exceeds any memory.

    tensor: pb_utils.Tensor. array: the numpy array made from it.
    """
    if array.size == 0 and hasattr(tensor, "shape"):
        shape = list(tensor.shape())
        if shape != list(array.shape):
            raise RequestError(f"{name} has shape {shape}; this is more than any memory holds")


def install() -> None:
    """Replace both functions in this process, once. Call it before the first request."""
    if _kept or not hasattr(pb_utils, "deserialize_bytes_tensor"):  # tests have no python_backend
        return
    try:
        _replace_numbers()
        _replace_texts()
    except Exception:
        _log.exception("a tensor whose shape no memory holds will end this process, as in Triton itself")


def _replace_numbers() -> None:
    """Let C++ code that looks up numpy's table from now on find a copy with a function of ours."""
    module: Any = sys.modules.get("numpy._core.multiarray") or sys.modules["numpy.core.multiarray"]
    get, new = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    get.restype, get.argtypes = _POINTER, [ctypes.py_object, ctypes.c_char_p]
    new.restype, new.argtypes = ctypes.py_object, [_POINTER, ctypes.c_char_p, _POINTER]
    header = Path(np.get_include(), "numpy", "__multiarray_api.h").read_text(encoding="utf-8")
    entries = _POINTER * (1 + max(int(number) for number in _ENTRY.findall(header)))
    table = entries(*entries.from_address(get(module._ARRAY_API, None)))
    original = _NewFromDescr(table[_NEW_FROM_DESCR] or 0)

    one = ctypes.c_ssize_t.from_address

    def make(kind, descr, nd, dims, strides, data, flags, base):
        if nd == 1 and one(dims).value <= _SHORT:  # the array of every response tensor
            return original(kind, descr, nd, dims, strides, data, flags, base)
        shape = (ctypes.c_ssize_t * nd).from_address(dims) if nd else ()
        if not _beyond_memory(shape):
            return original(kind, descr, nd, dims, strides, data, flags, base)
        empty = (ctypes.c_ssize_t * nd)()
        return original(kind, descr, nd, ctypes.addressof(empty), None, data, flags, base)

    callback = _NewFromDescr(make)
    table[_NEW_FROM_DESCR] = ctypes.cast(callback, _POINTER).value
    _kept.extend((table, callback))
    module._ARRAY_API = new(ctypes.addressof(table), None, None)


def _beyond_memory(shape: Sequence[int]) -> bool:
    """Return whether numpy refuses the shape; numpy ignores dimensions of 0 when it computes the size."""
    return math.prod(dim for dim in shape if dim > 0) > _MOST_BYTES // _MOST_ITEM_BYTES


class _Texts(np.ndarray):
    """Texts whose `reshape`, called by python_backend with the tensor's shape, returns a plain array."""

    def reshape(self, shape: Sequence[int]) -> np.ndarray:  # type: ignore[override]
        if _beyond_memory(shape):
            return np.empty((0,) * len(shape), object)
        return self.view(np.ndarray).reshape(shape)


def _replace_texts() -> None:
    original = pb_utils.deserialize_bytes_tensor

    def deserialize(encoded: Any) -> np.ndarray:
        return original(encoded).view(_Texts)

    pb_utils.deserialize_bytes_tensor = deserialize
