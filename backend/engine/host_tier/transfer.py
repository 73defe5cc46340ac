"""The copies of one plan between a rank's cache and its part of the host tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tridecode.backend.engine.parts.host_copies import HostCopies
from tridecode.kernels.block_copies import UNIT_BYTES
from tridecode.kernels.operands import CacheLayer

#: share of the layers with which each group of layers ends: the computation of a group's layers takes longer
#: than the copies of the next one, and the first one, for which nothing is computed meanwhile, is short
_ENDS = (1 / 32, 3 / 32, 7 / 32, 15 / 32, 1.0)


#: lets the stream of its caller wait for copies
Wait = Callable[[], None]


class Transfer:
    """The copies of a plan. outs: checksums of the blocks that went to the tier, on the host once `ready`.
    ins: those of the blocks that came from it. order: places in part.ins of the first part.layered of them.

    waits: by layer, lets the step wait for the copies of this and the following layers. finish: starts what
    no layer has awaited.
    """

    def __init__(self, part: HostCopies):
        self.part = part
        self.outs: list[Tensor] = []
        self.ins: list[Tensor] = []
        self.order: list[int] = []
        self.waits: dict[int, Wait] = {}
        self.finish: Callable[[], None] = lambda: None
        self.seconds = 0.0
        self.first_bytes = 1  # of the copy between `began` and `moved`
        #: on a GPU: the first copy has begun; the first buffer has come in; all is done
        self.began: torch.cuda.Event | None = None
        self.moved: torch.cuda.Event | None = None
        self.ready: torch.cuda.Event | None = None

    @property
    def is_done(self) -> bool:
        """Return whether HostStore.end returns at once."""
        return self.ready is None or self.ready.query()

    def caches(self, caches: list[CacheLayer]) -> list[CacheLayer]:
        """Return the caches of the step that reads the blocks."""
        return AwaitedCaches(caches, self.waits) if self.waits else caches

    def found(self) -> list[int]:
        """Return the checksum of each block of part.ins, as it came in."""
        values = [value for host in self.ins for value in host.tolist()]
        sums = values.copy()
        for place, value in zip(self.order, values):
            sums[place] = value
        return sums


class StartedInTurn:
    """Copies that are started while the step is launched, so that the step's first kernels do not wait until
    the host has launched all copies.

    starts: each starts copies and returns the wait for them. ahead: the number of starts that come before
    the wait for an earlier one, so that the copy engine always has work.
    """

    def __init__(self, starts: Sequence[Callable[[], Wait]], ahead: int):
        self._pending, self._waits, self._ahead = list(starts), list[Wait](), ahead
        self._start(ahead)

    def wait(self, number: int) -> None:
        """Wait for the copies of a start."""
        self._start(number + 1 + self._ahead)
        self._waits[number]()

    def finish(self) -> None:
        """Start the rest."""
        self._start(len(self._waits) + len(self._pending))

    def _start(self, count: int) -> None:
        while self._pending and len(self._waits) < count:
            self._waits.append(self._pending.pop(0)())


class AwaitedCaches(list[CacheLayer]):
    """The caches of a step. Iterating over them waits for the copies of each layer before yielding it."""

    def __init__(self, caches: Sequence[CacheLayer], waits: Mapping[int, Wait]):
        super().__init__(caches)
        self._waits = waits

    def __iter__(self) -> Iterator[CacheLayer]:
        for number, cache in enumerate(super().__iter__()):
            if number in self._waits:
                self._waits[number]()
            yield cache


class LayerGroup(NamedTuple):
    """Consecutive layers whose parts of a slot are copied together: bytes `first` to `end`."""

    layer: int
    first: int
    end: int


def layer_groups(starts: Sequence[int], end: int, ends: Sequence[float] = _ENDS) -> list[LayerGroup]:
    """Divide the layers into groups. starts: first byte of each layer in a slot. end: of the last one.

    A group begins at a multiple of UNIT_BYTES, so there may be fewer groups than ends.
    """
    wanted = [0, *(max(round(share * len(starts)), number) for number, share in enumerate(ends[:-1], 1))]
    firsts = [layer for layer in dict.fromkeys(wanted) if layer < len(starts)]
    firsts = [layer for layer in firsts if layer == 0 or starts[layer] % UNIT_BYTES == 0]
    places = [starts[layer] for layer in firsts] + [end]
    return [LayerGroup(layer, *places[i : i + 2]) for i, layer in enumerate(firsts)]
