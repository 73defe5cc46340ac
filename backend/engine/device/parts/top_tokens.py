"""Computes the most likely tokens of a step for the sequences that request them, and returns them to the
host.

Steps without such a row do nothing here. The log probabilities are those of the model's own logits, before
temperature, penalties and bad words, as vLLM reports them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.parts.top_tokens import TopTokens
from tridecode.backend.engine.ranks import vocab_logits
from tridecode.backend.engine.ranks.parallel import Ranks
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.results import to_first
from tridecode.backend.wire.messages import TopLogProbs
from tridecode.kernels.top_log_probs import best_tokens, raw_log_probs


class TopTokensRun(PartRun[TopTokens]):
    _raw: Tensor | None = None  # (W, V) log probabilities of the requesting rows
    _top: tuple[Tensor, Tensor] | None = None  # (W, 1 + most) int32 ids and float32 values, on the host

    def __init__(self, state: DeviceState, plan: StepPlan, part: TopTokens):
        super().__init__(state, plan, part)
        counts = part.counts[plan.samples > 0]
        self._rows = np.flatnonzero(counts >= 0)  # indices of samples
        self._counts, self._num_samples = counts[self._rows], len(counts)
        self._most = min(int(self._counts.max(initial=0)), state.model_config.vocab_size)

    def after_logits(self, logits: Tensor | None, like: Tensor) -> None:
        if not len(self._rows):
            return
        self._indices = _on_device(torch.from_numpy(self._rows), like.device)
        if logits is None:
            return
        if self.state.vocab is None:
            self._raw = raw_log_probs(logits, self._indices)
        else:
            self._raw = vocab_logits.raw_log_probs(logits, self._indices, self.state.ranks)

    def after_sampling(self, tokens: Tensor) -> None:
        """Compute the tokens. Collective: the last stage's results go to rank 0."""
        if not len(self._rows):
            return
        ids, values, state = None, None, self.state
        if self._raw is not None:
            chosen = tokens[self._indices].clamp(min=0)
            if state.vocab is None:
                ids, values = best_tokens(self._raw, chosen, self._most)
            else:
                ids, values = vocab_logits.best_tokens(
                    self._raw, chosen, self._most, state.vocab, state.ranks
                )
        place = (len(self._rows), 1 + self._most), state.ranks, tokens.device
        self._top = _to_first(ids, torch.int32, *place), _to_first(values, torch.float32, *place)

    def result(self) -> list[TopLogProbs | None]:
        """Return one entry for each sample of the step."""
        found: list[TopLogProbs | None] = [None] * self._num_samples
        if self._top is None:
            return found
        every, all_values = (host.tolist() for host in self._top)
        for row, count, ids, values in zip(self._rows.tolist(), self._counts.tolist(), every, all_values):
            found[row] = TopLogProbs(values[0], ids[0], ids[1 : count + 1], values[1 : count + 1])
        return found


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _to_first(
    x: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, int],
    ranks: Ranks,
    device: torch.device,
) -> Tensor:
    return to_first(ranks, None if x is None else x.to(dtype), shape, dtype, device)
