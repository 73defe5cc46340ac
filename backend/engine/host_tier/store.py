"""A rank's copies between its cache and its part of the host tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.host_tier.pinning import Pinning
from tridecode.backend.engine.host_tier.region import HostRegion
from tridecode.backend.engine.host_tier.slots import blocks_of_buffer, parts_of_slot, words
from tridecode.backend.engine.host_tier.transfer import (
    LayerGroup,
    StartedInTurn,
    Transfer,
    Wait,
    layer_groups,
)
from tridecode.backend.engine.parts.host_copies import HostCopies
from tridecode.kernels.block_copies import BlockCopies, Checksums, FastBlockCopies
from tridecode.kernels.library import Library
from tridecode.kernels.operands import CacheLayer

#: bytes per pinning call, 1 ms; a copy does not cross pieces
_PIECE_BYTES = 16 << 20
#: bytes of one copy, or a block if it is larger: the small copies of a step share the copy engines, and wait
_COPY_BYTES = 8 << 20


class _Half:
    """A half of the buffer for blocks from the tier. free: recorded after the last reader of its contents."""

    def __init__(self, staged: Tensor):
        self.staged = staged
        self.free: torch.cuda.Event | None = None


class HostStore:
    """Copies blocks of all layers to slots and back, on a GPU with a stream of its own.

    region: laid out already. sizes: bytes of a block in each tensor of the caches. most_blocks: blocks that
    pass the buffer at once. pinning: starts once the engine is ready. library: None: torch copies.
    """

    def __init__(
        self,
        region: HostRegion,
        sizes: Sequence[int],
        device: torch.device,
        library: Library | None = None,
    ):
        self._library = library
        self._starts, slot_bytes = parts_of_slot(sizes)
        assert slot_bytes == region.slot_bytes
        self.region, self._device = region, device
        self.most_blocks = blocks_of_buffer(slot_bytes, region.num_slots, device.type)
        self._copies = BlockCopies([], [], Checksums(slot_bytes, device))
        self.groups: list[LayerGroup] = []  # see `_bring`
        self._slots = torch.zeros(0, slot_bytes, dtype=torch.uint8)
        if region.num_slots:
            count, first = region.num_slots * slot_bytes, region.start
            data = torch.frombuffer(region.data, dtype=torch.uint8, count=count, offset=first)
            self._slots = data.view(region.num_slots, slot_bytes)
        self._piece = max(_PIECE_BYTES // slot_bytes, 1)  # slots
        self._longest = max(_COPY_BYTES // slot_bytes, 1)  # slots of one copy
        pieces = list(self._slots.split(self._piece)) if region.num_slots else []
        self.pinning = Pinning(pieces, device)
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        #: its kernels do not wait for those of a step that fill the device
        self._urgent = torch.cuda.Stream(device, priority=-1) if self._is_cuda else None
        self._moves = torch.cuda.Stream(device) if self._is_cuda else None  # copies into the buffer
        self._written: torch.cuda.Event | None = None  # recorded after the last copy to slots
        shape = (self.most_blocks, slot_bytes)
        self._out, buffer = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
        #: one half is filled while the blocks of the other are written to the cache
        self._halves = [_Half(half) for half in buffer.split(max(self.most_blocks // 2, 1))[:2]]

    def use(self, caches: Sequence[CacheLayer]) -> None:
        """Use the caches of all layers of this rank."""
        tensors = [words(tensor) for layer in caches for tensor in layer.tensors]
        checksums = self._copies.checksums
        self._copies = BlockCopies(tensors, self._starts, checksums)
        if self._library is not None and FastBlockCopies.fits(tensors, self._starts):
            self._copies = FastBlockCopies(self._library, tensors, self._starts, checksums)
        counts = [len(layer.tensors) for layer in caches]
        firsts = [self._starts[sum(counts[:layer])] for layer in range(len(counts))]
        self.groups = layer_groups(firsts, self.region.slot_bytes)

    def begin(self, part: HostCopies) -> Transfer:
        """Start the copies of a plan, behind all steps that have been launched."""
        self.region.clear([*part.drops, *(out.slot for out in part.outs)])
        transfer = Transfer(part)
        steps = None
        if self._is_cuda:
            steps = torch.cuda.current_stream(self._device)
            transfer.began, transfer.moved = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            transfer.ready = torch.cuda.Event()
        if not part.layered:
            self._start_rest(transfer, steps)
            return transfer
        starts = self._brings(transfer, steps)
        starts.append(partial(self._start_rest, transfer, steps))
        copies = StartedInTurn(starts, ahead=1 if self._is_cuda else 0)
        transfer.waits = {group.layer: partial(copies.wait, i) for i, group in enumerate(self.groups)}
        transfer.finish = copies.finish
        return transfer

    def _start_rest(self, transfer: Transfer, steps: torch.cuda.Stream | None) -> Wait:
        """Start the copies that the plan's own step does not read; return a wait for nothing."""
        began = time.perf_counter()
        if self._stream is None or self._urgent is None:
            self._copy(transfer)
            transfer.seconds += time.perf_counter() - began
        else:
            with torch.cuda.stream(self._stream):
                if transfer.part.layered:
                    self._stream.wait_stream(self._urgent)
                self._copy(transfer, steps)
                assert transfer.ready is not None
                transfer.ready.record()
        return lambda: None

    def end(self, transfer: Transfer) -> list[bool]:
        """Wait for the copies and fill the slots. Return for each block that came in whether it is intact."""
        transfer.finish()
        if transfer.ready is not None:
            transfer.ready.synchronize()
            self._time(transfer)
        outs = [value for host in transfer.outs for value in host.tolist()]
        for out, checksum in zip(transfer.part.outs, outs):
            self.region.fill(out.slot, out.key, out.parent, checksum)
        found = transfer.found()
        # not before the end: another rank may have begun this plan before it filled these slots
        wanted = [self.region.checksum(slot) for slot, _ in transfer.part.ins]
        return [value == checksum for value, checksum in zip(found, wanted)]

    def _time(self, transfer: Transfer) -> None:
        """Set the seconds of the copies into the cache, from the first one, which waits for no step, and its
        share in the bytes.
        """
        assert transfer.began is not None and transfer.moved is not None
        if count := len(transfer.part.ins):
            first_s = transfer.began.elapsed_time(transfer.moved) / 1000
            transfer.seconds = first_s * count * self.region.slot_bytes / transfer.first_bytes

    def leave(self) -> None:
        """Unpin the memory, because the tier is off on all ranks. Copies that are already planned still run,
        from pageable memory.
        """
        self.synchronize()
        self.pinning.undo()

    def synchronize(self) -> None:
        """Wait for all copies, also of plans whose results nobody takes."""
        for stream in (self._moves, self._urgent, self._stream):
            if stream is not None:
                stream.synchronize()

    # ------------------------------------------------------------ one direction

    def _copy(self, transfer: Transfer, steps: torch.cuda.Stream | None = None) -> None:
        """Copy what a plan says, a full buffer at a time. steps: the stream of steps, which the first access
        to the cache follows.
        """
        part, size = transfer.part, len(self._halves[0].staged)
        for number, first in enumerate(range(part.layered, len(part.ins), size)):
            slots, blocks = zip(*part.ins[first : first + size])
            half = self._halves[number % len(self._halves)]
            staged = half.staged[: len(slots)]
            if self._moves is None:
                self._move(slots, staged)
                index = self._index(blocks)
            else:
                index = self._index_beside(blocks)
                self._move_beside(slots, staged, half, transfer if first == 0 else None)
            self._follow(steps)
            sums = torch.zeros_like(index)
            self._copies.place(staged, 0, index, sums)
            transfer.ins.append(self._to_host(sums))
            self._free(half)
        size = self.most_blocks
        for first in range(0, len(part.outs), size):
            outs = part.outs[first : first + size]
            staged = self._out[: len(outs)]
            self._follow(steps)
            self._gather([out.block for out in outs], staged)
            transfer.outs.append(self._to_host(self._copies.checksums.of(staged)))
            for place, slot, count in self._runs([out.slot for out in outs]):
                self._slots[slot : slot + count].copy_(staged[place : place + count], non_blocking=True)
        if part.outs and self._is_cuda:
            self._written = torch.cuda.Event()
            self._written.record()

    def _brings(self, transfer: Transfer, steps: torch.cuda.Stream | None) -> list[Callable[[], Wait]]:
        """Return a function for each group of layers, to be called in turn: it starts the copies of these
        layers of the blocks that the plan's prompts read.
        """
        part = transfer.part
        transfer.order = sorted(range(part.layered), key=lambda place: part.ins[place])
        slots, blocks = zip(*(part.ins[place] for place in transfer.order))
        with torch.cuda.stream(self._urgent):  # no effect on a CPU
            index = self._index(blocks)
            sums = torch.zeros_like(index)
            if steps is not None and self._urgent is not None:
                self._urgent.wait_stream(steps)
        halves = cycle(self._halves)

        def bring(group: LayerGroup) -> Wait:
            began = time.perf_counter()
            with torch.cuda.stream(self._urgent):
                self._bring(transfer, group, slots, index, sums, halves)
                if group is self.groups[-1]:
                    transfer.ins.append(self._to_host(sums))
                if not self._is_cuda:
                    transfer.seconds += time.perf_counter() - began
                    return lambda: None
                event = torch.cuda.Event()
                event.record()
            return lambda: torch.cuda.current_stream(self._device).wait_event(event)

        return [partial(bring, group) for group in self.groups]

    def _bring(
        self,
        transfer: Transfer,
        group: LayerGroup,
        slots: Sequence[int],
        index: Tensor,
        sums: Tensor,
        halves: Iterator[_Half],
    ) -> None:
        """Copy a group of layers of blocks into the cache, a half of the buffer at a time."""
        size = group.end - group.first
        rows = max(self._halves[0].staged.nbytes // size, 1)
        for first in range(0, len(slots), rows):
            some, half = slice(first, first + rows), next(halves)
            count = len(slots[some])
            staged = half.staged.view(-1)[: count * size].view(count, size)
            if self._moves is None:
                self._move(slots[some], staged, group.first)
            else:
                timed = transfer if first == group.layer == 0 else None
                self._move_beside(slots[some], staged, half, timed, group.first)
            self._copies.place(staged, group.first, index[some], sums[some])
            self._free(half)

    def _free(self, half: _Half) -> None:
        """Record that the current stream's work is the last that needs the contents of a half."""
        if self._is_cuda:
            half.free = torch.cuda.Event()
            half.free.record()

    def _move(self, slots: Sequence[int], staged: Tensor, first: int = 0) -> None:
        """Copy bytes `first` and following of slots to rows of the buffer."""
        if staged.shape[1] == self._slots.shape[1]:
            for place, slot, count in self._runs(slots):
                staged[place : place + count].copy_(self._slots[slot : slot + count], non_blocking=True)
        else:
            self._copies.move(self._slots, [*self._runs(slots, self._piece)], first, staged)

    def _index_beside(self, blocks: Sequence[int]) -> Tensor:
        """Return `_index` for the current stream. The other stream copies it before the blocks, so that it
        does not wait for them.
        """
        assert self._moves is not None
        with torch.cuda.stream(self._moves):
            index = self._index(blocks)
        index.record_stream(torch.cuda.current_stream(self._device))
        return index

    def _move_beside(
        self, slots: Sequence[int], staged: Tensor, half: _Half, timed: Transfer | None, first: int = 0
    ) -> None:
        """Copy slots into a half of the buffer on the copy stream, and let the current stream wait for it.

        The slots may have been filled by a plan whose copies still run on this rank. timed: receives the
        times.
        """
        assert self._moves is not None
        for event in (half.free, self._written):
            if event is not None:
                self._moves.wait_event(event)
        with torch.cuda.stream(self._moves):
            if timed is not None and timed.began is not None:
                timed.began.record()
            self._move(slots, staged, first)
            if timed is not None and timed.moved is not None:
                timed.moved.record()
                timed.first_bytes = staged.nbytes
        torch.cuda.current_stream(self._device).wait_stream(self._moves)

    def _follow(self, steps: torch.cuda.Stream | None) -> None:
        """Let the stream of copies wait for the steps that have been launched."""
        if steps is not None and self._stream is not None:
            self._stream.wait_stream(steps)

    def _runs(self, slots: Sequence[int], most: int = 0) -> Iterator[tuple[int, int, int]]:
        """Yield (place, first slot, count) of consecutive slots within one pinned piece.

        most: slots of a run; 0: as many as fill a copy.
        """
        place, most = 0, most or self._longest
        while place < len(slots):
            count, first = 1, slots[place]
            while (
                count < most
                and place + count < len(slots)
                and slots[place + count] == first + count
                and (first + count) % self._piece
            ):
                count += 1
            yield place, first, count
            place += count

    def _gather(self, blocks: Sequence[int], staged: Tensor) -> None:
        index = self._index(blocks)
        for tensor, columns in self._copies.columns(staged):
            torch.index_select(tensor, 0, index, out=columns)

    def _index(self, blocks: Sequence[int]) -> Tensor:
        index = torch.from_numpy(np.asarray(blocks, np.int64))
        return index.pin_memory().to(self._device, non_blocking=True) if self._is_cuda else index

    def _to_host(self, values: Tensor) -> Tensor:
        """Return a copy on the host, complete once the stream is there."""
        if not self._is_cuda:
            return values
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
