"""An unpickler whose work is bounded: for files of torch.save, which are not trusted.

No object of the file runs code of its own, but plain data can cost as much as code: keys whose hashes collide
or nest (2^30 steps in 200 bytes), states that are copied repeatedly, numbers of megabytes. Here each
operation is charged, including what it copies, and the keys of dicts and sets must be short texts, integers
or objects.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO

#: about 36 for an entry of a state dict; they take 1 to 2 s
MAX_OPERATIONS = 1_000_000
MAX_PICKLE_BYTES = 64 << 20
_MAX_INTEGER_BITS = 512  # random states have 128
_MAX_KEY_BITS = 64  # longer integers can be made to collide: Python's hash is modulo 2^61 - 1
_MAX_KEY_LENGTH = 4096  # of a text that is a key
_MAX_PLAIN_ITEMS = 1024
_MAX_LINE = 1 << 20
_CONTAINERS = (list, tuple, dict, set, frozenset)


class PickleLimitError(pickle.UnpicklingError):
    """The pickle exceeds a limit, or holds something that its reader rejects.

    The text is a clause about it.
    """


class _Source:
    """A file that gives at most MAX_PICKLE_BYTES."""

    def __init__(self, file: BinaryIO):
        self._file, self._left = file, MAX_PICKLE_BYTES

    def read(self, size: int) -> bytes:
        self._take(size)
        return self._file.read(size)

    def readline(self) -> bytes:
        line = self._file.readline(_MAX_LINE)
        self._take(len(line))
        return line

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise PickleLimitError(f"its pickle has more than {MAX_PICKLE_BYTES:,} bytes")


def is_key(value: Any) -> bool:
    """Return whether hashing and comparing it takes a bounded time, whatever the other keys are.

    Hashes of floats and tuples are not keyed, so that many equal ones can be made.
    """
    if isinstance(value, (str, bytes)):
        return len(value) <= _MAX_KEY_LENGTH
    if isinstance(value, int):
        return value.bit_length() <= _MAX_KEY_BITS
    return not isinstance(value, (*_CONTAINERS, float, bytearray))


def is_plain(value: Any) -> bool:
    """Return whether it can be printed and compared: a number, a short text, or a flat list or tuple."""
    if type(value) in (list, tuple):
        return len(value) <= _MAX_PLAIN_ITEMS and all(
            isinstance(item, float) or is_key(item) for item in value
        )
    return isinstance(value, float) or is_key(value)


def _check_keys(keys: list[Any]) -> None:
    for key in keys:
        if not is_key(key):
            raise PickleLimitError(
                f"a {type(key).__name__} is the key of a dict or set; wanted a short text or an integer"
            )


def ordered_dict_items(pairs: Any = ()) -> list[tuple[Any, Any]]:
    """The items that an OrderedDict is made of, with its keys checked."""
    items = list(pairs.items()) if isinstance(pairs, dict) else [(key, value) for key, value in pairs]
    _check_keys([key for key, _ in items])
    return items


# ---------------------------------------------------------------- operations

_Operation = Callable[[Any], None]


def _counted(operation: _Operation) -> _Operation:
    def run(unpickler: BoundedUnpickler) -> None:
        unpickler.charge(1)
        operation(unpickler)

    return run


def _with_keys(first: int, step: int, operation: _Operation) -> _Operation:
    """Check the keys on the stack: every step-th item from `first` on."""

    def run(unpickler: BoundedUnpickler) -> None:
        _check_keys(unpickler.stack[first::step])
        operation(unpickler)

    return run


def _copying(count: int, operation: _Operation) -> _Operation:
    """Charge for the topmost `count` items (0: all), which a call may copy, and for containers in them."""

    def run(unpickler: BoundedUnpickler) -> None:
        for value in unpickler.stack[-count:]:
            if isinstance(value, _CONTAINERS):
                inner = (len(item) for item in value if isinstance(item, _CONTAINERS))
                unpickler.charge(len(value) + sum(inner))
        operation(unpickler)

    return run


def _long_integer(size_bytes: int) -> _Operation:
    def run(unpickler: BoundedUnpickler) -> None:
        length = int.from_bytes(unpickler.read(size_bytes), "little")
        if 8 * length > _MAX_INTEGER_BITS:
            raise PickleLimitError(f"an integer has {length:,} bytes")
        unpickler.append(pickle.decode_long(unpickler.read(length)))

    return run


def _integer_in_text(operation: _Operation) -> _Operation:
    def run(unpickler: BoundedUnpickler) -> None:
        operation(unpickler)
        if unpickler.stack[-1].bit_length() > _MAX_INTEGER_BITS:
            raise PickleLimitError(f"an integer has {unpickler.stack[-1].bit_length():,} bits")

    return run


def _put(unpickler: BoundedUnpickler) -> None:
    index = int(unpickler.readline()[:-1])
    if not 0 <= index < 1 << 32:
        raise PickleLimitError("a place of the memo is negative or above 2^32")
    unpickler.memo[index] = unpickler.stack[-1]


def _refused(unpickler: BoundedUnpickler) -> None:
    raise PickleLimitError("it has an operation that torch.save does not write")


def _bounded(theirs: dict[int, _Operation]) -> dict[int, _Operation]:
    """The operations by their bytes, with limits."""
    code = {operation.name: ord(operation.code) for operation in pickletools.opcodes}
    made = dict(theirs)
    for name, keys in {"SETITEM": (-2, 2), "SETITEMS": (0, 2), "DICT": (0, 2), "ADDITEMS": (0, 1),
                       "FROZENSET": (0, 1)}.items():  # fmt: skip
        made[code[name]] = _with_keys(*keys, made[code[name]])
    for name, count in {"REDUCE": 1, "BUILD": 1, "NEWOBJ": 1, "NEWOBJ_EX": 2, "BINPERSID": 1, "OBJ": 0,
                        "INST": 0}.items():  # fmt: skip
        made[code[name]] = _copying(count, made[code[name]])
    for name in ("INT", "LONG"):
        made[code[name]] = _integer_in_text(made[code[name]])
    made[code["LONG1"]], made[code["LONG4"]] = _long_integer(1), _long_integer(4)
    made[code["PUT"]] = _put
    for name in ("BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "EXT1", "EXT2", "EXT4"):
        made[code[name]] = _refused
    return {key: _counted(operation) for key, operation in made.items()}


_Unpickler: Any = pickle._Unpickler  # the one in Python, which has a dispatch table


class BoundedUnpickler(_Unpickler):
    """Subclasses define find_class and persistent_load. PickleLimitError beyond a limit.

    Only is_plain() values of the result may be printed, hashed or compared: nested ones can take forever.
    """

    dispatch = _bounded(_Unpickler.dispatch)
    stack: list[Any]
    memo: dict[int, Any]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]
    append: Callable[[Any], None]

    def __init__(self, file: BinaryIO):
        super().__init__(_Source(file), encoding="utf-8", errors="replace")
        self._left = MAX_OPERATIONS

    def charge(self, operations: int) -> None:
        self._left -= operations
        if self._left < 0:
            raise PickleLimitError(f"its pickle needs more than {MAX_OPERATIONS:,} operations")
