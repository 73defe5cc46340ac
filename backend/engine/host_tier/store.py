"""A rank's copies between its cache and its part of the host tier."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.host_tier.checksum import Checksums
from tridecode.backend.engine.host_tier.pinning import Pinning
from tridecode.backend.engine.host_tier.region import HostRegion
from tridecode.backend.engine.parts.host_copies import HostCopies
from tridecode.kernels.operands import CacheLayer

#: bytes of the buffer on the device through which blocks pass, in each direction, by type of device; on a GPU
#: 2.5 ms of a PCIe 5 link
_BUFFER_BYTES = {"cuda": 128 << 20, "cpu": 8 << 20}
#: bytes per pinning call, 1 ms; a copy does not cross pieces
_PIECE_BYTES = 16 << 20
#: bytes of one copy, or a block if it is larger: the small copies of a step share the copy engines, and wait
_COPY_BYTES = 8 << 20
_WORD_BYTES = 8
#: slots are aligned to pages, so that pieces can be pinned; a multiple of UNIT_BYTES
_PAGE_BYTES = 4096


class Transfer:
    """The copies of one plan. outs: checksums of the blocks that went to the tier, on the host once `ready`.
    ins: those of the blocks that came from it.
    """

    def __init__(self, part: HostCopies):
        self.part = part
        self.outs: list[Tensor] = []
        self.ins: list[Tensor] = []
        self.seconds = 0.0
        #: on a GPU: the first copy has begun; the first buffer has come in; all is done
        self.began: torch.cuda.Event | None = None
        self.moved: torch.cuda.Event | None = None
        self.ready: torch.cuda.Event | None = None

    @property
    def is_done(self) -> bool:
        """Return whether HostStore.end returns at once."""
        return self.ready is None or self.ready.query()


class _Half:
    """A half of the buffer for blocks from the tier. free: recorded after the last reader of its contents."""

    def __init__(self, staged: Tensor):
        self.staged = staged
        self.free: torch.cuda.Event | None = None


class HostStore:
    """Copies blocks of all layers to slots and back, on a GPU with a stream of its own.

    region: laid out already. sizes: bytes of a block in each tensor of the caches. most_blocks: blocks that
    pass the buffer at once. pinning: starts once the engine is ready.
    """

    def __init__(self, region: HostRegion, sizes: Sequence[int], device: torch.device):
        self._starts, slot_bytes = parts_of_slot(sizes)
        assert slot_bytes == region.slot_bytes
        self.region, self._device = region, device
        self.most_blocks = blocks_of_buffer(slot_bytes, region.num_slots, device.type)
        self._layers: list[Tensor] = []
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
        self._moves = torch.cuda.Stream(device) if self._is_cuda else None  # copies into the buffer
        self._written: torch.cuda.Event | None = None  # recorded after the last copy to slots
        self._checksums = Checksums(slot_bytes, device)
        shape = (self.most_blocks, slot_bytes)
        self._out, buffer = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
        #: one half is filled while the blocks of the other are written to the cache
        self._halves = [_Half(half) for half in buffer.split(max(self.most_blocks // 2, 1))[:2]]

    def use(self, caches: Sequence[CacheLayer]) -> None:
        """Use the caches of all layers of this rank."""
        self._layers = [_words(tensor) for layer in caches for tensor in layer.tensors]

    def begin(self, part: HostCopies) -> Transfer:
        """Start the copies of a plan, behind all steps that have been launched."""
        self.region.clear([*part.drops, *(out.slot for out in part.outs)])
        transfer = Transfer(part)
        if self._stream is None:
            began = time.perf_counter()
            self._copy(transfer)
            transfer.seconds = time.perf_counter() - began
            return transfer
        steps = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            transfer.began, transfer.moved = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            transfer.ready = torch.cuda.Event()
            self._copy(transfer, steps)
            transfer.ready.record()
        return transfer

    def end(self, transfer: Transfer) -> list[bool]:
        """Wait for the copies and fill the slots. Return for each block that came in whether it is intact."""
        if transfer.ready is not None:
            transfer.ready.synchronize()
            self._time(transfer)
        outs = [value for host in transfer.outs for value in host.tolist()]
        for out, checksum in zip(transfer.part.outs, outs):
            self.region.fill(out.slot, out.key, out.parent, checksum)
        found = [value for host in transfer.ins for value in host.tolist()]
        # not before the end: another rank may have begun this plan before it filled these slots
        wanted = [self.region.checksum(slot) for slot, _ in transfer.part.ins]
        return [value == checksum for value, checksum in zip(found, wanted)]

    def _time(self, transfer: Transfer) -> None:
        """Set the seconds of the copies into the cache: the time for the first half of the buffer, without
        waiting for steps, times the number of halves.
        """
        assert transfer.began is not None and transfer.moved is not None
        if count := len(transfer.part.ins):
            first_s = transfer.began.elapsed_time(transfer.moved) / 1000
            transfer.seconds = first_s * count / min(count, len(self._halves[0].staged))

    def leave(self) -> None:
        """Unpin the memory, because the tier is off on all ranks. Copies that are already planned still run,
        from pageable memory.
        """
        self.synchronize()
        self.pinning.undo()

    def synchronize(self) -> None:
        """Wait for all copies, also of plans whose results nobody takes."""
        if self._stream is not None:
            self._stream.synchronize()  # it waits for the other stream, too

    # ------------------------------------------------------------ one direction

    def _copy(self, transfer: Transfer, steps: torch.cuda.Stream | None = None) -> None:
        """Copy what a plan says, a full buffer at a time. steps: the stream of steps, which the first access
        to the cache follows.
        """
        part, size = transfer.part, len(self._halves[0].staged)
        for number, first in enumerate(range(0, len(part.ins), size)):
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
            self._scatter(staged, index)
            transfer.ins.append(self._to_host(self._checksums.of(staged)))
            if self._is_cuda:
                half.free = torch.cuda.Event()
                half.free.record()
        size = self.most_blocks
        for first in range(0, len(part.outs), size):
            outs = part.outs[first : first + size]
            staged = self._out[: len(outs)]
            self._follow(steps)
            self._gather([out.block for out in outs], staged)
            transfer.outs.append(self._to_host(self._checksums.of(staged)))
            for place, slot, count in self._runs([out.slot for out in outs]):
                self._slots[slot : slot + count].copy_(staged[place : place + count], non_blocking=True)
        if part.outs and self._is_cuda:
            self._written = torch.cuda.Event()
            self._written.record()

    def _move(self, slots: Sequence[int], staged: Tensor) -> None:
        for place, slot, count in self._runs(slots):
            staged[place : place + count].copy_(self._slots[slot : slot + count], non_blocking=True)

    def _index_beside(self, blocks: Sequence[int]) -> Tensor:
        """Return `_index` for the current stream. The other stream copies it before the blocks, so that it
        does not wait for them.
        """
        assert self._moves is not None
        with torch.cuda.stream(self._moves):
            index = self._index(blocks)
        index.record_stream(torch.cuda.current_stream(self._device))
        return index

    def _move_beside(self, slots: Sequence[int], staged: Tensor, half: _Half, timed: Transfer | None) -> None:
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
            self._move(slots, staged)
            if timed is not None and timed.moved is not None:
                timed.moved.record()
        torch.cuda.current_stream(self._device).wait_stream(self._moves)

    def _follow(self, steps: torch.cuda.Stream | None) -> None:
        """Let the stream of copies wait for the steps that have been launched."""
        if steps is not None and self._stream is not None:
            self._stream.wait_stream(steps)

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (place, first slot, count) of consecutive slots within one pinned piece."""
        place = 0
        while place < len(slots):
            count, first = 1, slots[place]
            while (
                count < self._longest
                and place + count < len(slots)
                and slots[place + count] == first + count
                and (first + count) % self._piece
            ):
                count += 1
            yield place, first, count
            place += count

    def _gather(self, blocks: Sequence[int], staged: Tensor) -> None:
        index = self._index(blocks)
        for layer, columns in self._columns(staged):
            torch.index_select(layer, 0, index, out=columns)

    def _scatter(self, staged: Tensor, index: Tensor) -> None:
        for layer, columns in self._columns(staged):
            layer.index_copy_(0, index, columns)

    def _columns(self, staged: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of the caches, (N, n) words, and its part of the buffer, (blocks, n)."""
        for layer, first in zip(self._layers, self._starts):
            yield layer, staged[:, first : first + layer.shape[1] * layer.itemsize].view(layer.dtype)

    def _index(self, blocks: Sequence[int]) -> Tensor:
        index = torch.from_numpy(np.asarray(blocks, np.int64))
        return index.pin_memory().to(self._device, non_blocking=True) if self._is_cuda else index

    def _to_host(self, values: Tensor) -> Tensor:
        """Return a copy on the host, complete once the stream is there."""
        if not self._is_cuda:
            return values
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def blocks_of_buffer(slot_bytes: int, num_slots: int, device_type: str) -> int:
    """Return the number of blocks that pass a buffer at once. A rank has two buffers."""
    return max(min(_BUFFER_BYTES[device_type] // slot_bytes, num_slots), 1)


def parts_of_slot(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each tensor's part of a slot begins, and the size of a slot, in bytes.

    sizes: bytes of a block in each tensor.
    """
    ends = np.cumsum([-(-size // _WORD_BYTES) * _WORD_BYTES for size in sizes]).tolist()
    return [0, *ends[:-1]], -(-ends[-1] // _PAGE_BYTES) * _PAGE_BYTES


def _words(tensor: Tensor) -> Tensor:
    """Return (N, n) of a tensor whose first axis is the blocks, in the widest words that divide a block."""
    rows = tensor.flatten(1)
    size = rows.shape[1] * rows.itemsize
    for word in (torch.int64, torch.int32, torch.int16):
        if size % word.itemsize == 0:
            return rows.view(word)
    return rows.view(torch.int8)
