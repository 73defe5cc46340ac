"""Context embeddings on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.parts.embeddings import ContextEmbeddings
from tridecode.backend.engine.step.results import to_first
from tridecode.backend.models.context import Context


class EmbeddingsRun(PartRun[ContextEmbeddings]):
    def after_forward(self, context: Context, x: Tensor) -> None:
        state = self.state
        self._sums: list[Tensor] = []  # (C,) float32, on the host
        for row, count in self.part.rows:
            first = self.plan.query_starts[row]
            total = x[first : first + count].float().sum(0) if state.is_last_stage else None
            self._sums.append(to_first(state.ranks, total, (x.shape[1],), torch.float32, state.device))

    def result(self) -> list[np.ndarray]:
        return [total.numpy() for total in self._sums]
