"""Logits that a step returns to the host: for prompt positions, and for sampled rows.

Steps without such rows do nothing here. Prompt logits are computed a few rows at a time in the buffers of the
sampled rows, and each part is copied to the host, so the device needs no additional memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.parts.returned_logits import FoundLogits, LogitRows, ReturnedLogits
from tridecode.backend.engine.ranks.vocab_logits import log_probs_at
from tridecode.backend.engine.ranks.vocab_share import TensorRanks, mask_padding, whole_rows
from tridecode.backend.engine.step import results
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.results import to_first
from tridecode.backend.models.context import Context
from tridecode.backend.weights.layout import VocabShare


class LogitsRun(PartRun[ReturnedLogits]):
    _samples: Tensor | None = None  # (n, V) float32, on the host of rank 0

    @property
    def captures(self) -> bool:
        return super().captures and self.may_overwrite_samples

    def after_forward(self, context: Context, x: Tensor) -> None:
        """Compute the logits of the prompts' rows."""
        state = self.state
        size = state.model_config.vocab_size
        self._rows = prompt_logits(state.model, context, x, self.plan, state.ranks, self.part.rows, size)

    def after_logits(self, logits: Tensor | None, like: Tensor) -> None:
        state, wanted = self.state, self.part.samples
        if wanted:
            size = state.model_config.vocab_size
            self._samples = sample_logits(logits, wanted, state.ranks, state.vocab, size, like)

    def result(self) -> FoundLogits:
        samples = None if self._samples is None else self._samples.numpy()
        return FoundLogits([logits.numpy() for logits in self._rows], samples)


class Ranks(TensorRanks, results.Ranks, Protocol):
    tensor_rank: int
    stage: int


class Model(Protocol):
    vocab: VocabShare | None

    def logits(self, context: Context, x: Tensor) -> Tensor: ...


def prompt_logits(
    model: Model,
    context: Context,
    x: Tensor,
    plan: StepPlan,
    ranks: Ranks,
    wanted: list[LogitRows],
    vocab_size: int,
) -> list[Tensor]:
    """Return for each requested row the logits (n, V) float32, or () float64, the sum of the targets' log
    probabilities.

    x: (T, C), the last stage's output. Collective: every rank calls it; all except rank 0 get [].
    """
    found = [_of_rows(model, context, x, plan, ranks, rows, vocab_size) for rows in wanted]
    return found if ranks.rank == 0 else []


def _of_rows(
    model: Model, context: Context, x: Tensor, plan: StepPlan, ranks: Ranks, wanted: LogitRows, vocab: int
) -> Tensor:
    most, begin = context.work.last.shape[0], int(plan.query_starts[wanted.row]) + wanted.first
    is_summed = wanted.targets is not None
    has_head = ranks.stage == ranks.num_stages - 1 and (model.vocab is not None or ranks.tensor_rank == 0)
    out = results.empty_host((0 if is_summed else wanted.count, vocab), torch.float32, x.device)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for first in range(0, wanted.count, most):
        count = min(most, wanted.count - first)
        logits = None
        if has_head:
            rows = torch.arange(begin + first, begin + first + count, dtype=torch.int32, device=x.device)
            at_rows = replace(context, batch=replace(context.batch, sample_tokens=rows))
            logits = mask_padding(model.logits(at_rows, x), model.vocab)
        if wanted.targets is not None:
            if logits is not None:
                targets = torch.tensor(wanted.targets[first : first + count], dtype=torch.int64)
                total += _log_probs(logits, on_device(targets, x.device), model.vocab, ranks).sum()
            continue
        _send(logits, out[first : first + count], model.vocab, ranks, x)
    if is_summed:
        return to_first(ranks, total, (), torch.float64, x.device)
    return out


def _send(logits: Tensor | None, out: Tensor, vocab: VocabShare | None, ranks: Ranks, like: Tensor) -> None:
    """Send rows of the last stage's logits (None on a rank without them) to `out` (n, V), on the host of rank
    0.

    like: a tensor on this rank's device.
    """
    rows = None if logits is None else whole_rows(logits, vocab, ranks)
    to_first(ranks, rows, tuple(out.shape), out.dtype, like.device, out)


def _log_probs(logits: Tensor, targets: Tensor, vocab: VocabShare | None, ranks: Ranks) -> Tensor:
    """Return (n,) float64, the log-softmax of each row (n, V) at its target."""
    if vocab is not None:
        return log_probs_at(logits, targets, vocab, ranks)
    picked = logits.gather(1, targets[:, None])[:, 0]
    return picked.double() - logits.logsumexp(-1).double()


def sample_logits(
    logits: Tensor | None,
    wanted: list[int],
    ranks: Ranks,
    vocab: VocabShare | None,
    vocab_size: int,
    like: Tensor,
) -> Tensor | None:
    """Return (n, V) float32 on the host: the requested rows of logits (R, V), before sampling. Collective.

    logits: the last stage's, for this rank's ids; None on another stage. like: a tensor on
    this rank's device. None on all ranks but rank 0.
    """
    out = results.empty_host((len(wanted), vocab_size), torch.float32, like.device)
    if logits is not None:
        logits = logits.index_select(0, on_device(torch.tensor(wanted), logits.device))
    _send(logits, out, vocab, ranks, like)
    return out if ranks.rank == 0 else None
