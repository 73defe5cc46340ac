"""Launches the steps of one rank: a plan in, a pending result out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter, SampledStep
from tridecode.backend.engine.device.drafters.table import device_drafter
from tridecode.backend.engine.device.parts.background_run import BackgroundRun, OpenWeights
from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.device.parts.table import background_kinds, part_runs
from tridecode.backend.engine.device.pending import Pending
from tridecode.backend.engine.device.step_sampler import StepSampler
from tridecode.backend.engine.ranks.agreement import StepDigest, copied_state
from tridecode.backend.engine.ranks.exchange import waiting
from tridecode.backend.engine.ranks.parallel import GPU
from tridecode.backend.engine.ranks.vocab_share import mask_padding, whole_rows
from tridecode.backend.engine.speculation.depth import StepCosts
from tridecode.backend.engine.step.decode_graphs import DecodeGraphs
from tridecode.backend.engine.step.plan import LateSamples, StepPart, StepPlan, StepResult
from tridecode.backend.engine.step.prefill_graphs import PromptGraphs
from tridecode.backend.engine.step.query_graphs import QueryGraphs
from tridecode.backend.engine.step.step_buffers import StepBuffers
from tridecode.backend.models.context import Context
from tridecode.kernels.operands import Batch
from tridecode.kernels.ops import Ops


class Engine:
    """Runs the steps of one rank on its device state. Used by one thread; preparation.py builds it.

    `on_logits`, where set, gets each step's plan and logits before they are sampled from, for checks against
    other implementations; either all ranks of the last stage set it, or none. `digest`: set on a rank that
    serves with others. open_weights: for features between steps that have a model of their
    own; None: an engine without such features.
    """

    def __init__(self, state: DeviceState, open_weights: OpenWeights | None = None):
        config = state.config
        assert config.max_sequence_tokens is not None and config.max_step_tokens is not None
        self.state = state
        self.model_config, self.config = state.model_config, config
        self.ranks, self.device = state.ranks, state.device
        self.is_asynchronous = state.device.type == "cuda"
        self.on_logits: Callable[[StepPlan, Tensor], None] | None = None
        self.digest: StepDigest | None = None
        ring, columns = (
            max(StepBuffers.RING, self.depth + 2),
            -(-config.max_sequence_tokens // config.block_tokens),
        )
        self.buffers = StepBuffers(config.max_step_tokens, config.slots, columns, state.device, ring)
        self.sampler = StepSampler(state, ring)
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.query_graphs: QueryGraphs | None = None
        #: graphs of decode steps with a part, by its form (PartRun.form)
        self.part_graphs: dict[tuple[type[StepPart], str], DecodeGraphs] = {}
        #: and of small steps with prompts
        self.part_prompt_graphs: dict[tuple[type[StepPart], str], PromptGraphs] = {}
        self.drafter: DeviceDrafter | None = device_drafter(state, self.sampler, self.buffers.words, ring)
        self.step_costs: StepCosts | None = None  # of an engine with drafts
        self.background: list[BackgroundRun] = []  # features that work between steps
        if open_weights is not None:
            self.background = [run(state, open_weights) for run in background_kinds(config).values()]
        self._pulse = torch.zeros(1, dtype=torch.int32, device=state.device)  # written by check_device

    @property
    def micro_batches(self) -> int:
        """Plans in flight that keep all pipeline stages busy, see SchedulerLimits; 1 without stages."""
        return self.ranks.num_stages if self.ranks.is_pipelined else 1

    @property
    def depth(self) -> int:
        """Plans in flight before the loop waits for the oldest."""
        return max(2, self.micro_batches) if self.is_asynchronous else self.micro_batches

    def pin_host_memory(self, on_done: Callable[[], None] = lambda: None) -> None:
        """Start a thread that pins the memory of the host tier, if there is one. Call it once the engine is
        ready.

        on_done: called in the thread at the end.
        """
        if self.state.host is not None:
            self.state.host.pinning.start(on_done)

    @property
    def most_drafts(self) -> int:
        """Maximum number of drafts per row."""
        most = self.config.max_draft_tokens
        return most if self.drafter is None else min(most, self.drafter.most_drafts)

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step, on rank 0 for all ranks. On CUDA it returns while the device works, and the next step
        may be launched before `wait`. A step with plan.late has no result before `sample_late`."""
        if self.ranks.rank == 0:
            self.ranks.broadcast_plan(plan)
        parts: list[PartRun[Any]] = []
        if plan.parts:
            parts = part_runs(self.state, plan)
            with torch.inference_mode():
                for part in parts:
                    part.before()
            if not plan.num_tokens:
                return self._without_rows(parts)
        x = self.state.work.hidden[: plan.num_tokens]  # without the rows that pad a graph's batch
        self.ranks.receive(x)
        if self.drafter is not None:
            self.drafter.begin(plan)
        if not self._replay(plan, parts):
            self.run(self.buffers.load(plan), plan, parts)
        self.ranks.send(x)
        if plan.late:
            return Pending.of_forward(self.ranks, parts, self._event())
        return self._pending(plan, parts)

    def sample_late(self, plan: StepPlan, pending: Pending, rows: list[int], masks: np.ndarray) -> Pending:
        """Sample `rows`, a subset of plan.late, of the newest step, and return the step with its result.

        pending: the return value of `launch` for the plan. masks: (n, W) int32, one per row. Call it before
        the next step is launched, also without rows; rank 0 decides for all ranks.
        """
        if self.ranks.rank == 0:
            self.ranks.broadcast_plan(LateSamples(plan.step, rows, masks))
        with torch.inference_mode():
            self.sampler.sample_late(plan, rows, masks)
        return self._pending(plan, pending.parts)

    def _pending(self, plan: StepPlan, parts: list[PartRun[Any]]) -> Pending:
        """Start the copies of a step's results, all of whose rows are sampled."""
        is_alone = self.ranks.num_stages == 1
        fetched = None if is_alone else self.sampler.fetch(plan)  # other stages propose with the tokens
        if parts:
            with torch.inference_mode():
                for part in parts:
                    part.after_sampling(self.sampler.tokens[: plan.num_samples])
        found = None if self.drafter is None else self.drafter.propose(self._sampled(plan))
        # behind the drafts: copies between kernels keep these apart
        tokens, log_probs, accepted = fetched or self.sampler.fetch(plan)
        on_result = None if self.digest is None else self._take_digest(self.digest, plan)
        return Pending(
            self.ranks,
            tokens,
            log_probs,
            parts,
            self._event(),
            on_result,
            self.ranks.take_posted(),
            self.ranks.raise_if_lost,
            accepted,
            found,
        )

    def _sampled(self, plan: StepPlan) -> SampledStep:
        """Return the newest step, for the drafter."""
        state = self.state
        return SampledStep(plan, self.buffers.latest, state.sampling, state.work, self.sampler)

    def _without_rows(self, parts: list[PartRun[Any]]) -> Pending:
        """Return the pending result of a plan that only copies blocks to or from the host tier."""
        none = torch.zeros(0, dtype=torch.int32)
        return Pending(self.ranks, none, none.float(), parts)

    def _event(self) -> torch.cuda.Event | None:
        """Return an event behind the launched work, None on a device that has done it."""
        if not self.is_asynchronous:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _replay(self, plan: StepPlan, parts: list[PartRun[Any]]) -> bool:
        """Run the plan as a CUDA graph, if there is one for it and all its parts allow it."""
        if self.graphs is None or self.on_logits is not None:
            return False
        apart = [part for part in parts if not part.captures]
        if apart:
            if len(apart) > 1 or plan.queries:
                return False
            key = type(apart[0].part), apart[0].form
            graphs = self.part_graphs.get(key)
            if graphs is not None and graphs.replay(plan) is not None:
                return True
            prompt_graphs = self.part_prompt_graphs.get(key) if apart[0].captures_prompts else None
            return self._replay_prompts(plan, parts, prompt_graphs)
        return self.replay_rows(plan) or (
            not plan.queries and self._replay_prompts(plan, parts, self.prompt_graphs)
        )

    def replay_rows(self, plan: StepPlan) -> bool:
        """Run a plan of decode rows as a CUDA graph, if there is one."""
        if plan.queries:
            return self.query_graphs is not None and self.query_graphs.replay(plan)
        return self.graphs is not None and self.graphs.replay(plan) is not None

    @torch.inference_mode()
    def _replay_prompts(self, plan: StepPlan, parts: list[PartRun[Any]], graphs: PromptGraphs | None) -> bool:
        """Run a plan with prompts as one of the CUDA graphs, if there is one for its shape."""
        if graphs is None:
            return False
        shape = graphs.shapes.of(plan)
        if shape is None:
            return False
        self.sampler.start(plan)
        for part in parts:
            part.pad(shape.decodes, shape.decodes + shape.tokens)
        batch = graphs.replay(plan, shape)
        if parts:
            state, gap = self.state, shape.decodes - plan.num_decodes  # padding of the decode rows
            context = Context(self._step_ops(parts, batch), self.ranks, state.work, batch)
            for part in parts:
                part.after_forward(context, state.work.hidden[gap : gap + plan.num_tokens])
        return True

    @torch.inference_mode()
    def run(
        self,
        batch: Batch,
        plan: StepPlan | None = None,
        parts: Sequence[PartRun[Any]] = (),
        ops: Ops | None = None,
    ) -> None:
        """Run one forward of this stage and, on the last, sample.

        work.hidden holds the output of the previous stage, and afterwards the output of this stage. plan:
        None before serving: no slot starts. parts: the device side of the plan's parts. ops: default: the
        operations of the parts.
        """
        state = self.state
        context = Context(ops or self._step_ops(parts, batch), self.ranks, state.work, batch)
        x = state.work.hidden[: batch.num_tokens]
        if batch.verifies:
            state.ops.place_rows(batch, state.sampling, self.config.block_tokens)
        if self.ranks.stage == 0:
            if batch.num_decodes and not batch.verifies:
                slots = batch.sample_slots if batch.token_slots is None else batch.token_slots
                state.ops.resolve_tokens(
                    batch.token_ids, slots[: batch.num_decodes], state.sampling.last_tokens
                )
            state.model.embed(context, x)
        caches = state.caches
        for part in parts:
            caches = part.caches(caches)
        state.model.forward(context, x, caches)
        if plan is not None:
            self.sampler.start(plan)  # only sampling reads the slots: written while the device works
        for part in parts:
            part.after_forward(context, x)
        if self.drafter is not None:
            self.drafter.follow(batch, x)
        if batch.sample_tokens.shape[0] == 0:
            return
        logits = mask_padding(state.model.logits(context, x), state.vocab) if state.is_last_stage else None
        for part in parts:
            part.after_logits(logits, x)
        if logits is not None:
            if self.on_logits is not None and plan is not None:
                self.on_logits(plan, whole_rows(logits, state.vocab, self.ranks))
            self.sampler.sample(logits, batch)
            if self.drafter is not None:
                self.drafter.sampled(batch)
        elif batch.verifies:
            self.sampler.verified = batch

    def _step_ops(self, parts: Sequence[PartRun[Any]], batch: Batch) -> Ops:
        """Return the operations of a step with these parts."""
        ops = self.state.ops
        for part in parts:
            ops = part.ops(ops, batch)
        return ops

    def _take_digest(self, digest: StepDigest, plan: StepPlan) -> Callable[[StepResult], None]:
        """Digest the state after a step, if its turn has come. Return the callback for its tokens."""
        if not self.is_asynchronous:  # on a GPU only the tokens: reading the state would wait for the device
            state = self.state
            digest.launched(plan, lambda: copied_state(state.sampling, state.work.hidden, plan.num_tokens))
        if self.ranks.is_pipelined:  # few ranks get the tokens: all have them as the ids of a later plan
            return lambda result: digest.committed_ids(plan, plan.token_ids)
        return partial(digest.committed, plan)

    def check_device(self) -> None:
        """Run a tiny kernel and wait for it, so that a device that died is noticed without a step.

        Raises RuntimeError, CUDA's own, for a lost device or a poisoned context. About 20 us on a GPU, no
        cost on a CPU. The loop's thread calls it between steps: it would wait for a step in flight.
        """
        if self.is_asynchronous:
            self._pulse.add_(1)
            self.synchronize()

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        with waiting(self.ranks, GPU):
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """End the threads that load adapters. Collective, after the last step."""
        if self.state.adapters is not None:
            self.state.adapters.close()
