"""Base class of a step's optional features: their bytes in the plan frame and the use of their results. No
torch.

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
    """A step whose results are being committed.

    sampled: the sequence of each sample. taken: indices of the samples that a part has handled; the scheduler
    skips them. news: sequences that may have results without a token's event to carry them.
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
        """Return the part as a value that msgspec can encode."""
        raise NotImplementedError

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> StepPart:
        """Return the part of a frame for this plan, whose own fields are complete.

        Raises TridecodeError, whose text begins with `where`, for a value or a length that does not fit.
        """
        raise NotImplementedError

    def commit(self, step: Commit, found: Any) -> None:
        """Apply the result of the device side, which is not None."""

    def digest(self, tokens: np.ndarray, found: Any) -> np.ndarray:
        """Return int32 values that the ranks compare after a step, given its tokens and this part's
        result.
        """
        return tokens


def ints(values: np.ndarray) -> bytes:
    """Return an int32 array as little-endian bytes."""
    assert values.dtype == np.int32, values.dtype
    return values.astype(_INT, copy=False).tobytes()


def read_ints(data: bytes, count: int, where: str) -> np.ndarray:
    """Return (count,) int32, read-only. Raises TridecodeError if the number of bytes differs."""
    if len(data) != count * _INT.itemsize:
        raise TridecodeError(
            f"{where} has {len(data):,} bytes; {count:,} values of {_INT} need {count * _INT.itemsize:,}"
        )
    return np.frombuffer(data, _INT)


def read(decoder: msgspec.msgpack.Decoder[F], data: msgspec.Raw, where: str) -> F:
    """Return the value that a part has encoded. Raises TridecodeError."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TridecodeError(f"{where} cannot be read: {error}") from None
