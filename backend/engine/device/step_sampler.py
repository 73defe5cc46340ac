"""Samples the tokens of a step and brings them to the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.late_masks import LateMasks
from tridecode.backend.engine.device.sampling import start_slots
from tridecode.backend.engine.ranks.parallel import ProcessRanks
from tridecode.backend.engine.ranks.peer_memory import PeerSampler
from tridecode.backend.engine.ranks.vocab_sampler import sample
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.results import empty_host, to_first, to_host
from tridecode.kernels.operands import Batch
from tridecode.kernels.reference.rows import keep_lengths, verify_rows
from tridecode.kernels.sampling_state import SamplingState


class StepSampler:
    """Owns the sampled tokens on the device and their buffers on the host.

    ring: number of host buffers, used in turns, more than the steps in flight; 0: results stay on the
    device. sampling: state of the slots; None: the engine's. accepted: (B,) int32, samples that each
    decode row of the newest verifying step keeps. counts: (B + 1,) int32, `accepted` and, at index kept_all,
    a 1, for rows that keep their only sample. found: (B, 3) int32, Ops.look_up's in an engine that searches.
    """

    def __init__(self, state: DeviceState, ring: int, sampling: SamplingState | None = None):
        rows, device = state.config.slots, state.device
        self._sampling = sampling or state.sampling
        self._top = None if sampling else state.top
        self._state, self._ranks, self._device = state, state.ranks, device
        self._peers: PeerSampler | None = None  # samples on a GPU where the ranks share the vocabulary
        ranks, vocab = state.ranks, state.vocab
        if vocab is not None and isinstance(ranks, ProcessRanks) and ranks.peers is not None:
            self._peers = PeerSampler(state.ops, ranks.peers, vocab)
        searches = sampling is None and state.config.looks_up and not ranks.is_pipelined
        # log probabilities, tokens, found and counts are adjacent: one copy brings them to the host
        self._first_count = (5 if searches else 2) * rows
        self._packed = torch.zeros(self._first_count + rows + 1, dtype=torch.int32, device=device)
        self._log_probs = self._packed[:rows].view(torch.float32)
        self.tokens = self._packed[rows : 2 * rows]
        self.found = self._packed[2 * rows : 5 * rows].view(rows, 3) if searches else None
        self.counts, self.kept_all = self._packed[self._first_count :], rows
        self.counts[rows] = 1
        self.accepted = self.counts[:rows]
        self._results = [_HostResult(rows, self._first_count, device) for _ in range(ring)]
        self._late = LateMasks(rows, state.sampling.masks.shape[1], device)
        self.verified: Batch | None = None  # the newest step that verifies, on a stage that does not sample

    def start(self, plan: StepPlan) -> None:
        """Write the sampling state of the sequences that take a batch slot in this step."""
        if plan.starts:
            start_slots(self._sampling, plan.starts, self._state.first_id)

    def sample(self, logits: Tensor, batch: Batch) -> None:
        """Draw a token for each sample of the batch, and find the most likely tokens of rows that request
        them. logits: (R, V), for this rank's ids."""
        ops, top, place = self._state.ops, self._top, (batch.sample_slots, self._sampling)
        if top is None:
            self._sample(logits, batch)
            return
        ops.keep_raw_logits(logits, *place, top)
        self._sample(logits, batch)
        ops.top_log_probs(logits, *place, self.tokens[: logits.shape[0]], top)

    def _sample(self, logits: Tensor, batch: Batch) -> None:
        count, slots, state = logits.shape[0], batch.sample_slots, self._sampling
        tokens, log_probs = self.tokens[:count], self._log_probs[:count]
        if not batch.verifies:
            self._draw(logits, slots, state, tokens=tokens, log_probs=log_probs)
            return
        first = batch.decode_tokens
        if first < count:  # prompts; all rows are passed, since those behind may not be aligned
            others = slots.clone()
            others[:first] = -1
            self._draw(logits, others, state, tokens=tokens, log_probs=log_probs)
        outputs = tokens[:first], log_probs[:first], self.accepted[: batch.num_decodes]
        if self._state.vocab is None:
            self._state.ops.verify(
                logits[:first], batch, state, tokens=outputs[0], log_probs=outputs[1], accepted=outputs[2]
            )
        else:
            verify_rows(self._draw, logits[:first], batch, state, *outputs)

    def draw(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Draw a token for each row; return (R,) int32, valid until the next call. logits: (R, V), for this
        rank's ids. slots: (R,) int32, -1 for a row without a token, whose result is undefined."""
        tokens, log_probs = self.tokens[: len(slots)], self._log_probs[: len(slots)]
        self._draw(logits, slots, self._sampling, tokens=tokens, log_probs=log_probs)
        return tokens

    def sample_late(self, plan: StepPlan, rows: list[int], masks: np.ndarray) -> None:
        """Draw the tokens of some decode rows of the newest step, whose logits are still in the workspace.

        masks: (n, W) int32, of the rows. Each decode row of the plan has one sample.
        """
        if not rows:
            return
        count, state = plan.num_samples, self._sampling
        slots = self._late.upload(state, plan.slots, rows, masks, count)
        self._draw(
            self._state.work.logits[:count],
            slots,
            state,
            tokens=self.tokens[:count],
            log_probs=self._log_probs[:count],
        )

    def _draw(
        self, logits: Tensor, slots: Tensor, state: SamplingState, *, tokens: Tensor, log_probs: Tensor
    ) -> None:
        """Ops.sample over the vocabulary of all ranks. logits: (R, V) of this rank's ids."""
        vocab, results = self._state.vocab, {"tokens": tokens, "log_probs": log_probs}
        if vocab is None:
            self._state.ops.sample(logits, slots, state, **results)
        elif self._peers is None:
            sample(logits, slots, state, vocab, self._ranks, **results)
        else:
            self._peers.sample(logits, slots, state, **results)

    @torch.inference_mode()
    def fetch(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor | None]:
        """Start the copies of the step's (R,) tokens and log probabilities to the host and, of a step that
        verifies, of the (num_decodes,) accepted counts; return them."""
        count, ranks, turn = plan.num_samples, self._ranks, self._results[plan.step % len(self._results)]
        tokens, log_probs = turn.tokens[:count], turn.log_probs[:count]
        accepted = turn.accepted[: plan.num_decodes] if plan.queries else None
        if not count:
            return tokens, log_probs, accepted
        if ranks.is_pipelined:  # the plans have all ids and lengths
            fetched = self._from_last(self.tokens, tokens), self._from_last(self._log_probs, log_probs)
            return *fetched, None if accepted is None else self._from_last(self.accepted, accepted)
        if ranks.num_stages > 1:
            self._share(plan)
        rows = len(self.tokens)
        if plan.queries:
            end = self._first_count + plan.num_decodes
        else:
            end = rows + count if self.found is None else 2 * rows + 3 * plan.num_rows
        to_host(self._packed[:end], turn.packed[:end])
        return tokens, log_probs, accepted

    def fetched_found(self, plan: StepPlan, count: int) -> Tensor:
        """Return the first `count` rows of `found` on the host, which `fetch` brings for a plan."""
        return self._results[plan.step % len(self._results)].found[:count]

    def _share(self, plan: StepPlan) -> None:
        """Give the results of the last stage to the others, which launch their steps after it."""
        ranks, tokens = self._ranks, self.tokens[: plan.num_samples]
        ranks.share(tokens)
        ranks.share(self._log_probs[: plan.num_samples])
        if not self._state.is_last_stage and not plan.queries:
            self._store_last_tokens(plan, tokens)
        if plan.queries and plan.num_decodes:
            accepted = self.accepted[: plan.num_decodes]
            ranks.share(accepted)
            if not self._state.is_last_stage:
                self._store_accepted(plan, accepted)

    def _from_last(self, values: Tensor, host: Tensor) -> Tensor:
        """Start the copy of the first values of the last stage to `host`, where the stages of a pipeline
        overlap.
        """
        if not len(host):
            return host
        return to_first(self._ranks, values[: len(host)], host.shape, host.dtype, self._device, host)

    def _store_accepted(self, plan: StepPlan, accepted: Tensor) -> None:
        """Write last_tokens and lengths of a step that verifies on a stage that does not sample."""
        batch, sampling = self.verified, self._sampling
        assert batch is not None
        newest = np.cumsum(plan.samples) - 1  # the last sample of each row
        first = torch.from_numpy(newest[: plan.num_decodes] - plan.samples[: plan.num_decodes])
        places = torch.from_numpy(newest).to(self._device)
        places[: plan.num_decodes] = first.to(self._device) + accepted
        rows = torch.from_numpy(np.flatnonzero((plan.slots >= 0) & (plan.samples > 0))).to(self._device)
        slots = torch.from_numpy(plan.slots).to(self._device)
        sampling.last_tokens[slots[rows].long()] = self.tokens[places[rows]].clamp(min=0)
        keep_lengths(sampling, batch, slots[: plan.num_decodes], accepted)

    def _store_last_tokens(self, plan: StepPlan, tokens: Tensor) -> None:
        """Write last_tokens on a stage that does not sample. The slots of beams are -1 in the plan."""
        slots = np.repeat(plan.slots, plan.samples)
        rows = np.flatnonzero(slots >= 0)
        indices, places = torch.from_numpy(rows).to(self._device), torch.from_numpy(slots[rows])
        last_tokens = self._sampling.last_tokens
        last_tokens[places.to(self._device).long()] = tokens[indices].clamp(min=0)


class _HostResult:
    """Host memory of a step's results, in the order of StepSampler's on the device. rows: at most.
    first_count: place of `accepted`."""

    def __init__(self, rows: int, first_count: int, device: torch.device):
        self.packed = empty_host((first_count + rows,), torch.int32, device)
        self.log_probs = self.packed[:rows].view(torch.float32)
        self.tokens, self.accepted = self.packed[rows : 2 * rows], self.packed[first_count:]
        self.found = self.packed[2 * rows : first_count].view(-1, 3)
