"""Samples the tokens of a step and brings them to the host."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.sampling import start_slots
from tridecode.backend.engine.ranks.parallel import ProcessRanks
from tridecode.backend.engine.ranks.peer_memory import PeerSampler
from tridecode.backend.engine.ranks.vocab_sampler import sample
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.results import empty_host, to_first, to_host


class StepSampler:
    """Owns the sampled tokens on the device and their buffers on the host.

    ring: number of host buffers, used in turns; more than there are steps in flight.
    """

    def __init__(self, state: DeviceState, ring: int):
        rows, device = state.config.slots, state.device
        self._state, self._ranks, self._device = state, state.ranks, device
        self._peers: PeerSampler | None = None  # samples on a GPU where the ranks share the vocabulary
        ranks, vocab = state.ranks, state.vocab
        if vocab is not None and isinstance(ranks, ProcessRanks) and ranks.peers is not None:
            self._peers = PeerSampler(state.ops, ranks.peers, vocab)
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._log_probs = torch.zeros(rows, dtype=torch.float32, device=device)
        self._results = [
            (empty_host((rows,), torch.int32, device), empty_host((rows,), torch.float32, device))
            for _ in range(ring)
        ]

    def start(self, plan: StepPlan) -> None:
        """Write the sampling state of the sequences that take a batch slot in this step."""
        if plan.starts:
            start_slots(self._state.sampling, plan.starts, self._state.first_id)

    def sample(self, logits: Tensor, slots: Tensor) -> None:
        """Draw one token for each row. logits: (R, V) of this rank's ids. slots: (R,) int32, -1 for none."""
        state, count = self._state, slots.shape[0]
        results = {"tokens": self.tokens[:count], "log_probs": self._log_probs[:count]}
        if state.vocab is None:
            state.ops.sample(logits, slots, state.sampling, **results)
        elif self._peers is None:
            sample(logits, slots, state.sampling, state.vocab, self._ranks, **results)
        else:
            self._peers.sample(logits, slots, state.sampling, **results)

    @torch.inference_mode()
    def fetch(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Start the copies of the step's (R,) tokens and log probabilities to the host; returns both."""
        count, ranks, turn = plan.num_samples, self._ranks, self._results[plan.step % len(self._results)]
        tokens, log_probs = self.tokens[:count], self._log_probs[:count]
        if not count:
            return turn[0][:0], turn[1][:0]
        if ranks.is_pipelined:
            fetch = partial(to_first, ranks, shape=(count,), device=self._device)
            return (
                fetch(tokens, dtype=torch.int32, host=turn[0][:count]),
                fetch(log_probs, dtype=torch.float32, host=turn[1][:count]),
            )
        if ranks.num_stages > 1:
            ranks.share(tokens)
            ranks.share(log_probs)
            if not self._state.is_last_stage:
                self._store_last_tokens(plan, tokens)
        return to_host(tokens, turn[0][:count]), to_host(log_probs, turn[1][:count])

    def _store_last_tokens(self, plan: StepPlan, tokens: Tensor) -> None:
        """Write last_tokens on a stage that does not sample. The slots of beams are -1 in the plan."""
        slots = np.repeat(plan.slots, plan.samples)
        rows = np.flatnonzero(slots >= 0)
        indices, places = torch.from_numpy(rows).to(self._device), torch.from_numpy(slots[rows])
        last_tokens = self._state.sampling.last_tokens
        last_tokens[places.to(self._device).long()] = tokens[indices].clamp(min=0)
