"""This process's place among the ranks, and the exchange between them: plans, activations, partial sums.

Rank r has tensor rank r % tensor_size and stage r // tensor_size (FasterTransformer's order). Rank 0 plans
and every rank runs the same plan; the first tensor rank of the last stage has the sampled tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tridecode.backend.engine import plan_frame
from tridecode.backend.engine.plan import StepPlan


class SingleRank:
    """The whole model in one process: nothing to exchange."""

    rank, world = 0, 1
    tensor_rank, tensor_size, stage, num_stages = 0, 1, 0, 1

    def all_reduce(self, x: Tensor) -> None: ...

    def receive(self, x: Tensor) -> None: ...

    def send(self, x: Tensor) -> None: ...

    def share_tokens(self, tokens: Tensor, log_probs: Tensor) -> None: ...

    def share_sums(self, sums: Tensor) -> None: ...

    def smallest(self, value: int) -> int:
        return value

    def broadcast_plan(self, plan: StepPlan | None) -> StepPlan | None:
        return plan

    def close(self) -> None: ...


class ProcessRanks:
    """One process a rank, joined by torch.distributed: gloo for plans, and gloo (CPU) or NCCL (CUDA) for
    tensors.

    init_method: a URL that torch.distributed understands, the same on all ranks. Collective: returns when all
    are there.
    """

    def __init__(self, rank: int, tensor_size: int, num_stages: int, init_method: str, device: torch.device):
        self.rank, self.world = rank, tensor_size * num_stages
        self.tensor_rank, self.tensor_size = rank % tensor_size, tensor_size
        self.stage, self.num_stages = rank // tensor_size, num_stages
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=self.world)
        backend = "nccl" if device.type == "cuda" else "gloo"
        groups = [
            dist.new_group([stage * tensor_size + i for i in range(tensor_size)], backend=backend)
            for stage in range(num_stages)
        ]
        self._tensor_group = groups[self.stage]
        self._all = dist.new_group(list(range(self.world)), backend=backend)

    def all_reduce(self, x: Tensor) -> None:
        """Sum x over the tensor group, in place; every rank gets the same bits."""
        dist.all_reduce(x, group=self._tensor_group)

    def receive(self, x: Tensor) -> None:
        """Receive x from the same tensor rank of the previous stage; nothing on the first stage."""
        if self.stage > 0:
            dist.recv(x, self.rank - self.tensor_size, group=self._all)

    def send(self, x: Tensor) -> None:
        """Send x to the same tensor rank of the next stage; nothing on the last stage."""
        if self.stage < self.num_stages - 1:
            dist.send(x, self.rank + self.tensor_size, group=self._all)

    def share_tokens(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Broadcast the last stage's samples. With one stage, all tensor ranks have sampled the same."""
        if self.num_stages > 1:
            source = (self.num_stages - 1) * self.tensor_size
            dist.broadcast(tokens, source, group=self._all)
            dist.broadcast(log_probs, source, group=self._all)

    def share_sums(self, sums: Tensor) -> None:
        if self.num_stages > 1:
            dist.broadcast(sums, (self.num_stages - 1) * self.tensor_size, group=self._all)

    def smallest(self, value: int) -> int:
        """The minimum over the ranks, e.g. of the blocks that fit into their memory."""
        held = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(held, op=dist.ReduceOp.MIN)
        return int(held)

    def broadcast_plan(self, plan: StepPlan | None) -> StepPlan | None:
        """Rank 0 sends a plan (None: the end); the others return it, without the scheduler's own objects.

        Raises TridecodeError on a rank that receives an invalid plan; nothing that is received is executed.
        """
        if self.rank == 0:
            frame = b"" if plan is None else plan_frame.encode(plan)
            dist.broadcast(torch.tensor([len(frame)]), 0)
            if frame:
                dist.broadcast(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 0)
            return plan
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0)
        if not int(size):
            return None
        plan_frame.check_size(int(size))
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0)
        return plan_frame.decode(data.numpy().tobytes())

    def close(self) -> None:
        dist.destroy_process_group()
