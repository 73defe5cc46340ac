"""Sums over the tensor ranks of one host, through peer memory.

A rank allocates memory (PeerSums), sends its handle to the others and maps theirs (`connect`). Then each
`add_rows` is one launch of all_reduce.cu, on every rank in the same order. scratch.PEER_LIMITS chooses
between one shot and two, and NCCL. After the rows of the sums, the memory holds the exchange for sampling
from a shared vocabulary (Cuda.sample_shared), with two ranks that of chained GEMMs (Ops.linears), then the
rows that copy engines bring (PeerCopies).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tridecode.kernels.checks import ShapeError, match, same_dtype
from tridecode.kernels.gpu import DTYPES, Gpu, pointer
from tridecode.kernels.library import current_stream
from tridecode.kernels.operands import Norm
from tridecode.kernels.scratch import (
    ARRIVAL_BYTES,
    HALVED_TOKENS,
    PeerLimits,
    chain_exchange_bytes,
    copied_bytes,
    halved_rows,
    peer_limits,
    peers_unsupported,
    plan_peers,
)

#: values of the word that follows copied rows: they repeat after this many sums of a half
_WORDS = 1024
#: parts in which the rows of a half are copied, at the same time
_PARTS = 2
HANDLE_BYTES = 64  # bytes of cudaIpcMemHandle_t


class PeerSums:
    """This rank's memory and, once connected, that of the others. Used by the thread of `gpu`.

    max_tokens, columns: size of a step's rows. limit_s: how long a launch waits for the others; after that it
    continues with wrong numbers, later launches do not wait at all, and `lost` is set. sampled_rows: maximum
    rows sampled from a shared vocabulary at a time. limits: when one shot or two shots are used, the same on
    all ranks; default: the table's. Raises KernelError if the memory cannot be allocated or shared.
    """

    def __init__(
        self,
        gpu: Gpu,
        rank: int,
        ranks: int,
        max_tokens: int,
        columns: int,
        dtype: torch.dtype,
        limit_s: float,
        sampled_rows: int = 0,
        limits: PeerLimits | None = None,
    ):
        self.library, self.device, self.limit_s = gpu.library, gpu.device, limit_s
        self._dtype, self.columns = dtype, columns
        self._rank, self._ranks = rank, ranks
        row_bytes = columns * dtype.itemsize
        limits = limits or peer_limits(ranks)
        assert limits is not None, peers_unsupported(ranks, row_bytes)
        self._plan = plan_peers(limits, ranks, max_tokens, row_bytes)
        self.rows = self._plan.rows  # bytes of a launch
        sum_bytes, self.sampled_rows = self.library.peer_bytes(ranks, self._plan.slot_bytes), sampled_rows
        self._chain_at = sum_bytes + self.library.sample_exchange(sampled_rows, ranks)
        self._copies_at = self._chain_at + chain_exchange_bytes(ranks)
        self._halved_rows = halved_rows(ranks, max_tokens)
        self.bytes = self._copies_at + copied_bytes(ranks, max_tokens, row_bytes)
        address, handle = torch.zeros(1, dtype=torch.int64), torch.zeros(HANDLE_BYTES, dtype=torch.uint8)
        self.library.peer_allocate(
            sum_bytes, self.bytes, DTYPES[dtype], address.data_ptr(), handle.data_ptr()
        )
        self.handle = handle.numpy().tobytes()
        self._opened: list[int] = []
        self._lost = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._memory = int(address)
        self._fields: dict[str, float] = {
            "dtype": DTYPES[dtype],
            "rank": rank,
            "ranks": ranks,
            "slot_bytes": self._plan.slot_bytes,
            "memory": self._memory,
            "limit_ns": int(limit_s * 1e9),
            "lost": self._lost.data_ptr(),
        }
        #: sums of halves of a step, once connected, if steps are long enough
        self.copies: PeerCopies | None = None
        #: fields of tridecode_sample_task, once connected
        self.sampling_fields: dict[str, float] = {"exchange_rows": sampled_rows, "exchange_at": sum_bytes}
        #: fields of tridecode_chain_task, once connected; None: GEMMs of one launch cannot sum over the ranks
        self.chain_fields: dict[str, float] | None = None

    def connect(self, handles: Sequence[bytes]) -> None:
        """Map the others' memory. handles: those of all ranks, in rank order. Raises KernelError."""
        for rank, handle in enumerate(handles):
            address = self._memory if rank == self._rank else self._open(handle)
            self._fields[f"memory{rank}"] = address
        addresses = [f"memory{rank}" for rank in range(len(handles))]
        shared = ("rank", "ranks", "memory", "limit_ns", "lost", *addresses)
        self.sampling_fields |= {name: self._fields[name] for name in shared}
        if room := chain_exchange_bytes(self._ranks):
            peer = 1 - self._rank
            self.chain_fields = {name: self._fields[name] for name in ("memory", "limit_ns", "lost")} | {
                "peer": peer,
                "exchange": self._memory + self._chain_at,
                "exchange_bytes": room,
                "peer_exchange": self._fields[f"memory{peer}"] + self._chain_at,
            }
        if self._halved_rows:
            places = [int(self._fields[name]) + self._copies_at for name in addresses]
            mine, peer = places[self._rank], places[1 - self._rank]
            row_bytes = self.columns * self._dtype.itemsize
            self.copies = PeerCopies(self, mine, peer, self._halved_rows * row_bytes)

    def _open(self, handle: bytes) -> int:
        given = torch.frombuffer(bytearray(handle), dtype=torch.uint8)
        address = torch.zeros(1, dtype=torch.int64)
        self.library.peer_open(given.data_ptr(), address.data_ptr())
        self._opened.append(int(address))
        return int(address)

    def takes(self, x: Tensor) -> bool:
        """Return whether rows such as x are summed over peer memory. Two ranks sum any number of rows, in
        several launches; with more ranks, NCCL sums more than self.rows rows.
        """
        same = x.dtype == self._dtype and x.shape[1] == self.columns
        return same and (self._ranks == 2 or x.shape[0] <= self.rows)

    def sent_fields(self, partial: Tensor) -> dict[str, float] | None:
        """kernels.operands.RankWords. The next sum must be of `partial`, with `sent`."""
        if self._ranks != 2 or partial.shape[0] > self.rows or not self.takes(partial):
            return None
        return {
            "memory": self._memory,
            "peer_memory": self._fields[f"memory{1 - self._rank}"],
            "slot_bytes": self._plan.slot_bytes,
        }

    def half_sums(self, x: Tensor) -> PeerCopies | None:
        """Return the sums for halves of x, a step's rows; None: the step is not to be halved."""
        if not HALVED_TOKENS <= x.shape[0] <= 2 * self._halved_rows or not self.takes(x):
            return None
        return None if torch.cuda.is_current_stream_capturing() else self.copies

    def add_rows(
        self,
        partial: Tensor,
        biases: Sequence[Tensor] = (),
        residual: Tensor | None = None,
        norm: Norm | None = None,
        *,
        out: Tensor | None,
        normed: Tensor | None = None,
        follows_product: bool = False,
        sent: bool = False,
    ) -> None:
        """Compute out = residual + biases + the sum of every rank's partial, and normed = norm(out), of the
        rounded out.

        partial, residual, out, normed: (T, C) X, rows contiguous; they may be the same tensor. biases: up to
        two, (C,) X. The sum is in float32, in rank order, so that all ranks get the same bits. residual and
        biases are the same on all ranks. follows_product: the previous operation on the stream is a GEMM
                that wrote only `partial`. sent: by Ops.linear_sending, after the last sum.
        """
        given = [("partial", partial), ("residual", residual), ("out", out), ("normed", normed)]
        fields = self.fields(given, biases, norm)
        stream, early, tokens = current_stream(self.device), int(follows_product), partial.shape[0]
        for first in range(0, tokens, self.rows):
            fields["tokens"] = min(self.rows, tokens - first)
            fields["two_shots"] = int(fields["tokens"] > self._plan.one_shot)
            for name, tensor in given:
                if tensor is not None:
                    offset = first * tensor.stride(0) * tensor.element_size()
                    fields[name], fields[f"{name}_stride"] = tensor.data_ptr() + offset, tensor.stride(0)
            self.library.all_reduce(stream, early=early, sent=int(sent), **fields)
            early = 0  # the previous launch is the next one's predecessor

    def fields(
        self, given: Sequence[tuple[str, Tensor | None]], biases: Sequence[Tensor], norm: Norm | None
    ) -> dict[str, float]:
        """Check the arguments of add_rows. Return the fields of a task, except those of its rows."""
        rows = [("TC", name, tensor) for name, tensor in given if tensor is not None]
        constants = [*biases, *(() if norm is None else (norm.weight, norm.bias))]
        vectors = [("C", "bias or norm", tensor) for tensor in constants if tensor is not None]
        sizes = match("add_rows", *rows, *vectors)
        same_dtype("add_rows", *((name, tensor) for _, name, tensor in (*rows, *vectors)))
        (_, partial), normed = given[0], dict(given)["normed"]
        assert partial is not None
        if not self.takes(partial) or len(biases) > 2 or (norm is None) != (normed is None):
            raise ShapeError(f"add_rows: {tuple(partial.shape)} of {partial.dtype} and {len(biases)} biases")
        fields = {
            **self._fields,
            "bias": pointer(biases[0]) if biases else 0,
            "second_bias": pointer(biases[1]) if len(biases) == 2 else 0,
            "columns": sizes["C"],
        }
        if norm is not None:
            fields["norm_weight"], fields["norm_bias"] = norm.weight.data_ptr(), pointer(norm.bias)
            fields["norm_eps"] = norm.eps
        return fields

    @property
    def lost(self) -> int | None:
        """Return the rank that did not reach a launch in time, among launches that the host has waited
        for.
        """
        return int(self._lost) - 1 if self._lost else None

    def close(self) -> None:
        """Free the memory, once no rank launches any more."""
        torch.cuda.synchronize(self.device)
        for address in self._opened:
            self.library.peer_close(address)
        self.library.peer_free(self._memory)
        self._opened = []


class PeerCopies:
    """Sums of two ranks for a step in two halves: copy engines exchange the rows of one half on a stream of
    their own, together with GEMMs of the other half.

    Each half has two buffers, which alternate. That suffices: a rank sends into a buffer again only after it
    has received the sum in between, which the other rank sends after its own read of that buffer.
    sums: this rank's. mine, peer: address of the words and buffers in this rank's memory and in the other's.
    buffer_bytes: bytes of a buffer.
    """

    def __init__(self, sums: PeerSums, mine: int, peer: int, buffer_bytes: int):
        self._sums, self._library, self._device = sums, sums.library, sums.device
        self._mine, self._peer, self._buffer_bytes = mine, peer, buffer_bytes
        self._words = torch.arange(1, _WORDS + 1, dtype=torch.int32, device=self._device)
        self._streams = [torch.cuda.Stream(self._device) for _ in range(_PARTS)]
        self._ready = torch.cuda.Event()
        #: of each half: the ends of the copies of its parts
        self._copied = [[torch.cuda.Event() for _ in range(_PARTS)] for _ in range(2)]
        #: of each half: sums that were sent
        self.turns = [0, 0]

    def send(self, half: int, partial: Tensor) -> None:
        """Start sending rows (T, C) of half 0 or 1, contiguous. They may change after `add_rows`."""
        if not partial.is_contiguous() or partial.nbytes > self._buffer_bytes:
            raise ShapeError(f"send: {tuple(partial.shape)} of strides {partial.stride()}")
        turn, self.turns[half] = self.turns[half], self.turns[half] + 1
        buffer, word = self._place(half, turn)
        value = self._words.data_ptr() + 4 * (turn % _WORDS)
        bounds = [
            part * partial.shape[0] // _PARTS * partial.stride(0) * partial.element_size()
            for part in range(_PARTS)
        ]
        self._ready.record(torch.cuda.current_stream(self._device))
        for part, (first, last) in enumerate(zip(bounds, [*bounds[1:], partial.nbytes])):
            stream = self._streams[part]
            stream.wait_event(self._ready)
            to, start = self._peer + buffer + first, partial.data_ptr() + first
            self._library.copy_rows(
                to, start, last - first, self._peer + word + 4 * part, value, stream.cuda_stream
            )
            self._copied[half][part].record(stream)

    def add_rows(
        self,
        half: int,
        partial: Tensor,
        biases: Sequence[Tensor],
        residual: Tensor,
        norm: Norm | None,
        *,
        normed: Tensor | None,
    ) -> None:
        """Compute PeerSums.add_rows of the rows that `send` has sent last; out is the residual."""
        given = [("partial", partial), ("residual", residual), ("out", residual), ("normed", normed)]
        turn = self.turns[half] - 1
        buffer, word = self._place(half, turn)
        fields = self._sums.fields(given, biases, norm)
        fields |= {"tokens": partial.shape[0], "copied": self._mine + buffer, "arrived": self._mine + word}
        fields |= {"arrival": turn % _WORDS + 1, "first_part": partial.shape[0] // _PARTS}
        for name, tensor in given:
            if tensor is not None:
                fields[name], fields[f"{name}_stride"] = tensor.data_ptr(), tensor.stride(0)
        # `normed` may be `partial`, which the copy reads
        for copied in self._copied[half]:
            torch.cuda.current_stream(self._device).wait_event(copied)
        self._library.add_copied(current_stream(self._device), fields)

    def _place(self, half: int, turn: int) -> tuple[int, int]:
        """Return the offsets of the buffer and the words of a half's sum."""
        place = 2 * half + turn % 2
        return ARRIVAL_BYTES + place * self._buffer_bytes, 4 * _PARTS * place
