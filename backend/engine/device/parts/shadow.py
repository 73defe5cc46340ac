"""Shadow runs on the device: the tokens of an ended request, scored by the served model and by its reference.

Both models compute the same tokens by teacher forcing: the prompt and the generated tokens, in chunks, each
with a separate cache for one sequence. The logits before every generated token give the two distributions
(temperature 1, no penalties) that are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tridecode.backend import models
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.parts.background_run import BackgroundRun, OpenWeights
from tridecode.backend.engine.parts.shadow import Job, ShadowRuns, needs_second_weights
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.step_buffers import StepBuffers
from tridecode.backend.models import read_model_config
from tridecode.backend.models.context import Context, Workspace
from tridecode.backend.models.decoder import Decoder
from tridecode.kernels.operands import Batch, CacheLayer

_HEAD_ROWS = 16  # positions whose logits are held at once
_LOGITS_DTYPE = torch.float64  # dtype of the comparison
#: fields in which the reference may differ from the served model
_OWN_FIELDS = ("model_name", "weight_dtype", "quantization")


class ShadowScorer(BackgroundRun):
    """Holds the reference and the buffers of one chunk.

    The reference shares the served weights if they are not quantised; then only its cache differs.
    """

    def __init__(self, state: DeviceState, open_weights: OpenWeights):
        config, device, model = state.config, state.device, state.model_config
        assert config.max_sequence_tokens is not None and config.shadow_slice_tokens is not None
        self.longest, self.slice_tokens = config.max_sequence_tokens, config.shadow_slice_tokens
        self.block_tokens, blocks = config.block_tokens, -(-self.longest // config.block_tokens)
        self._model_config, self._config = model, config
        self._ops, self._ranks, self._device = state.ops, state.ranks, device
        self.served = self.reference = state.model
        if needs_second_weights(model, config):
            directory = None if config.shadow_weights == "none" else Path(config.shadow_weights)
            reference = replace(model, quantization=None)
            with open_weights(directory, reference) as weights:
                self.reference = models.family(model.family).model(
                    reference, weights, state.ranks, self.longest
                )
        self._work = Workspace.allocate(model, self.slice_tokens, _HEAD_ROWS, 1, state.dtype, device)
        self._served_rows = torch.zeros_like(self._work.hidden)
        shape = (3, _HEAD_ROWS, model.vocab_size)
        self._wide = torch.zeros(shape, dtype=_LOGITS_DTYPE, device=device)  # two distributions and scratch
        self.buffers = StepBuffers(self.slice_tokens, 1, blocks, device)
        self._caches = (
            state.allocate_cache(blocks, with_drafter=False),
            state.allocate_cache(blocks, dtype=state.dtype, with_drafter=False),
        )

    @classmethod
    def check(cls, model: ModelConfig, config: EngineConfig) -> None:
        """Raise ConfigError unless shadow_weights is none or has the served model, not quantised."""
        if config.shadow_weights == "none":
            return
        asked = f"parameter shadow_weights names {config.shadow_weights}"
        if not (Path(config.shadow_weights) / "config.ini").is_file():
            raise ConfigError(f"{asked}, without config.ini; wanted a weight directory")
        reference = read_model_config(Path(config.shadow_weights))
        if reference.quantization is not None:
            raise ConfigError(
                f"{asked}, whose weights are {reference.quantization.weights}; wanted weights in fp16, bf16 "
                "or fp32"
            )
        for row in fields(ModelConfig):
            found, wanted = getattr(reference, row.name), getattr(model, row.name)
            if row.name not in _OWN_FIELDS and found != wanted:
                raise ConfigError(
                    f"{asked}, a model with {row.name} = {found}; wanted that of the model that is served, "
                    f"{wanted}"
                )

    def begin(self) -> ShadowRuns:
        return ShadowRuns(self._model_config, self._config, self)

    def warm_up(self) -> None:
        """Run the largest slice behind the longest context."""
        begin = max(self.longest - self.slice_tokens, min(1, self.longest - 1))  # a first chunk ends at 1
        job = Job("", np.zeros(self.longest, np.int32), self.longest, done=begin)
        with suppress(ArithmeticError):  # the cache before this chunk is empty
            self.advance(job)

    @torch.inference_mode()
    def advance(self, job: Job) -> None:
        """Compute the next chunk of a job by both models and compare it; waits for the device.

        A chunk ends with the prompt, as the prefill of the live request did: generated tokens read their keys
        from the cache. Raises what the device raises, and ArithmeticError for non-finite logits.
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
        """Return a plan for a chunk of one prompt from position `begin` on, in blocks 0, 1, 2 and so on,
        without sampling.
        """
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
        """Run one model; return (T, C), the last layer's output."""
        context = Context(self._ops, self._ranks, self._work, batch)
        x = self._work.hidden[: batch.num_tokens]
        model.embed(context, x)
        model.forward(context, x, caches)
        return x

    def _compare(
        self, served: Tensor, reference: Tensor, batch: Batch, at: Sequence[int]
    ) -> tuple[float, int]:
        """Return the sum of KL(reference || served) in nats over the rows `at`, and how many agree in arg
        max.
        """
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
    """Compute log-softmax in place over the last dimension. scratch: like x, overwritten."""
    x.sub_(x.amax(-1, keepdim=True))
    torch.exp(x, out=scratch)
    x.sub_(scratch.sum(-1, keepdim=True).log_())
