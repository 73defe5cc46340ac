"""One part of a plan on the device, while one step of this rank runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.step.plan import StepPart, StepPlan
from tridecode.backend.models.context import Context
from tridecode.kernels.operands import Batch, CacheLayer
from tridecode.kernels.ops import Ops

P = TypeVar("P", bound=StepPart)


class PartRun(Generic[P]):
    """Base class. Each method is called once per step, in this order, for the parts in the order of the plan.
    All ranks call all methods, so each may be collective. They run in inference mode.

    A step that runs as a CUDA graph skips `ops`, `caches` and `after_logits`. It calls `after_forward` only
    if it has prompts, after the graph, which has already sampled.
    """

    def __init__(self, state: DeviceState, plan: StepPlan, part: P):
        self.state, self.plan, self.part = state, plan, part

    @property
    def captures(self) -> bool:
        """Return whether the step may run as a CUDA graph, the same on all ranks. Called after `before`."""
        return self.part.captures

    @property
    def may_overwrite_samples(self) -> bool:
        """Return whether the buffers of the samples' logits and hidden states are free after a graph."""
        return not self.plan.late and not any(part.reads_samples for part in self.plan.parts)

    def before(self) -> None:
        """Run before the forward, and before the slots of the step start."""

    def ops(self, ops: Ops, batch: Batch) -> Ops:
        """Return the operations of this batch's forward, which replace `ops`."""
        return ops

    def caches(self, caches: list[CacheLayer]) -> list[CacheLayer]:
        """Return the caches of the step's forward, which replace `caches`."""
        return caches

    @classmethod
    def graph_ops(cls, state: DeviceState) -> Mapping[str, Callable[[Batch], Ops]]:
        """Return factories of the operations with which decode steps with this part are captured as CUDA
        graphs, by the name of a form; {}: they are not captured. Called once, before the first step."""
        return {}

    #: the forms of graph_ops with which small steps with prompts are captured, too
    prompt_forms: tuple[str, ...] = ()

    @property
    def form(self) -> str:
        """Return the form of graph_ops whose graphs run this step; "": none. Called after `before`."""
        return ""

    @property
    def captures_prompts(self) -> bool:
        """Return whether a step with prompts may run as a graph of its form. Called after `before`."""
        return False

    def pad(self, decodes: int, tokens: int) -> None:
        """Prepare the replay of a graph with prompts. decodes, tokens: its decode rows and all its tokens.

        Padding follows the plan's decode rows and, at the end, its prompts.
        """

    def after_forward(self, context: Context, x: Tensor) -> None:
        """x: (T, C), the output of this stage. After a graph only the rows of prompts are defined."""

    def after_logits(self, logits: Tensor | None, like: Tensor) -> None:
        """logits: (R, V) of this rank's ids, before they are sampled from; None on a stage before the last.
        like: a tensor on this rank's device. Not called for a step without samples.
        """

    def after_sampling(self, tokens: Tensor) -> None:
        """tokens: (R,) int32, on the device."""

    @property
    def is_done(self) -> bool:
        """Return whether `result` returns at once when the device has finished the step."""
        return True

    def result(self) -> Any:
        """The result for StepResult.parts, once the device has done the step; with pipeline stages of use on
        rank 0 only. None: there is nothing to commit.
        """
        return None
