"""Copies from the host tier for a waiting sequence. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tridecode.backend.engine.parts.host_copies import HostCopies
from tridecode.backend.engine.schedule.sequence import Sequence


@dataclass(eq=False)
class Fetch:
    """Blocks that are copied into the cache for a waiting sequence.

    parent: identity of the block before the first one. blocks: cache blocks, one per slot. held: cache blocks
    before them, which must not be evicted meanwhile. issued, landed: numbers of started and finished copies.
    is_joined: the plan that copies them also computes the sequence, whose slot has these blocks.
    is_wrong: a block of them had a wrong checksum.
    """

    sequence: Sequence
    parent: bytes
    keys: list[bytes]
    slots: list[int]
    blocks: list[int]
    held: list[int]
    issued: int = 0
    landed: int = 0
    intact: int = 0
    failed: bool = False
    is_joined: bool = False
    is_wrong: bool = False

    @property
    def waits(self) -> bool:
        """Return whether some copies have not been issued yet."""
        return not self.failed and self.issued < len(self.slots)


class Arrivals(NamedTuple):
    """Sequences whose step has copied their blocks in. lost: those with a wrong block."""

    whole: list[Sequence]
    lost: list[Sequence]


class Flight(NamedTuple):
    """A part whose result has not been committed. ins: the Fetch of each copy into the cache."""

    part: HostCopies
    ins: list[Fetch]
