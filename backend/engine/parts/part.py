"""One optional feature in one step: its bytes in the plan frame, and how its results are filed. No torch.

The device side of a part is in device/parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError

if TYPE_CHECKING:
    from tridecode.backend.engine.schedule.scheduler import Scheduler
    from tridecode.backend.engine.schedule.sequence import Sequence
    from tridecode.backend.engine.step.plan import StepPlan

_INT = np.dtype("<i4")
F = TypeVar("F")


@dataclass
class Commit:
    """A step whose results are being filed.

    sampled: the sequence of each sample. taken: indices of the samples that a part has dealt with, for which
    the scheduler does nothing more. news: sequences that may have results which no token's event carries.
    """

    scheduler: Scheduler
    plan: StepPlan
    sampled: list[Sequence]
    taken: list[int] = field(default_factory=list)
    news: list[Sequence] = field(default_factory=list)


class StepPart:
    """Base of the parts. A plan has at most one part of each class."""

    #: names the part in a plan frame
    tag: ClassVar[str]

    @property
    def captures(self) -> bool:
        """Return whether the step may run as a CUDA graph."""
        return False

    def encode(self) -> Any:
        """The part as a value that msgspec encodes."""
        raise NotImplementedError

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> StepPart:
        """The part of a frame, within the plan, whose own fields are complete. Raises TridecodeError, whose
        text begins with `where`, for a value or a length that does not fit."""
        raise NotImplementedError

    def commit(self, step: Commit, found: Any) -> None:
        """File the result of the device side, which is not None."""

    def digest(self, tokens: np.ndarray, found: Any) -> np.ndarray:
        """int32: what the ranks compare of a step, given its tokens and the result of this part."""
        return tokens


def ints(values: np.ndarray) -> bytes:
    """An array of int32 as little-endian bytes."""
    assert values.dtype == np.int32, values.dtype
    return values.astype(_INT, copy=False).tobytes()


def read_ints(data: bytes, count: int, where: str) -> np.ndarray:
    """(count,) int32, read-only. Raises TridecodeError if the bytes are more or fewer."""
    if len(data) != count * _INT.itemsize:
        raise TridecodeError(
            f"{where} has {len(data):,} bytes; {count:,} values of {_INT} need {count * _INT.itemsize:,}"
        )
    return np.frombuffer(data, _INT)


def read(decoder: msgspec.msgpack.Decoder[F], data: msgspec.Raw, where: str) -> F:
    """The value that a part has encoded. Raises TridecodeError."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TridecodeError(f"{where} cannot be read: {error}") from None
