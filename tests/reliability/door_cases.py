"""The cases of the fuzz within a process, drawn from the contracts' tables: a new field is fuzzed at once.

`cases_of` gives for each field of a contract the tensors that a client may send in its place: missing,
of another type, rank or number of rows, empty, and the edges of its type's values. All are deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from tridecode.backend.doors.contracts.field import Contract, Field

Arrays = dict[str, np.ndarray]
ROWS = 2  # of the control
MEGABYTE = 1 << 20
HUNDRED_THOUSAND = 100_000

WHOLE = (0, 1, 2, 3, -1, 7, 330, 331, 1023, 1025, 50256)
WHOLE += (2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, -(2**31))
REALS = (0.0, -0.0, 1.0, 0.5, -0.5, 2.0, 1e-30, 1e30, 65504.0, float("nan"), float("inf"), float("-inf"))
TEXTS = {
    "an empty text": b"",
    "words": b"the city",
    "not UTF-8": b"\xff\xfe",
    "UTF-8 cut short": b"the\xc3",
    "a surrogate": b"\xed\xa0\x80",
    "a quote": b'"',
    "CSV": b'a,"b, c", d',
    "NUL": b"\0",
    "Japanese": "今日は🙂".encode(),
    "5,000 bytes": b"x" * 5000,
    "1 MB": b"a b " * (MEGABYTE // 4),
}
FOREIGN = (np.float32, np.int32, np.bool_, np.object_, np.uint8, np.float64, np.int64)


@dataclass
class Case:
    """One request. fields: those that are unusual. what: how, for the report."""

    door: str
    fields: tuple[str, ...]
    what: str
    arrays: Arrays
    parameters: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.door}: {' and '.join(self.fields)}: {self.what}"


def cases_of(door: str, contract: Contract, control: Arrays) -> Iterator[Case]:
    """Every case of every field; `control` is the request that is changed."""
    for one in contract.inputs:
        rest = {name: array for name, array in control.items() if name != one.name}
        if one.required:
            yield Case(door, (one.name,), "missing", rest)
        for what, array in tensors_of(one, control.get(one.name)):
            yield Case(door, (one.name,), what, {**rest, one.name: array})
    yield Case(door, ("all",), "zero rows", {name: array[:0] for name, array in control.items()})
    yield Case(door, ("nosuch",), "an input that no table has", {**control, "nosuch": np.ones((ROWS, 1))})


def tensors_of(one: Field, usual: np.ndarray | None) -> Iterator[tuple[str, np.ndarray]]:
    dtype = np.dtype(one.dtypes[0])
    yield from _foreign(one)
    for shape in _shapes(one):
        yield f"shape {list(shape)}", _filled(shape, dtype, usual)
    for what, value in _values(dtype):
        yield what, np.full(_usual_shape(one, usual), value, dtype)
    if dtype.kind == "O" or dtype.kind in "iufb":
        yield "rows that differ", _differing(_usual_shape(one, usual), dtype)
    yield from _KINDS.get(one.kind, lambda: iter(()))()


def _usual_shape(one: Field, usual: np.ndarray | None) -> tuple[int, ...]:
    return usual.shape if usual is not None else (ROWS, *(1 if dim < 0 else dim for dim in one.dims))


def _foreign(one: Field) -> Iterator[tuple[str, np.ndarray]]:
    others = [dtype for dtype in FOREIGN if dtype not in one.dtypes]
    for dtype in others[:3]:
        value = b"1" if dtype is np.object_ else 1
        yield f"dtype {np.dtype(dtype)}", np.full((ROWS, 1), value, dtype)


def _shapes(one: Field) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(), (1,), (3, 1), (2, 2), (2, 1, 2), (0, 1), (2, 0), (0,), (2**40, 0)]
    return [*shapes, (2, 2, 0), (1, 2, 1)] if len(one.dims) > 1 else shapes


def _filled(shape: tuple[int, ...], dtype: np.dtype, usual: np.ndarray | None) -> np.ndarray:
    if usual is not None and usual.size:
        return np.full(shape, usual.reshape(-1)[0], dtype)
    return np.full(shape, b"a" if dtype.kind == "O" else 1, dtype)


def _values(dtype: np.dtype) -> Iterator[tuple[str, object]]:
    if dtype.kind == "O":
        yield from TEXTS.items()
    elif dtype.kind == "f":
        top = float(np.finfo(dtype).max)
        yield from ((f"value {value}", value) for value in REALS if not np.isfinite(value) or value <= top)
    elif dtype.kind == "b":
        yield from (("value true", True), ("value false", False))
    else:
        limits = np.iinfo(dtype)
        fitting = (value for value in WHOLE if limits.min <= value <= limits.max)
        yield from ((f"value {value}", value) for value in fitting)


def _differing(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    array = np.full(shape, b"a" if dtype.kind == "O" else 1, dtype)
    if array.size:
        array[-1] = b"the" if dtype.kind == "O" else 0 if dtype.kind in "bf" else 2
    return array


def _word_ids() -> Iterator[tuple[str, np.ndarray]]:
    def rows(ids: list[int], ends: list[int]) -> np.ndarray:
        return np.array([[ids, ends]] * ROWS, np.int32)

    yield "offsets that decrease", rows([5, 6, 7], [3, 1, -1])
    yield "offsets that overlap", rows([5, 6, 7], [2, 2, 3])
    yield "an offset beyond the ids", rows([5, 6, 7], [1, 9, -1])
    yield "an offset after padding", rows([5, 6, 7], [1, -1, 2])
    yield "offset 0", rows([5, 6, 7], [0, 1, -1])
    yield "only padding", rows([0, 0], [-1, -1])
    yield "negative ids", rows([-5, 6], [1, 2])
    yield "ids beyond the vocabulary", rows([5, 2**31 - 1], [1, 2])
    yield "no words", np.zeros((ROWS, 2, 0), np.int32)
    yield "one list for all rows", np.array([[5, 6], [1, 2]], np.int32)
    yield "an axis of 3", np.zeros((ROWS, 3, 2), np.int32)
    yield "10^5 words", rows([5] * HUNDRED_THOUSAND, list(range(1, HUNDRED_THOUSAND + 1)))


def _words() -> Iterator[tuple[str, np.ndarray]]:
    yield "10^5 words", np.array([[b"w%d" % i for i in range(HUNDRED_THOUSAND)]] * ROWS, object)
    yield "1,000 words", np.array([[b"w%d" % i for i in range(1000)]] * ROWS, object)
    yield "200 empty words", np.full((ROWS, 200), b"", object)
    yield "the same word twice", np.full((ROWS, 2), b"the", object)


def _csv() -> Iterator[tuple[str, np.ndarray]]:
    many = b",".join(b"w%d" % i for i in range(HUNDRED_THOUSAND))
    yield "10^5 words", np.full((ROWS, 1), many, object)
    yield "lines", np.full((ROWS, 1), b"a\nb", object)


def _ids() -> Iterator[tuple[str, np.ndarray]]:
    yield "an id beyond the vocabulary", np.full((ROWS, 3), 400, np.uint32)
    yield "10^5 ids", np.full((ROWS, HUNDRED_THOUSAND), 5, np.uint32)
    yield "one id", np.full((ROWS, 1), 5, np.uint32)


_KINDS = {"word_ids": _word_ids, "words": _words, "csv": _csv, "ids": _ids}


def mixed_cases(door: str, contract: Contract, control: Arrays, count: int, seed: int) -> Iterator[Case]:
    """Requests with two to four unusual fields each, drawn from the same cases."""
    single: Mapping[str, list[np.ndarray]] = {
        one.name: [array for _, array in tensors_of(one, control.get(one.name)) if array.size < 10_000]
        for one in contract.inputs
    }
    for number in range(count):
        draw = random.Random(f"{door} {seed} {number}")
        names = draw.sample(sorted(single), min(len(single), draw.randint(2, 4)))
        arrays = {**control, **{name: draw.choice(single[name]) for name in names}}
        what = ", ".join(f"{name}={_short(arrays[name])}" for name in names)
        yield Case(door, tuple(names), what, arrays)


def _short(array: np.ndarray) -> str:
    text = f"{list(array.shape)} {array.dtype}"
    return text + (f" of {array.reshape(-1)[0]!r}"[:40] if array.size else "")
