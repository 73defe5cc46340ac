"""Copies from the host tier for a waiting sequence. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tridecode.backend.engine.parts.host_copies import HostCopies
from tridecode.backend.engine.schedule.sequence import Sequence


@dataclass(eq=False)
class Fetch:
    """Blocks that are copied into the cache for a waiting sequence.

    parent: identity of the block before the first one. blocks: of the cache, one for each slot. held: blocks
    of the cache before them, which must not be evicted meanwhile. issued, landed: numbers of copies.
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

    @property
    def waits(self) -> bool:
        """Return whether copies are still to be issued."""
        return not self.failed and self.issued < len(self.slots)


class Flight(NamedTuple):
    """A part whose result is not committed. ins: the fetch of each copy into the cache."""

    part: HostCopies
    ins: list[Fetch]
