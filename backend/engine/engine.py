"""One rank's model, cache and sampler: runs a plan and returns its tokens."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Callable, Union, cast

import numpy as np
import torch
from torch import Tensor

from tridecode import kernels
from tridecode.backend import models
from tridecode.backend.config import EngineConfig, ModelConfig
from tridecode.backend.engine.adapted_ops import AdaptedOps
from tridecode.backend.engine.adapter_channel import AdapterChannel
from tridecode.backend.engine.adapter_store import AdapterStore, Place
from tridecode.backend.engine.adapters import Loader, NoLoader
from tridecode.backend.engine.agreement import StepDigest, copied_state
from tridecode.backend.engine.graphs import DecodeGraphs, padded_sizes, warm_up_plans
from tridecode.backend.engine.loader import DTYPES, FileWeights
from tridecode.backend.engine.logits import StepExtras, prompt_logits, sample_logits
from tridecode.backend.engine.parallel import Posted, ProcessRanks, SingleRank
from tridecode.backend.engine.peer_memory import PeerSampler, join_peers
from tridecode.backend.engine.plan import BeamRows, StepPlan, StepResult
from tridecode.backend.engine.prompt_store import PromptPlace, PromptStore, load_tasks, prompt_limits
from tridecode.backend.engine.random_weights import RandomWeights
from tridecode.backend.engine.sampling import candidate_rows, copy_slots, start_slots
from tridecode.backend.engine.settings import choose_num_blocks
from tridecode.backend.engine.shadow import Scorer
from tridecode.backend.engine.shadow_load import open_reference
from tridecode.backend.engine.step_buffers import StepBuffers
from tridecode.backend.engine.top_log_probs import PendingTops, TopLogProbsOfStep
from tridecode.backend.engine.vocab_logits import beam_candidates
from tridecode.backend.engine.vocab_sampler import sample
from tridecode.backend.engine.vocab_share import mask_padding, share_vocabulary, whole_rows
from tridecode.backend.models.layers import Context, Weights, Workspace
from tridecode.backend.models.prompt_ini import PromptSection, read_prompt_section
from tridecode.backend.prompt_learning import NO_PROMPT, default_start_id
from tridecode.backend.quantization import stored_specs
from tridecode.backend.weight_layout import share_size, stage_layers
from tridecode.backend.weights import WeightReader
from tridecode.kernels.kv_rounding import CACHE_DTYPES
from tridecode.kernels.ops import Batch, CacheLayer, Ops
from tridecode.kernels.sampling_state import SamplingState

log = logging.getLogger("tridecode.engine")

Ranks = Union[SingleRank, ProcessRanks]

Progress = Callable[[str], None]


@dataclass
class Pending:
    """A step that was launched. `wait` gives its result, once the device has it."""

    tokens: Tensor
    log_probs: Tensor
    extras: StepExtras
    ready: torch.cuda.Event | None = None
    tops: PendingTops | None = None
    candidates: tuple[Tensor, Tensor] | None = None
    on_result: Callable[[StepResult], None] | None = None
    posted: list[Posted] = field(default_factory=list)
    check: Callable[[], None] | None = None  # raises where the device could not compute the step

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not wait."""
        return self.ready is None or self.ready.query()

    def wait(self) -> StepResult:
        for transfer in self.posted:
            transfer.wait()
        if self.ready is not None:
            self.ready.synchronize()
        if self.check is not None:
            self.check()
        result = StepResult(
            self.tokens.numpy().copy(),
            self.log_probs.numpy().copy(),
            top_log_probs=self.tops.result() if self.tops is not None else [],
            **self.extras.on_host(),
        )
        if self.candidates is not None:
            result.candidates = self.candidates[0].numpy(), self.candidates[1].numpy()
        if self.on_result is not None:
            self.on_result(result)
        return result


class Engine:
    """Owns the device: weights, cache blocks, sampling state, buffers. Used by one thread.

    config is resolved (settings.resolve). `on_logits`, where set, sees the logits of each step and its plan
    before they are sampled from: for checks against other implementations. All ranks of the last stage set
    it, or none. vocab: this rank's ids where the tensor ranks share the vocabulary, else None. `digest`: of a
    rank of several that serves. shadow_weights: of the 16-bit reference of shadow runs, if it has its own.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        weights: Weights,
        ops: Ops,
        ranks: Ranks,
        device: torch.device,
        shadow_weights: Weights | None = None,
    ):
        assert config.max_sequence_tokens is not None and config.max_step_tokens is not None
        self.model_config, self.config, self.ranks, self.device = model, config, ranks, device
        self.dtype = DTYPES[config.data_type]
        self.ops = ops
        self.model = models.family(model.family).model(model, weights, ranks, config.max_sequence_tokens)
        self.adapters: AdapterStore | None = None
        none = PromptSection(NO_PROMPT, default_start_id(model.vocab_size, model.end_id), [])
        self.prompt_limits = prompt_limits(none, model, self.dtype, None)
        self.prompts = PromptStore(self._prompt_place())
        self.is_asynchronous = device.type == "cuda"
        self.is_last_stage = ranks.stage == ranks.num_stages - 1
        self.on_logits: Callable[[StepPlan, Tensor], None] | None = None
        self.digest: StepDigest | None = None
        rows = config.slots
        self.vocab = self.model.vocab
        self._shared = None  # what samples on a GPU, where the ranks share the vocabulary
        if self.vocab is not None and isinstance(ranks, ProcessRanks) and ranks.peers is not None:
            self._shared = PeerSampler(ops, ranks.peers, self.vocab)
        columns = model.vocab_size if self.vocab is None else self.vocab.size
        self.work = Workspace.allocate(
            model, config.max_step_tokens, rows, ranks.tensor_size, self.dtype, device, columns
        )
        self.state = SamplingState.allocate(
            rows, config.max_sequence_tokens, columns, config.max_bad_word_tokens, device
        )
        self.ops.reserve(
            config.max_step_tokens,
            self._widest(),
            rows,
            config.max_sequence_tokens,
            columns,
            self._context_bytes(),
        )
        columns = -(-config.max_sequence_tokens // config.block_tokens)
        self.buffers = StepBuffers(config.max_step_tokens, rows, columns, device)
        self._tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._log_probs = torch.zeros(rows, dtype=torch.float32, device=device)
        self._pulse = torch.zeros(1, dtype=torch.int32, device=device)  # written by check_device
        # pinned host copies of a step's results; at most two steps are in flight
        self._results = [
            (torch.zeros(rows, dtype=torch.int32).pin_memory(), torch.zeros(rows).pin_memory())
            for _ in range(4 if self.is_asynchronous else 0)
        ]
        self._tops: PendingTops | None = None  # of the step that is being launched
        self.graphs: DecodeGraphs | None = None
        self.shadow = Scorer(self, shadow_weights) if config.shadow_share else None
        ranks.barrier("loaded")  # with a limit and a diagnosis, which what follows has not
        if self.is_asynchronous:
            self._warm_up()
        self.num_blocks = ranks.smallest(choose_num_blocks(config, self._block_bytes(), device))
        self.caches = self.allocate_cache(self.num_blocks)
        self.graphs = self._capture() if self._can_capture() else None

    @classmethod
    def load(
        cls,
        directory: Path,
        model: ModelConfig,
        config: EngineConfig,
        ranks: Ranks,
        device: torch.device,
        progress: Progress | None = None,
        phase: Progress | None = None,
    ) -> Engine:
        """An engine over the weight files of `directory`. progress: told each tensor's name. phase: told what
        begins. Raises WeightFileError, ConfigError,
        UnsupportedError."""
        dtype, ops = DTYPES[config.data_type], kernels.select(device, config.batch_invariant)
        has_peers = False
        if device.type == "cuda" and isinstance(ranks, ProcessRanks) and ranks.tensor_size > 1:
            ranks.barrier("kernels")  # with a limit and a diagnosis
            ranks.peers = join_peers(ranks, ops, config, model.hidden_size, dtype)
            has_peers = ranks.peers is not None
        specs = models.family(model.family).weight_specs(model)
        specs = share_vocabulary(specs, ranks.tensor_size, device.type, has_peers)
        place, rounding = (ranks.tensor_rank, ranks.tensor_size), (config.int8_mode, config.int8_head)
        if config.weights == "random":
            made = RandomWeights(specs, 0, *place, dtype, ops, device, model.quantization, *rounding)
            return cls(model, config, made, ops, ranks, device)
        mine = stage_layers(model.num_layers, ranks.stage, ranks.num_stages)
        specs = [spec for spec in specs if spec.layer is None or spec.layer in mine]
        if phase is not None:
            phase(f"verifying weights ({config.verify_weights})")
        reader = WeightReader(directory, model)
        reader.verify(config.verify_weights, stored_specs(specs, model.quantization))
        weights = FileWeights(reader, specs, *place, dtype, ops, device, progress, *rounding)
        try:
            reference = open_reference(directory, model, config, ops, device)
            try:
                engine = cls(model, config, weights, ops, ranks, device, reference)
            finally:
                if reference is not None:
                    reference.close()
        finally:
            weights.close()
        section = read_prompt_section(directory, model)
        engine.prompt_limits = prompt_limits(section, model, engine.dtype, directory)
        engine.prompts = load_tasks(reader, engine.prompt_limits, engine._prompt_place())
        engine._serve_adapters(directory, weights)
        return engine

    def _prompt_place(self) -> PromptPlace:
        scale = self.model.embedding_scale
        return PromptPlace(self.model_config, self.ranks, self.dtype, self.device, scale)

    def _serve_adapters(self, directory: Path, weights: Weights) -> None:
        """Open the folder of adapters, if config.lora_path names one. Collective: all ranks call it."""
        config, ranks = self.config, self.ranks
        if config.lora_path == "none" or config.batch_invariant:
            return
        place = Place(
            weights.specs,
            weights.linears,
            ranks.tensor_rank,
            ranks.tensor_size,
            ranks.num_stages,
            self.dtype,
            self.device,
        )
        world = ranks.tensor_size * ranks.num_stages
        channel = AdapterChannel(ranks.rank, world) if world > 1 else None
        self.adapters = AdapterStore(
            Path(config.lora_path), directory, place, config.max_loras, config.max_lora_rank, channel
        )

    @property
    def loader(self) -> Loader:
        """Of adapters, for the scheduler."""
        if self.adapters is not None:
            return self.adapters
        if self.config.batch_invariant and self.config.lora_path != "none":
            return NoLoader("this engine is batch_invariant, which adapters are not (config.pbtxt)")
        return NoLoader()

    @property
    def micro_batches(self) -> int:
        """Plans in flight that keep all pipeline stages busy, see SchedulerLimits; 1: no stages."""
        return self.ranks.num_stages if self.ranks.is_pipelined else 1

    @property
    def depth(self) -> int:
        """Plans in flight before the oldest is waited for."""
        return 2 if self.is_asynchronous else self.micro_batches

    def close(self) -> None:
        """End the threads that load adapters. Collective, after the last step."""
        if self.adapters is not None:
            self.adapters.close()

    def _widest(self) -> int:
        """Columns of the widest product of this rank."""
        model, size = self.model_config.largest_layer(), self.ranks.tensor_size
        heads = model.num_heads // size + 2 * share_size(model.num_kv_heads, size)
        mlp = self.model_config.mlp_share(size)
        return max(heads * model.head_size, 2 * mlp, model.hidden_size)

    def _block_shapes(self) -> list[tuple[int, int, int, int]]:
        """Of a block in the cache of each layer of this stage."""
        tokens, size = self.config.block_tokens, self.ranks.tensor_size
        stage = stage_layers(self.model_config.num_layers, self.ranks.stage, self.ranks.num_stages)
        layers = [self.model_config.of_layer(layer) for layer in stage]
        return [(2, share_size(layer.num_kv_heads, size), tokens, layer.head_size) for layer in layers]

    def _context_bytes(self) -> int:
        """Of the longest sequence's keys and values in one layer, expanded; 0: no cache of 8 bits."""
        assert self.config.max_sequence_tokens is not None
        if self.config.kv_cache_dtype not in CACHE_DTYPES:
            return 0
        blocks = -(-self.config.max_sequence_tokens // self.config.block_tokens)
        return blocks * max(math.prod(shape) for shape in self._block_shapes()) * self.dtype.itemsize

    def _block_bytes(self) -> int:
        """Of a block in the caches of all layers of this stage, with its scales."""
        layers = self.allocate_cache(1, torch.device("meta"))
        return sum(tensor.nbytes for layer in layers for tensor in layer.tensors)

    def allocate_cache(
        self, num_blocks: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> list[CacheLayer]:
        """Empty caches of all layers of this stage. device: None: the engine's. dtype: None: that of
        kv_cache_dtype."""
        dtype = dtype or CACHE_DTYPES.get(self.config.kv_cache_dtype, self.dtype)
        shapes = [(num_blocks, *shape) for shape in self._block_shapes()]
        return [_cache_layer(shape, dtype, device or self.device) for shape in shapes]

    def _warm_up(self) -> None:
        """Run the largest steps, so that libraries allocate their buffers before the cache takes the rest of
        the memory."""
        self.caches = self.allocate_cache(1)
        longest = self.config.max_sequence_tokens
        assert longest is not None
        for plan in warm_up_plans(self.work.hidden.shape[0], self.config.slots, longest):
            self._run(self.buffers.load(plan))
        if self.shadow is not None:
            self.shadow.warm_up()
        torch.cuda.synchronize(self.device)
        self.ranks.raise_if_lost()

    def _can_capture(self) -> bool:
        if not self.is_asynchronous or not self.config.cuda_graphs:
            return False
        if self.ranks.num_stages > 1:
            log.info("no CUDA graphs: padded rows would write tokens on pipeline stages that do not sample")
            return False
        if all(self.ops.captures(heads) for heads in self.model.heads):
            return True
        log.info("no CUDA graphs: attention with a window or a soft cap runs through torch")
        return False

    def _capture(self) -> DecodeGraphs:
        """Decode graphs for every padded number of rows."""
        longest = self.config.max_sequence_tokens
        assert longest is not None

        def load(plan: StepPlan, rows: int) -> Batch:
            return self.buffers.load_padded(plan, rows, longest)

        return DecodeGraphs(padded_sizes(self.config.slots), load, self._run)

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step, on rank 0 for all ranks. On CUDA it returns while the device works, and the next step
        may be launched before `wait`."""
        if self.ranks.rank == 0:
            self.ranks.broadcast_plan(plan)
        extras = StepExtras()
        if self.adapters is not None:
            self.adapters.drop(plan.drop_adapters)
        if plan.prompts is not None:
            self.prompts.prepare(plan.prompts, self.caches)
        self._copy_for_forks(plan)
        if self.ranks.is_pipelined:  # the results of the steps in flight arrive in the tensors of each
            self._tokens, self._log_probs = torch.zeros_like(self._tokens), torch.zeros_like(self._log_probs)
        count, self._tops = plan.num_samples, None
        if not self._replay(plan):
            extras = self._run(self.buffers.load(plan), plan)
        candidates = self._candidates(plan.beams) if plan.beams is not None else None
        on_result = None if self.digest is None else self._take_digest(self.digest, plan)
        if not self.is_asynchronous:
            tokens, log_probs = self._tokens[:count], self._log_probs[:count]
            posted = self.ranks.take_posted()
            return Pending(tokens, log_probs, extras, None, self._tops, candidates, on_result, posted)
        tokens, log_probs = self._results[plan.step % len(self._results)]
        tokens[:count].copy_(self._tokens[:count], non_blocking=True)
        log_probs[:count].copy_(self._log_probs[:count], non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Pending(
            tokens[:count],
            log_probs[:count],
            extras,
            ready,
            self._tops,
            candidates,
            on_result,
            check=self.ranks.raise_if_lost,
        )

    def _take_digest(self, digest: StepDigest, plan: StepPlan) -> Callable[[StepResult], None]:
        """Digest the state after a step, if its turn has come; returns what digests its tokens."""
        if not self.is_asynchronous:  # on a GPU only the tokens: reading the state would wait for the device
            digest.launched(plan, lambda: copied_state(self.state, self.work.hidden, plan.num_tokens))
        if self.ranks.is_pipelined:  # few ranks get the tokens: all have them as the ids of a later plan
            return lambda result: digest.committed_ids(plan, plan.token_ids)
        return partial(digest.committed, plan)

    def _replay(self, plan: StepPlan) -> bool:
        """Run the plan as a graph, if there is one for it. A step with adapters has none, nor has one that
        returns logits or top log probs."""
        if self.graphs is None or self.on_logits is not None or plan.adapters is not None:
            return False
        if plan.beams is not None and not self.is_last_stage:
            return False  # its graph would write the tokens of slot -1
        if plan.logit_samples or plan.top_log_probs is not None:
            return False
        return self.graphs.replay(plan) is not None

    def _step_ops(self, plan: StepPlan | None) -> Ops:
        """The operations of a step: with its virtual tokens and the deltas of its adapters, if it has any."""
        if plan is None:
            return self.ops
        ops = self.ops if plan.prompts is None else self.prompts.ops(self.ops, plan.prompts.virtual)
        if plan.adapters is None:
            return ops
        assert self.adapters is not None
        numbers = set(plan.adapters[plan.adapters >= 0].tolist())
        tables = {number: self.adapters.table(number) for number in numbers}
        return cast(Ops, AdaptedOps(ops, plan, tables, self.device))

    @torch.inference_mode()
    def _candidates(self, beams: BeamRows) -> tuple[Tensor, Tensor]:
        """The most likely tokens of the plan's beams and their log probabilities, on the way to the host.
        `sample` has left the logits of these rows as they were."""
        shape = (len(beams.rows), min(beams.width, self.model_config.vocab_size))
        ids = torch.zeros(shape, dtype=torch.int32, device=self.device)
        log_probs = torch.zeros(shape, dtype=torch.float32, device=self.device)
        if self.is_last_stage:
            if self.vocab is None:
                wanted = candidate_rows(beams, self.device)
                self.ops.candidates(self.work.logits, wanted, ids=ids, log_probs=log_probs)
            else:
                beam_candidates(self.work.logits, beams, self.vocab, self.ranks, ids, log_probs)
        self.ranks.share_tokens(ids, log_probs)
        if not self.is_asynchronous:
            return ids, log_probs
        host = torch.empty(shape, dtype=torch.int32, pin_memory=True), torch.empty(shape, pin_memory=True)
        host[0].copy_(ids, non_blocking=True)
        host[1].copy_(log_probs, non_blocking=True)
        return host

    @torch.inference_mode()
    def _copy_for_forks(self, plan: StepPlan) -> None:
        """Execute the plan's copies; all sources are read before any destination is written."""
        if plan.block_copies:
            sources, destinations = torch.tensor(plan.block_copies, device=self.device).unbind(1)
            for cache in self.caches:
                for tensor in cache.tensors:
                    tensor[destinations] = tensor[sources]
        if plan.slot_copies:
            copy_slots(self.state, *zip(*plan.slot_copies))

    def check_device(self) -> None:
        """Make the device do a little work and wait for it: a device that died is noticed without a step.

        Raises RuntimeError, CUDA's own, for a lost device or a poisoned context. About 20 us on
        a GPU, no cost on a CPU. For the loop's thread between steps: it would wait for a step in flight.
        """
        if self.is_asynchronous:
            self._pulse.add_(1)
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def _run(self, batch: Batch, plan: StepPlan | None = None) -> StepExtras:
        """One forward of this stage and, on the last, sampling. Returns what else the plan wants."""
        context = Context(self._step_ops(plan), self.ranks, self.work, batch)
        x = self.work.hidden[: batch.num_tokens]
        if self.ranks.stage == 0:
            if batch.num_decodes:
                self.ops.resolve_tokens(
                    batch.token_ids, batch.sample_slots[: batch.num_decodes], self.state.last_tokens
                )
            self.model.embed(context, x)
        else:
            self.ranks.receive(x)
        self.model.forward(context, x, self.caches)
        self.ranks.send(x)
        if plan is not None and plan.starts:  # only sampling reads it: written while the device works
            start_slots(self.state, plan.starts, 0 if self.vocab is None else self.vocab.first)
        extras = StepExtras()
        if plan is not None:
            extras.embeddings = self._context_embeddings(x, plan)
            extras.prompt_logits = prompt_logits(
                self.model, context, x, plan, self.ranks, self.model_config.vocab_size
            )
        count = batch.sample_tokens.shape[0]
        tokens, log_probs = self._tokens[:count], self._log_probs[:count]
        if count == 0:
            return extras
        tops = None
        if plan is not None and plan.top_log_probs is not None:
            tops = TopLogProbsOfStep(plan, self.model_config.vocab_size, self.device, self.ranks, self.vocab)
        logits = mask_padding(self.model.logits(context, x), self.vocab) if self.is_last_stage else None
        if plan is not None and plan.logit_samples:
            extras.sample_logits = sample_logits(
                logits, plan, self.ranks, self.vocab, self.model_config.vocab_size, x
            )
        if logits is not None:
            if tops is not None:
                tops.before(logits)
            if self.on_logits is not None and plan is not None:
                self.on_logits(plan, whole_rows(logits, self.vocab, self.ranks))
            self._sample(logits, batch.sample_slots, tokens, log_probs)
        self.ranks.share_tokens(tokens, log_probs)
        if tops is not None:
            self._tops = tops.after(tokens)
        if not self.is_last_stage and not self.ranks.is_pipelined:
            self._keep_tokens(batch.sample_slots, tokens.clamp(min=0), plan)
        return extras

    def _sample(self, logits: Tensor, slots: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        results = {"tokens": tokens, "log_probs": log_probs}
        if self.vocab is None:
            self.ops.sample(logits, slots, self.state, **results)
        elif self._shared is None:
            sample(logits, slots, self.state, self.vocab, self.ranks, **results)
        else:
            self._shared.sample(logits, slots, self.state, **results)

    def _keep_tokens(self, slots: Tensor, tokens: Tensor, plan: StepPlan | None) -> None:
        """Write last_tokens on a stage that does not sample. Slots of beams are -1."""
        if plan is not None and plan.beams is not None:
            rows = np.delete(np.arange(len(slots)), plan.beams.rows)
            kept = torch.from_numpy(rows).to(self.device)
            slots, tokens = slots[kept], tokens[kept]
        self.state.last_tokens[slots.long()] = tokens

    def _context_embeddings(self, x: Tensor, plan: StepPlan) -> list[Tensor]:
        """(C,) float32 sums of the last layer's output over the prompts' rows that the plan names."""
        sums = []
        for row, count in plan.embeds:
            first = plan.query_starts[row]
            sums.append(x[first : first + count].float().sum(0))
            self.ranks.share_sums(sums[-1])
        return sums


def _cache_layer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> CacheLayer:
    """An empty cache. shape: of its blocks, (N, 2, K, P, D); they have scales where dtype has 8 bits."""
    blocks = _zeros(shape, dtype, device)
    return CacheLayer(blocks, _zeros(shape[:-1], torch.float32, device) if dtype.itemsize == 1 else None)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU as pages that take no memory before they are written, which torch.zeros would
    touch."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    words = np.zeros(shape, {1: np.int8, 2: np.int16, 4: np.int32}[dtype.itemsize])
    return torch.from_numpy(words).view(dtype)
