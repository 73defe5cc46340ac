"""Connects the tensor ranks of a stage through peer memory, or logs why NCCL is used instead.

Kernels sum over peer memory, and sample from a vocabulary that the ranks share.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.weights.layout import VocabShare
from tridecode.kernels.ops import Ops
from tridecode.kernels.sampling_state import SamplingState
from tridecode.kernels.scratch import peers_unsupported

if TYPE_CHECKING:
    from tridecode.backend.engine.ranks.parallel import ProcessRanks
    from tridecode.kernels.peer_sums import PeerSums

log = logging.getLogger("tridecode.engine")

#: share of step_timeout_s after which a sum names the missing rank, before the supervisor ends the step
#: without a cause
_PATIENCE = 1 / 3
_PROBE_ROWS = 3
#: bytes of each rank's message: host, handle, reason for failure
_HOST, _HANDLE, _REASON = 64, 64, 200
_WITHOUT = "tensor ranks sum through NCCL, and each has the whole vocabulary: %s"


def join_peers(
    ranks: ProcessRanks, ops: Ops, config: EngineConfig, columns: int, dtype: torch.dtype
) -> PeerSums | None:
    """Connect the sums over tensor ranks through peer memory and test them; None, with a log line: use NCCL.

    columns: width of the rows. Collective: either all ranks get sums or none. Call it before the weights are
    loaded: without sums each rank holds the whole vocabulary.
    """
    if not config.enable_custom_all_reduce:
        log.info(_WITHOUT, "enable_custom_all_reduce is false")
        return None
    sums, reason = _allocate(ranks, ops, config, columns, dtype)
    told = _tell(ranks, reason, b"" if sums is None else sums.handle)
    if not told.reason and sums is not None:
        try:
            sums.connect(told.handles)
        except RuntimeError as error:
            reason = f"{error}"
        told = _tell(ranks, reason)
    if not told.reason and sums is not None:
        told = _tell(ranks, _probe(sums, ranks, dtype))
    if sums is None or told.reason:
        log.warning(_WITHOUT, told.reason)
        if sums is not None:
            sums.close()
        return None
    if not _alike(ranks, ops):
        sums.chain_fields = None  # because each rank chooses its kernels by its own GPU
    size = f"{sums.bytes / 2**20:.0f} MiB a rank, {sums.rows} rows a launch"
    log.info("tensor ranks sum and share the vocabulary through the memory of their peers: %s", size)
    return sums


def _allocate(
    ranks: ProcessRanks, ops: Ops, config: EngineConfig, columns: int, dtype: torch.dtype
) -> tuple[PeerSums | None, str]:
    """Return this rank's memory, or why it has none."""
    from tridecode.kernels.cuda import Cuda  # imports the binding of the built library
    from tridecode.kernels.library import KernelError
    from tridecode.kernels.peer_sums import PeerSums

    if not isinstance(ops, Cuda):
        return None, f"{type(ops).__name__} runs without kernels of ours"
    reason = peers_unsupported(ranks.tensor_size, columns * dtype.itemsize)
    reason = reason or _may_wait_in_vain(ops.gpu.gemm_device.shared)
    if reason:
        return None, reason
    assert config.max_step_tokens is not None
    limit_s = config.step_timeout_s * _PATIENCE
    place = ranks.tensor_rank, ranks.tensor_size
    try:
        return PeerSums(ops.gpu, *place, config.max_step_tokens, columns, dtype, limit_s, config.slots), ""
    except KernelError as error:
        return None, str(error)


def _alike(ranks: ProcessRanks, ops: Ops) -> bool:
    """Return whether chained GEMMs are chosen alike on all ranks' GPUs. Collective."""
    from tridecode.kernels.cuda import Cuda

    assert isinstance(ops, Cuda)
    device = ops.gpu.gemm_device
    facts = f"{device.capability} {device.multiprocessors} {device.shared_bytes}".encode()
    return len(set(ranks.exchange_bytes(_padded(facts, _REASON)))) == 1


def _may_wait_in_vain(shared: bool) -> str:
    """Return why a kernel that waits for another rank's might wait until its limit; "": it does not.

    shared: the GPU is shared through MPS (runtime.cu). Another process's kernel then runs next to ours and
    may occupy the multiprocessors that a rank needs before it can send its rows. Time slicing is harmless: a
    process that shares a GPU without MPS has all of it for its slice, so the rows arrive some slices later,
    and a wait beyond the limit ends and names the rank.
    """
    why = "its GPU is shared through MPS, where kernels of other processes may block the ranks' kernels"
    return why if shared else ""


class _Told:
    """Result of the exchange between the ranks. reason: why one of them cannot use peer memory; "" if all
    can. handles: of the tensor group.
    """

    def __init__(self, reason: str, handles: list[bytes]):
        self.reason, self.handles = reason, handles


def _tell(ranks: ProcessRanks, reason: str, handle: bytes = b"") -> _Told:
    """Send this rank's handle, and why it cannot use peer memory ("": it can), to all ranks."""
    texts = [(_host(), _HOST), (handle, _HANDLE), (reason.encode(), _REASON)]
    mine = b"".join(_padded(text, size) for text, size in texts)
    rows = ranks.exchange_bytes(mine)
    first = ranks.stage * ranks.tensor_size
    group = rows[first : first + ranks.tensor_size]
    for rank, row in enumerate(rows):
        text = row[_HOST + _HANDLE :].rstrip(b"\0").decode(errors="replace")
        if text:
            return _Told(f"rank {rank}: {text}", [])
    for stage in range(ranks.num_stages):
        hosts = {row[:_HOST] for row in rows[stage * ranks.tensor_size : (stage + 1) * ranks.tensor_size]}
        if len(hosts) > 1:
            return _Told(f"the tensor ranks of stage {stage} are on several hosts", [])
    return _Told("", [row[_HOST : _HOST + _HANDLE] for row in group])


class PeerSampler:
    """Samples from this rank's columns together with its peers, by Cuda.sample_shared."""

    def __init__(self, ops: Ops, peers: PeerSums, vocab: VocabShare):
        from tridecode.kernels.cuda import Cuda
        from tridecode.kernels.cuda_sampling import SharedIds

        assert isinstance(ops, Cuda)  # join_peers returns sums for no other operations
        self._ops, self._peers = ops, peers
        self._ids = SharedIds(vocab.first, vocab.count, vocab.vocab_size)

    def sample(
        self, logits: Tensor, slots: Tensor, state: SamplingState, *, tokens: Tensor, log_probs: Tensor
    ) -> None:
        """Ops.sample over logits (R, size) of this rank's ids. Collective, also in a graph."""
        self._ops.sample_shared(
            logits, slots, state, self._ids, self._peers, tokens=tokens, log_probs=log_probs
        )


def _padded(text: bytes, size: int) -> bytes:
    """Return the first `size` bytes of a text, followed by zeros: ranks exchange messages of one length."""
    return text[:size].ljust(size, b"\0")


def _host() -> bytes:
    """Return an id of this machine since its boot; containers on one machine have the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b"unknown"


@torch.inference_mode()
def _probe(sums: PeerSums, ranks: ProcessRanks, dtype: torch.dtype) -> str:
    """Sum known rows through both buffers of each pair; return the fault, "" if the sums are right."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        parts = torch.randint(-64, 65, (ranks.tensor_size, _PROBE_ROWS, sums.columns), generator=generator)
        out = torch.full(parts.shape[1:], torch.nan, dtype=dtype, device=device)
        sums.add_rows(parts[ranks.tensor_rank].to(device, dtype), out=out)
        if not torch.equal(out.cpu(), parts.sum(0).to(dtype)):
            lost = "" if sums.lost is None else f" (nothing came from tensor rank {sums.lost})"
            return f"rows in peer memory are wrong{lost}"
    return ""
