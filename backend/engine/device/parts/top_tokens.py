"""Returns the most likely tokens of a step to the host, for the sequences that request them.

The log probabilities come from the model's own logits, before temperature, penalties and bad words, as in
vLLM. If the ranks do not share the vocabulary, a GPU computes them within each step, also within a CUDA graph
(DeviceState.top). Otherwise a step without a graph computes them before it samples: on a CPU, if the
ranks share the vocabulary, and if the sampler overwrites logits that are not saved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.parts.top_tokens import TopTokens
from tridecode.backend.engine.ranks import vocab_logits
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.results import to_first
from tridecode.backend.wire.messages import TopLogProbs
from tridecode.backend.wire.sampling_params import SamplingParams
from tridecode.kernels.top_log_probs import best_tokens, raw_log_probs

#: columns of a slot that make `sample` edit logits without saving them, and their parameters
_EDITS: dict[str, Callable[[SamplingParams], object]] = {
    "no_repeat_ngram_size": lambda params: params.no_repeat_ngram_size,
}


class TopTokensRun(PartRun[TopTokens]):
    _raw: Tensor | None = None  # (W, V) log probabilities of the requesting rows, computed here
    #: (W, 2, 1 + most) int32 on the host: ids and the bits of values; computed by the step: all samples
    _top: Tensor | None = None

    def __init__(self, state: DeviceState, plan: StepPlan, part: TopTokens):
        super().__init__(state, plan, part)
        counts = np.repeat(part.counts, plan.samples)
        self._rows = np.flatnonzero(counts >= 0)  # indices of samples
        self._slots = np.repeat(plan.slots, plan.samples)[self._rows]
        self._counts, self._num_samples = counts[self._rows], len(counts)
        self._most = min(int(self._counts.max(initial=0)), state.model_config.vocab_size)
        self._in_step = False

    def before(self) -> None:
        """Decide where the tokens are computed. Runs after copies of slots."""
        state = self.state
        if state.top is not None:
            self._in_step = not self._any_has("no_repeat_ngram_size")

    def _any_has(self, name: str) -> bool:
        """Return whether the column is above 0 in a slot that requests the tokens; slots that start with this
        step are not written yet."""
        slots = self._slots[~np.isin(self._slots, [start.slot for start in self.plan.starts])]
        return bool((self.state.sampling.started[name][slots] > 0).any()) or any(
            start.params.top_log_probs >= 0 and _EDITS[name](start.params) for start in self.plan.starts
        )

    @property
    def captures(self) -> bool:
        return self._in_step or not len(self._rows)

    def after_logits(self, logits: Tensor | None, like: Tensor) -> None:
        if self._in_step or not len(self._rows):
            return
        self._indices = on_device(torch.from_numpy(self._rows), like.device)
        if logits is None:
            return
        if self.state.vocab is None:
            self._raw = raw_log_probs(logits, self._indices)
        else:
            self._raw = vocab_logits.raw_log_probs(logits, self._indices, self.state.ranks)

    def after_sampling(self, tokens: Tensor) -> None:
        """Start the transfer. Collective: the last stage's results go to rank 0."""
        if not len(self._rows):
            return
        state = self.state
        if self._in_step:
            assert state.top is not None
            every = state.top.top[: self._num_samples]
            self._top = to_first(state.ranks, every, tuple(every.shape), torch.int32, tokens.device)
            return
        found = None if self._raw is None else self._computed(self._raw, tokens)
        shape = len(self._rows), 2, 1 + self._most
        self._top = to_first(state.ranks, found, shape, torch.int32, tokens.device)

    def _computed(self, raw: Tensor, tokens: Tensor) -> Tensor:
        """Return (W, 2, 1 + most) int32."""
        state, chosen = self.state, tokens[self._indices].clamp(min=0)
        if state.vocab is None:
            ids, values = best_tokens(raw, chosen, self._most)
        else:
            ids, values = vocab_logits.best_tokens(raw, chosen, self._most, state.vocab, state.ranks)
        return torch.stack([ids, values.float().view(torch.int32)], 1)

    def result(self) -> list[TopLogProbs | None]:
        """Return one entry for each sample of the step."""
        found: list[TopLogProbs | None] = [None] * self._num_samples
        if self._top is None or not self._top.numel():  # no row requests them, or this is not rank 0
            return found
        top = self._top.numpy()
        top = top[self._rows] if self._in_step else top
        every = top[:, 0, : 1 + self._most].tolist()
        all_values = top[:, 1, : 1 + self._most].view(np.float32).tolist()
        for row, count, ids, values in zip(self._rows.tolist(), self._counts.tolist(), every, all_values):
            found[row] = TopLogProbs(values[0], ids[0], ids[1 : count + 1], values[1 : count + 1])
        return found
