"""A step in flight on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.ranks.exchange import waiting
from tridecode.backend.engine.ranks.parallel import GPU, Posted, Ranks
from tridecode.backend.engine.step.plan import StepResult

#: (n,) rows of a step, and (n, 3 + k) int32 of the host: StepResult.found once the device is done
Found = tuple[np.ndarray, Tensor]


@dataclass
class Pending:
    """A launched step. `wait` returns its result once the device has it.

    check: raises an error if the device could not compute the step.
    """

    ranks: Ranks
    tokens: Tensor
    log_probs: Tensor
    parts: list[PartRun[Any]]
    ready: torch.cuda.Event | None = None
    on_result: Callable[[StepResult], None] | None = None
    posted: list[Posted] = field(default_factory=list)
    check: Callable[[], None] | None = None
    accepted: Tensor | None = None  # StepResult.accepted, of a step that verifies drafts
    found: Found | None = None

    @classmethod
    def of_forward(cls, ranks: Ranks, parts: list[PartRun[Any]], done: torch.cuda.Event | None) -> Pending:
        """Return a step with rows that are not sampled yet. done: behind its forward."""
        nothing = torch.empty(0)
        return cls(ranks, nothing, nothing, parts, done)

    @property
    def is_done(self) -> bool:
        """Return whether `wait` returns at once."""
        is_done = self.ready is None or self.ready.query()
        return is_done and all(part.is_done for part in self.parts)

    def wait(self) -> StepResult:
        for transfer in self.posted:
            transfer.wait()
        if self.ready is not None:
            with waiting(self.ranks, GPU):
                self.ready.synchronize()
        if self.check is not None:
            self.check()
        result = StepResult(self.tokens.numpy().copy(), self.log_probs.numpy().copy())
        if self.accepted is not None:
            result.accepted = self.accepted.numpy().copy()
        if self.found is not None:
            result.found = self.found[0], self.found[1].numpy().copy()
        if self.parts:
            result.parts = [part.result() for part in self.parts]
        if self.on_result is not None:
            self.on_result(result)
        return result
