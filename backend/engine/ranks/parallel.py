"""This process's place among the ranks, and their communication: plans, activations and partial sums.

Rank r has tensor rank r % tensor_size and stage r // tensor_size (FasterTransformer's order). Rank 0 plans
and every rank runs the same plan; the first tensor rank of the last stage has the sampled tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from tridecode.backend.engine.ranks.agreement import Meeting, OnWait, PeerLost, PlanOrder, seal, unseal
from tridecode.backend.engine.ranks.exchange import exchange
from tridecode.backend.engine.ranks.transport import Direct, Staged, Transport, gpu_name, shares_a_gpu
from tridecode.backend.engine.step import plan_frame, plan_wire
from tridecode.backend.engine.step.plan import PlanMessage
from tridecode.backend.engine.step.results import Outbox
from tridecode.backend.models.context import HalfSums, RowSums

if TYPE_CHECKING:  # not at run time: it loads the binding of the built library
    from tridecode.kernels.peer_sums import PeerSums

log = logging.getLogger("tridecode.engine")

#: Types of devices on which pipeline stages have several plans in flight. CPU ranks of one machine share its
#: cores, and a step of fewer rows costs nearly as much as one of all rows (docs/lab/pipeline.md has figures).
PIPELINE_DEVICES = frozenset({"cuda"})


class Posted(Protocol):
    """A transfer in flight."""

    def wait(self) -> object: ...


#: gloo's own time limit for an exchange within a step. The supervisor ends a step that hangs much earlier
#: (step_timeout_s), and a pause of the whole machine must not break a step that waits.
_STEP_LIMIT = timedelta(minutes=30)
#: an idle engine's ranks wait indefinitely for a plan; they end with their supervisor (rank_link)
_FOREVER = timedelta(days=365)


#: value of `waits` while a rank waits for its own GPU, which may in turn wait for another rank
GPU = "the synchronisation with its GPU"


@dataclass(frozen=True)
class Joining:
    """Settings for joining the ranks. facts: values that must be equal on all ranks. limit_s: longest wait
    for other ranks while the engine starts. on_wait: called with the operation in which this rank waits, and
    the ranks for which it waits.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 900.0
    on_wait: OnWait | None = None


def open_store(meeting: str, rank: int, world: int, limit_s: float) -> Any:
    """Return the store of torch.distributed at a URL, file://PATH or tcp://HOST:PORT; rank 0 serves the
    latter.
    """
    place = urlsplit(meeting)
    if place.scheme == "file":
        return dist.FileStore(place.path, world)
    if place.scheme != "tcp" or place.port is None:
        raise ValueError(f"{meeting}; wanted file://PATH or tcp://HOST:PORT")
    limit = timedelta(seconds=limit_s)
    return dist.TCPStore(place.hostname or "", place.port, world, rank == 0, limit, wait_for_workers=False)


class SingleRank:
    """The whole model in one process: nothing to exchange."""

    rank = 0
    tensor_rank, tensor_size, stage, num_stages = 0, 1, 0, 1
    is_pipelined = False
    waits = ""

    def all_reduce(self, x: Tensor) -> None: ...

    def row_sums(self, x: Tensor) -> RowSums | None:
        return None

    def half_sums(self, x: Tensor) -> HalfSums | None:
        return None

    def captures(self, x: Tensor) -> bool:
        return True

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def receive(self, x: Tensor) -> None: ...

    def send(self, x: Tensor) -> None: ...

    def share(self, x: Tensor) -> None: ...

    def to_first(self, x: Tensor | None, host: Tensor | None) -> None: ...

    def take_posted(self) -> list[Posted]:
        return []

    def smallest(self, value: int) -> int:
        return value

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def all_true(self, values: list[bool]) -> list[bool]:
        return values

    def barrier(self, what: str) -> None: ...

    def raise_if_lost(self) -> None: ...

    def broadcast_plan(self, plan: PlanMessage | None) -> PlanMessage | None:
        return plan

    def close(self) -> None: ...


class ProcessRanks:
    """One process per rank, joined by torch.distributed: gloo for plans, gloo (CPU) or NCCL (CUDA) for
    tensors.

    meeting: a URL (open_store), the same on all ranks, or {"store": an open store}. Collective: returns when
    all ranks have joined. Raises AgreementError if they differ in joining.facts, PeerLost if one does not
    join. waits: the exchange in which this rank waits, or GPU; "" for none. pipeline_devices: types of
    devices with several plans in flight; there only rank 0 needs a step's results, because a plan has the ids
    of all its tokens. transport: carries the tensors.
    """

    def __init__(
        self,
        rank: int,
        tensor_size: int,
        num_stages: int,
        meeting: str | Mapping[str, Any],
        device: torch.device,
        joining: Joining = Joining(),
        pipeline_devices: Collection[str] = PIPELINE_DEVICES,
    ):
        self.waits = ""
        self.rank, world = rank, tensor_size * num_stages
        self.tensor_rank, self.tensor_size = rank % tensor_size, tensor_size
        self.stage, self.num_stages = rank // tensor_size, num_stages
        self.is_pipelined = num_stages > 1 and device.type in pipeline_devices
        self._posted: list[Posted] = []
        self._outbox: Outbox | None = None
        self._source = (num_stages - 1) * tensor_size  # rank that has the results
        self._order = PlanOrder(rank)
        self.peers: PeerSums | None = None  # set by loading.map_peers
        place = {"init_method": meeting} if isinstance(meeting, str) else meeting
        store: Any = place.get("store") or open_store(place["init_method"], rank, world, joining.limit_s)
        self._meeting = Meeting(
            dist.PrefixStore("facts", store), rank, world, joining.limit_s, joining.on_wait
        )
        self._meeting.agree(joining.facts)
        self._connect(dist.PrefixStore("groups", store), world, device)
        self.barrier("joining")

    @exchange("joining")
    def _connect(self, store: Any, world: int, device: torch.device) -> None:
        """Create the process groups. Collective."""
        tensor_size, num_stages = self.tensor_size, self.num_stages
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=world, timeout=_FOREVER)
        staged = shares_a_gpu(device, self._meeting.gather("joining", gpu_name(device)))
        if staged:
            log.warning("ranks share a GPU: their tensors go through host memory, slow, for trials")
        backend = "nccl" if device.type == "cuda" and not staged else "gloo"
        limit = _STEP_LIMIT if backend == "gloo" else None  # NCCL's own
        groups = [
            dist.new_group([stage * tensor_size + i for i in range(tensor_size)], limit, backend)
            for stage in range(num_stages)
        ]
        direct = Direct(groups[self.stage], dist.new_group(list(range(world)), limit, backend))
        self.transport: Transport = Staged(direct) if staged else direct
        if num_stages > 1:
            self._results = dist.new_group([0, self._source], _STEP_LIMIT, "gloo")
        #: answers of all ranks, exchanged in the threads that run the steps; no other thread may use it
        self._answers = dist.new_group(list(range(world)), _STEP_LIMIT, "gloo")
        if num_stages > 1 and self.rank == self._source:
            self._outbox = Outbox(self._send_result)

    def barrier(self, what: str) -> None:
        """Return once all ranks have reached this call, while the engine starts.

        Raises PeerLost if one does not.
        """
        self._meeting.barrier(what)

    @exchange("the sum over the tensor ranks")
    def all_reduce(self, x: Tensor) -> None:
        """Sum x over the tensor group, in place; every rank gets the same bits."""
        self.transport.all_reduce(x)

    def row_sums(self, x: Tensor) -> RowSums | None:
        """Return the fused all-reduce for rows like x, if the tensor ranks have mapped each other's
        memory."""
        return self.peers if self.peers is not None and self.peers.takes(x) else None

    def half_sums(self, x: Tensor) -> HalfSums | None:
        """Return the sums for a step in two halves, if rows like x are to be halved; the same on all
        ranks."""
        return None if self.peers is None else self.peers.half_sums(x)

    @exchange("the gathering from the tensor ranks")
    def gather(self, x: Tensor) -> Tensor:
        """Return (tensor_size, *x.shape): x of every tensor rank, in rank order; x has the same shape on all
        of them.
        """
        out = x.new_empty(self.tensor_size, *x.shape)
        self.transport.gather(list(out.unbind(0)), x.contiguous())
        return out

    @exchange("the receipt from the stage before")
    def receive(self, x: Tensor) -> None:
        """Receive x from the same tensor rank of the previous stage; nothing on the first stage."""
        if self.stage > 0:
            self.transport.receive(x, self.rank - self.tensor_size)

    @exchange("the sending to the next stage")
    def send(self, x: Tensor) -> None:
        """Send x to the same tensor rank of the next stage; nothing on the last stage."""
        if self.stage < self.num_stages - 1:
            self.transport.send(x, self.rank + self.tensor_size)

    @exchange("the broadcast of the results")
    def share(self, x: Tensor) -> None:
        """Broadcast the last stage's x to all ranks; with one stage they have the same."""
        if self.num_stages > 1:
            self.transport.broadcast(x, self._source)

    @exchange("the sending to rank 0")
    def to_first(self, x: Tensor | None, host: Tensor | None) -> None:
        """Send x of the first tensor rank of the last stage to `host`, host memory of rank 0; no effect with
        one stage.

        No rank waits: `host` is valid once the transfers of take_posted are done.
        """
        if self._outbox is not None:
            assert x is not None
            self._outbox.put(x)
        elif self.rank == 0 and self.num_stages > 1:
            assert host is not None and host.is_contiguous()
            self._posted.append(_Receipt(self, dist.irecv(host, self._source, group=self._results)))

    def _send_result(self, host: Tensor) -> None:
        dist.send(host, 0, group=self._results)

    def take_posted(self) -> list[Posted]:
        """Return the results that have been sent to rank 0 since the last call; empty on other ranks."""
        posted, self._posted = self._posted, []
        return posted

    @exchange("the receipt of the results")
    def finish(self, work: Any) -> None:
        """Wait for a transfer of torch.distributed."""
        work.wait()

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's data in rank order, while the engine starts.

        Raises PeerLost as `barrier` does.
        """
        return self._meeting.gather("exchanging the handles of memory", data)

    @exchange("the comparison of checksums")
    def all_true(self, values: list[bool]) -> list[bool]:
        """Return for each value whether it is true on all ranks, which have the same number of values."""
        flags = torch.tensor(values, dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MIN, group=self._answers)
        return flags.bool().tolist()

    def captures(self, x: Tensor) -> bool:
        """Return whether a CUDA graph may sum rows such as x over the tensor ranks."""
        return self.tensor_size == 1 or self.transport.captures or self.row_sums(x) is not None

    def raise_if_lost(self) -> None:
        """Raise PeerLost if a tensor rank did not reach a sum over peer memory in time."""
        if self.peers is not None and self.peers.lost is not None:
            rank, limit_s = self.stage * self.tensor_size + self.peers.lost, self.peers.limit_s
            raise PeerLost(f"rank {rank} did not reach the sum over the tensor ranks within {limit_s:.3g} s")

    def smallest(self, value: int) -> int:
        """Return the minimum over the ranks, e.g. of the blocks that fit into their memory, while the engine
        starts.

        Raises PeerLost as `barrier` does.
        """
        return min(self._meeting.gather("agreeing on the smallest size", value))

    @exchange("the broadcast of a plan")
    def _send_plan(self, plan: PlanMessage | None) -> None:
        frame = b"" if plan is None else seal(plan_frame.encode(plan))
        for message in plan_wire.messages(frame):
            dist.broadcast(torch.from_numpy(message), 0)

    @exchange("")
    def broadcast_plan(self, plan: PlanMessage | None) -> PlanMessage | None:
        """Send a plan or late samples on rank 0 (None: the end), and return it on the other ranks, without
        the scheduler's own objects.

        Raises TridecodeError on a rank that receives an invalid message; nothing received is executed.
        """
        if self.rank == 0:
            self._send_plan(plan)
            return plan
        first = torch.empty(plan_wire.FIRST_BYTES, dtype=torch.uint8)
        dist.broadcast(first, 0)
        frame, missing = plan_wire.read_first(first.numpy())
        if missing:
            rest = torch.empty(missing, dtype=torch.uint8)
            dist.broadcast(rest, 0)
            frame += rest.numpy().tobytes()
        return self._order.check(plan_frame.decode(unseal(frame))) if frame else None

    def close(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
        if self.peers is not None:
            self.peers.close()
        dist.destroy_process_group()


class _Receipt:
    """Posted of ProcessRanks."""

    def __init__(self, ranks: ProcessRanks, work: Any):
        self._ranks, self._work = ranks, work

    def wait(self) -> None:
        self._ranks.finish(self._work)


Ranks = SingleRank | ProcessRanks
