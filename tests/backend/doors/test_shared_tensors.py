"""Tensors shared by the responses of a request, and texts serialised without numpy's iterator."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from tridecode.backend.doors.door import Outputs

#: compares both functions in a process with Triton's own module
PROGRAM = """
import sys
import numpy as np
sys.path.insert(0, {folder!r})
import triton_python_backend_utils as utilities
original = utilities.serialize_byte_tensor
from tridecode.backend.doors.answers import text_tensors

text_tensors.install()
replaced = utilities.serialize_byte_tensor
assert replaced is not original
text_tensors.install()
assert utilities.serialize_byte_tensor is replaced
rows = [[b"ab"], [b""], ["\\u6771\\u4eac".encode()], [b"\\0\\xff"], [b"a" * 70000], [b"a", b"", b"ccc"],
        ["str"], []]
for row in rows:
    for shape in ((len(row),), (1, len(row)), (len(row), 1)):
        texts = np.array(row, object).reshape(shape)
        assert replaced(texts) == original(texts), (row, shape)
print("as wanted")
"""


def test_texts_are_serialised_as_by_triton() -> None:
    package = importlib.util.find_spec("pytriton")
    assert package is not None and package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0], "tritonserver", "backends", "python")
    program = PROGRAM.format(folder=str(folder))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "as wanted", done.stderr


TYPES = {"text_output": np.object_, "count": np.int32, "index": np.int64}


def test_values_that_repeat_share_a_tensor() -> None:
    outputs = Outputs(TYPES, ())
    first = outputs.repeated({"count": ((3,),), "index": (0, 1)})
    again = outputs.repeated({"index": (0, 1), "count": ((3,),)})
    assert [tensor.name() for tensor in first] == ["count", "index"]
    assert again[0] is first[1] and again[1] is first[0]
    assert first[0].as_numpy().dtype == np.int32 and first[0].as_numpy().tolist() == [[3]]
    assert first[1].as_numpy().dtype == np.int64 and first[1].as_numpy().tolist() == [0, 1]
    (other,) = outputs.repeated({"count": (3,)})
    assert other.as_numpy().shape == (1,)


def test_any_order_of_values_gives_the_right_tensors() -> None:
    random.seed(5)
    outputs = Outputs(TYPES, ())
    for _ in range(2000):
        value = random.choice([1, 2, 3, random.randrange(10**6)])
        (tensor,) = outputs.repeated({"count": ((value,),)})
        assert tensor.as_numpy().tolist() == [[value]]
    assert len(outputs._made) <= 64


def test_a_key_is_looked_up_instead_of_its_values() -> None:
    outputs, made = Outputs(TYPES, ("count",)), []

    def counts(value: int) -> dict[str, tuple]:
        made.append(value)
        return {"count": ((value,),), "index": (value,)}

    random.seed(6)
    for _ in range(2000):
        value = random.choice([1, 2, 3, random.randrange(10**6)])
        (tensor,) = outputs.shared((0, value), lambda value=value: counts(value))
        assert tensor.name() == "count" and tensor.as_numpy().tolist() == [[value]]
    assert len(outputs._shared) <= 64
    assert made.count(1) < 100  # 500 responses had it


def test_a_thread_shares_the_tensors_of_short_texts() -> None:
    first, second = Outputs(TYPES, ()), Outputs(TYPES, ())
    (tensor,) = first.text("text_output", b" the")
    assert tensor.as_numpy().tolist() == [b" the"] and tensor.as_numpy().dtype == np.object_
    assert second.text("text_output", b" the")[0] is tensor
    assert first.text("text_output", b"the")[0].as_numpy().tolist() == [b"the"]
    assert first.text("text_output", b"")[0].as_numpy().tolist() == [b""]
    assert first.text("absent", b" the") == [] == Outputs(TYPES, ["count"]).text("text_output", b" the")
    found: list[object] = []
    thread = threading.Thread(daemon=True, target=lambda: found.extend(first.text("text_output", b" the")))
    thread.start()
    thread.join()
    assert found and found[0] is not tensor
    long = b"x" * 1000
    assert first.text("text_output", long)[0] is not first.text("text_output", long)[0]


def test_the_shared_texts_are_bounded() -> None:
    outputs = Outputs(TYPES, ())
    (tensor,) = outputs.text("text_output", b"bounded")
    for number in range(2000):
        assert outputs.text("text_output", b"%d" % number)[0].as_numpy().tolist() == [b"%d" % number]
    assert outputs.text("text_output", b"bounded")[0] is not tensor


def test_outputs_that_were_not_requested_are_left_out() -> None:
    outputs = Outputs(TYPES, ["index"])
    made = outputs.repeated({"count": (1,), "index": (1,), "unknown": (1,)})
    assert [tensor.name() for tensor in made] == ["index"]
