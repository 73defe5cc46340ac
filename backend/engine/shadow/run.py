"""Scores the tokens of an ended request by the served model and by its 16-bit reference.

Both models compute the same tokens by teacher forcing: the prompt and the generated tokens, in chunks, each
over a cache of its own for one sequence. The logits before every generated token give the two distributions
(temperature 1, no penalties) that are compared. Nothing here touches the cache, the workspace or the sampling
state of live requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tridecode.backend import models
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.shadow.options import reference_config
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.step_buffers import StepBuffers
from tridecode.backend.models.context import Context, Ranks, Workspace
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.weights import Weights
from tridecode.kernels.operands import Batch, CacheLayer
from tridecode.kernels.ops import Ops

_HEAD_ROWS = 16  # positions whose logits are held at once
_LOGITS_DTYPE = torch.float64  # of the comparison


class Host(Protocol):
    """The engine as the scorer uses it."""

    model_config: ModelConfig
    config: EngineConfig
    model: Decoder
    ops: Ops
    device: torch.device
    dtype: torch.dtype

    @property
    def ranks(self) -> Ranks: ...

    def allocate_cache(
        self, num_blocks: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> list[CacheLayer]: ...


@dataclass
class Job:
    """One sequence to score, and how far it is.

    tokens: (n,) int32, the prompt and the output but its last token, whose own logits are of no interest.
    targets: the number of generated tokens: the last `targets` positions are compared. done: positions that
    are computed. kl: their sum, in nats. agreeing: positions where both models have the same arg max.
    """

    name: str
    tokens: np.ndarray
    targets: int
    done: int = 0
    kl: float = 0.0
    agreeing: int = 0

    @property
    def first(self) -> int:
        """The first position that is compared: the last token of the prompt."""
        return len(self.tokens) - self.targets

    @property
    def is_done(self) -> bool:
        return self.done == len(self.tokens)


class Scorer:
    """Holds the reference and the buffers of one chunk. weights: of the reference; None: it shares those of
    the served model, which are not rounded, and differs in its cache."""

    def __init__(self, host: Host, weights: Weights | None):
        config, device, model = host.config, host.device, host.model_config
        assert config.max_sequence_tokens is not None and config.shadow_slice_tokens is not None
        longest = config.max_sequence_tokens
        self.slice_tokens = config.shadow_slice_tokens
        self.block_tokens, self.blocks = config.block_tokens, -(-longest // config.block_tokens)
        self.longest = longest
        self._ops, self._ranks, self._device = host.ops, host.ranks, device
        self.served = self.reference = host.model
        if weights is not None:
            reference = reference_config(model)
            self.reference = models.family(model.family).model(reference, weights, host.ranks, longest)
        self._work = Workspace.allocate(model, self.slice_tokens, _HEAD_ROWS, 1, host.dtype, device)
        self._served_rows = torch.zeros_like(self._work.hidden)
        shape = (3, _HEAD_ROWS, model.vocab_size)
        self._wide = torch.zeros(shape, dtype=_LOGITS_DTYPE, device=device)  # two distributions and scratch
        self.buffers = StepBuffers(self.slice_tokens, 1, self.blocks, device)
        self._caches = (
            host.allocate_cache(self.blocks),
            host.allocate_cache(self.blocks, dtype=host.dtype),
        )

    def warm_up(self) -> None:
        """Run the largest slice, behind the longest context, so that libraries allocate what they need before
        the live cache takes the rest of the memory."""
        begin = max(self.longest - self.slice_tokens, min(1, self.longest - 1))  # a first chunk ends at 1
        job = Job("", np.zeros(self.longest, np.int32), self.longest, done=begin)
        with suppress(ArithmeticError):  # the cache of the tokens before it is empty
            self.advance(job)

    @torch.inference_mode()
    def advance(self, job: Job) -> None:
        """Compute the next chunk of a job by both models and compare it; waits for the device.

        A chunk ends with the prompt, as the prefill of the live request did: generated tokens read their keys
        from the cache. Raises what the device raises, and ArithmeticError for logits that are not numbers.
        """
        begin, end = job.done, min(job.done + self.slice_tokens, len(job.tokens))
        if begin <= job.first:
            end = min(end, job.first + 1)
        batch = self.buffers.load(self._plan(job.tokens[begin:end], begin))
        rows = self._served_rows[: end - begin]
        rows.copy_(self._forward(self.served, self._caches[0], batch))
        reference_rows = self._forward(self.reference, self._caches[1], batch)
        at = range(max(job.first - begin, 0), end - begin)
        if at:
            kl, agreeing = self._compare(rows, reference_rows, batch, at)
            job.kl, job.agreeing = job.kl + kl, job.agreeing + agreeing
        elif self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        job.done = end

    def _plan(self, tokens: np.ndarray, begin: int) -> StepPlan:
        """A chunk of one prompt from position `begin` on, in the blocks 0, 1, 2 and so on. No sampling."""
        count, int32 = len(tokens), np.int32
        positions = np.arange(begin, begin + count, dtype=int32)
        used = -(-(begin + count) // self.block_tokens)
        return StepPlan(
            step=0,
            token_ids=tokens,
            positions=positions,
            kv_slots=positions,
            block_tables=np.arange(used, dtype=int32)[None],
            context_lens=np.array([begin + count], int32),
            query_starts=np.array([0, count], int32),
            slots=np.array([-1], int32),
            samples=np.array([0], int32),
            num_decodes=0,
        )

    def _forward(self, model: Decoder, caches: list[CacheLayer], batch: Batch) -> Tensor:
        """(T, C): the last layer's output."""
        context = Context(self._ops, self._ranks, self._work, batch)
        x = self._work.hidden[: batch.num_tokens]
        model.embed(context, x)
        model.forward(context, x, caches)
        return x

    def _compare(
        self, served: Tensor, reference: Tensor, batch: Batch, at: Sequence[int]
    ) -> tuple[float, int]:
        """The sum of KL(reference || served) in nats over the rows `at`, and how many agree in arg max."""
        kl = torch.zeros((), dtype=_LOGITS_DTYPE, device=self._device)
        agreeing = torch.zeros((), dtype=torch.int64, device=self._device)
        for start in range(0, len(at), _HEAD_ROWS):
            wanted = list(at[start : start + _HEAD_ROWS])
            rows = torch.tensor(wanted, dtype=torch.int32, device=self._device)
            context = Context(self._ops, self._ranks, self._work, replace(batch, sample_tokens=rows))
            ours, theirs, scratch = self._wide[:, : len(wanted)].unbind(0)
            ours.copy_(self.served.logits(context, served))
            theirs.copy_(self.reference.logits(context, reference))
            agreeing += (ours.argmax(-1) == theirs.argmax(-1)).sum()
            _log_softmax(ours, scratch)
            _log_softmax(theirs, scratch)
            torch.exp(theirs, out=scratch)
            kl += scratch.mul_(theirs.sub_(ours)).sum()
        if not kl.isfinite():
            raise ArithmeticError("the logits of one of the two models are not numbers (NaN or infinite)")
        return float(kl), int(agreeing)


def _log_softmax(x: Tensor, scratch: Tensor) -> None:
    """In place, over the last dimension. scratch: as x, overwritten."""
    x.sub_(x.amax(-1, keepdim=True))
    torch.exp(x, out=scratch)
    x.sub_(scratch.sum(-1, keepdim=True).log_())
