"""Tensors with a shape that no memory holds, made as python_backend's C++ makes them.

The real server: tests/integration/test_survived_requests.py.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.fake_engine import FakeEngine
from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors import fastertransformer, huge_shapes

#: calls PyArray_NewFromDescr as C++ does: through the table, after `install`
PROGRAM = """
import ctypes, sys, types
import numpy as np

utilities = types.ModuleType("triton_python_backend_utils")
utilities.deserialize_bytes_tensor = lambda encoded: np.array([bytes(encoded)] * bool(len(encoded)), object)
sys.modules["triton_python_backend_utils"] = utilities
from tridecode.backend.doors import huge_shapes

huge_shapes.install()
module = sys.modules.get("numpy._core.multiarray") or sys.modules["numpy.core.multiarray"]
get = ctypes.pythonapi.PyCapsule_GetPointer
get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
table = get(module._ARRAY_API, None)
kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int,
                         *[ctypes.c_void_p] * 3, ctypes.c_int, ctypes.c_void_p)
make = kind((ctypes.c_void_p * 300).from_address(table)[94])
data = np.arange(24, dtype=np.int32)

def array(*shape):
    descr = np.dtype(np.int32)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(descr))  # stolen
    dims = (ctypes.c_ssize_t * len(shape))(*shape)
    return make(np.ndarray, descr, len(shape), ctypes.addressof(dims), None, data.ctypes.data, 0, None)

assert array(2, 3, 4).tolist() == data.reshape(2, 3, 4).tolist()
assert array().tolist() == 0 and array(0, 5).shape == (0, 5)
for shape in ((4, 2**62), (2**22, 2**21, 2**21), (1, 0, 2**61), (2**62, 0), (2**63 - 1,)):
    assert array(*shape).shape == (0,) * len(shape), shape

texts = utilities.deserialize_bytes_tensor
assert texts(b"").reshape([4, 2**62]).shape == (0, 0)
one = texts(b"ab").reshape([1, 1])
assert type(one) is np.ndarray and one.tolist() == [[b"ab"]]
print("as wanted")
"""


def test_both_functions_make_arrays_without_elements():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout == "as wanted\n", done.stderr


def test_the_shape_that_was_sent_is_in_the_error():
    tensor = SimpleNamespace(shape=lambda: [1, 2**32, 2**32])
    with pytest.raises(
        RequestError, match=r"x has shape \[1, 4294967296, 4294967296\]; this is more than any"
    ):
        huge_shapes.check("x", tensor, np.zeros((0, 0, 0)))
    huge_shapes.check("x", SimpleNamespace(shape=lambda: [0, 5]), np.zeros((0, 5)))
    huge_shapes.check("x", SimpleNamespace(), np.zeros((0, 5)))


def test_a_door_refuses_it(monkeypatch):
    monkeypatch.setattr(fake_triton.Tensor, "shape", lambda self: [4, 2**62], raising=False)
    config = fake_triton.model_config("fastertransformer", {}, {"output_ids": "TYPE_UINT32"})
    with running(fastertransformer.TritonPythonModel, config, FakeEngine()) as door:
        hostile = fake_triton.InferenceRequest({"input_ids": np.zeros((0, 0), np.uint32)})
        code, text = refusal(fake_triton.ask(door, hostile))
        assert code == "INVALID_ARG" and f"input_ids has shape [4, {2**62}]" in text
        monkeypatch.undo()
        good = {"input_ids": np.array([[5]], np.uint32), "input_lengths": np.array([[1]], np.uint32)}
        good["request_output_len"] = np.array([[2]], np.uint32)
        assert "output_ids" in only(fake_triton.ask(door, fake_triton.InferenceRequest(good)))
