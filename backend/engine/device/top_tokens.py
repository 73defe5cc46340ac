"""The most likely tokens of each step, for the sequences that want them: which rows, and their way back.

Steps without such a row do nothing here. The log probabilities are those of the model's own logits, before
temperature, penalties and bad words, as vLLM reports them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.ranks import vocab_logits
from tridecode.backend.engine.ranks.parallel import ProcessRanks, SingleRank
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.results import to_first
from tridecode.backend.weights.layout import VocabShare
from tridecode.backend.wire.messages import TopLogProbs
from tridecode.kernels.top_log_probs import best_tokens, raw_log_probs


class PendingTops:
    """Results of a step on their way to the host; `result` is valid once the step is, with stages on rank 0.
    ids: (n, 1 + most) int32 and values: float32, on the host."""

    def __init__(self, rows: np.ndarray, counts: np.ndarray, num_samples: int, ids: Tensor, values: Tensor):
        self._rows, self._counts, self._num_samples = rows, counts, num_samples
        self._ids, self._values = ids, values

    def result(self) -> list[TopLogProbs | None]:
        """One for each sample of the step."""
        found: list[TopLogProbs | None] = [None] * self._num_samples
        table = zip(self._rows.tolist(), self._counts.tolist(), self._ids.tolist(), self._values.tolist())
        for row, count, ids, values in table:
            found[row] = TopLogProbs(values[0], ids[0], ids[1 : count + 1], values[1 : count + 1])
        return found


class TopLogProbsOfStep:
    """One step on one rank: `before` and `after` sampling. vocab: this rank's ids, None for all of them."""

    def __init__(
        self,
        plan: StepPlan,
        vocab_size: int,
        device: torch.device,
        ranks: SingleRank | ProcessRanks,
        vocab: VocabShare | None = None,
    ):
        assert plan.top_log_probs is not None
        self._ranks, self._vocab = ranks, vocab
        counts = plan.top_log_probs[plan.samples > 0]
        self._rows = np.flatnonzero(counts >= 0)
        self._counts, self._num_samples = counts[self._rows], len(counts)
        self._most = min(int(self._counts.max(initial=0)), vocab_size)
        self._indices = _on_device(torch.from_numpy(self._rows), device)
        self._raw: Tensor | None = None

    def before(self, logits: Tensor) -> None:
        """logits: (R, V), of the last stage; (R, size) of this rank's ids."""
        if self._vocab is None:
            self._raw = raw_log_probs(logits, self._indices)
        elif len(self._rows):
            self._raw = vocab_logits.raw_log_probs(logits, self._indices, self._ranks)

    def after(self, tokens: Tensor) -> PendingTops | None:
        """tokens: (R,), sampled. Collective: the last stage's results go to rank 0."""
        if not len(self._rows):
            return None
        ids, values = None, None
        if self._raw is not None:
            chosen = tokens[self._indices].clamp(min=0)
            if self._vocab is None:
                ids, values = best_tokens(self._raw, chosen, self._most)
            else:
                ids, values = vocab_logits.best_tokens(
                    self._raw, chosen, self._most, self._vocab, self._ranks
                )
        place = (len(self._rows), 1 + self._most), self._ranks, tokens.device
        return PendingTops(
            self._rows,
            self._counts,
            self._num_samples,
            _to_first(ids, torch.int32, *place),
            _to_first(values, torch.float32, *place),
        )


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _to_first(
    x: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, int],
    ranks: SingleRank | ProcessRanks,
    device: torch.device,
) -> Tensor:
    return to_first(ranks, None if x is None else x.to(dtype), shape, dtype, device)
