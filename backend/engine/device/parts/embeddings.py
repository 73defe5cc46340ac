"""Vectors of prompts on the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.parts.embeddings import PromptVectors, SummedRow
from tridecode.backend.engine.step.results import to_first
from tridecode.backend.models.context import Context


class PromptVectorsRun(PartRun[PromptVectors]):
    @property
    def captures(self) -> bool:
        return super().captures and self.may_overwrite_samples

    def after_forward(self, context: Context, x: Tensor) -> None:
        state, found = self.state, None
        if state.is_last_stage and state.ranks.tensor_rank == 0:
            found = torch.empty((len(self.part.rows), x.shape[1]), dtype=torch.float32, device=x.device)
            self._sum(x, found)
        self._found = to_first(
            state.ranks, found, (len(self.part.rows), x.shape[1]), torch.float32, state.device
        )

    def result(self) -> list[np.ndarray]:
        return list(self._found.numpy())

    def _sum(self, x: Tensor, out: Tensor) -> None:
        """Write the sums over x (T, C) to out (rows, C) float32.

        Rows are normalised in work.last, which the logits use later.
        """
        done = 0
        for is_single, group in groupby(self.part.rows, lambda one: one.normed and one.count == 1):
            rows = list(group)
            sums = out[done : done + len(rows)]
            done += len(rows)
            if is_single:
                self._copy_normed(x, rows, sums)
                continue
            for one, total in zip(rows, sums):
                tokens = self._tokens(x, one)
                if one.normed:
                    total.zero_()
                    for piece in self._normed(tokens):
                        total.add_(piece.sum(0, dtype=torch.float32))
                else:
                    total.copy_(tokens.sum(0, dtype=torch.float32))

    def _tokens(self, x: Tensor, one: SummedRow) -> Tensor:
        first = int(self.plan.query_starts[one.row]) + one.first
        return x[first : first + one.count]

    def _copy_normed(self, x: Tensor, rows: list[SummedRow], out: Tensor) -> None:
        """Write one token of each row, normalised, to out."""
        scratch = self.state.work.last
        for first in range(0, len(rows), len(scratch)):
            some = rows[first : first + len(scratch)]
            gathered = torch.cat([self._tokens(x, one) for one in some], out=scratch[: len(some)])
            self._norm(gathered, gathered)
            out[first : first + len(some)].copy_(gathered)

    def _normed(self, tokens: Tensor) -> Iterator[Tensor]:
        """Return the normalised tokens, as many at a time as work.last has rows."""
        scratch = self.state.work.last
        for piece in tokens.split(len(scratch)):
            self._norm(piece, scratch[: len(piece)])
            yield scratch[: len(piece)]

    def _norm(self, x: Tensor, out: Tensor) -> None:
        norm = self.state.model.final_norm
        if norm is not None:
            self.state.ops.norm(x, norm, out=out)
        elif out is not x:
            out.copy_(x)
