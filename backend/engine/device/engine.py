"""One rank's model, cache and sampler: runs a plan and returns its tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable, Union

import numpy as np
import torch
from torch import Tensor

from tridecode import kernels
from tridecode.backend import models
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.adapters.channel import AdapterChannel
from tridecode.backend.engine.adapters.store import AdapterStore, Place
from tridecode.backend.engine.adapters.table import Loader, NoLoader
from tridecode.backend.engine.device.loader import DTYPES, FileWeights, unrounded_weights
from tridecode.backend.engine.device.parts.background_run import BackgroundRun, OpenWeights
from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.device.parts.table import background_kinds, part_runs
from tridecode.backend.engine.device.random_weights import RandomWeights
from tridecode.backend.engine.device.resolved_settings import choose_num_blocks
from tridecode.backend.engine.device.sampling import start_slots
from tridecode.backend.engine.prompt_tables.store import PromptPlace, PromptStore, load_tasks, prompt_limits
from tridecode.backend.engine.ranks.agreement import StepDigest, copied_state
from tridecode.backend.engine.ranks.exchange import waiting
from tridecode.backend.engine.ranks.parallel import GPU, Posted, ProcessRanks, SingleRank
from tridecode.backend.engine.ranks.peer_memory import PeerSampler, join_peers
from tridecode.backend.engine.ranks.vocab_sampler import sample
from tridecode.backend.engine.ranks.vocab_share import mask_padding, share_vocabulary, whole_rows
from tridecode.backend.engine.step.decode_graphs import Capturer, DecodeGraphs, padded_sizes, warm_up_plans
from tridecode.backend.engine.step.plan import StepPlan, StepResult
from tridecode.backend.engine.step.prefill_graphs import PromptGraphs, step_shapes, tokens_of_graphs
from tridecode.backend.engine.step.results import empty_host, to_first, to_host
from tridecode.backend.engine.step.step_buffers import StepBuffers, StepShape
from tridecode.backend.models.context import Context, Workspace
from tridecode.backend.models.prompt_ini import PromptSection, read_prompt_section
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import share_size, stage_layers
from tridecode.backend.weights.quantization import stored_specs
from tridecode.backend.weights.reader import WeightReader
from tridecode.backend.wire.prompt_learning import NO_PROMPT, default_start_id
from tridecode.kernels.formats.kv_rounding import CACHE_DTYPES
from tridecode.kernels.operands import Batch, CacheLayer
from tridecode.kernels.ops import Ops
from tridecode.kernels.sampling_state import SamplingState

log = logging.getLogger("tridecode.engine")

Ranks = Union[SingleRank, ProcessRanks]

Progress = Callable[[str], None]


@dataclass
class Pending:
    """A step that was launched. `wait` gives its result, once the device has it."""

    ranks: Ranks
    tokens: Tensor
    log_probs: Tensor
    parts: list[PartRun[Any]]
    ready: torch.cuda.Event | None = None
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
            with waiting(self.ranks, GPU):
                self.ready.synchronize()
        if self.check is not None:
            self.check()
        result = StepResult(self.tokens.numpy().copy(), self.log_probs.numpy().copy())
        if self.parts:
            result.parts = [part.result() for part in self.parts]
        if self.on_result is not None:
            self.on_result(result)
        return result


class Engine:
    """Owns the device: weights, cache blocks, sampling state, buffers. Used by one thread.

    config is resolved (settings.resolve). `on_logits`, where set, sees the logits of each step and its plan
    before they are sampled from: for checks against other implementations. All ranks of the last stage set
    it, or none. vocab: this rank's ids where the tensor ranks share the vocabulary, else None. `digest`: of a
    rank of several that serves. open_weights: for features between steps that have a model of their own.
    phase: told what begins.
    """

    #: types of devices whose tensor ranks map each other's memory
    PEER_DEVICES = frozenset({"cuda"})

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        weights: Weights,
        ops: Ops,
        ranks: Ranks,
        device: torch.device,
        open_weights: OpenWeights | None = None,
        phase: Progress = lambda what: None,
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
        ring = max(StepBuffers.RING, self.depth + 2)
        self.buffers = StepBuffers(config.max_step_tokens, rows, columns, device, ring)
        self._tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._log_probs = torch.zeros(rows, dtype=torch.float32, device=device)
        self._pulse = torch.zeros(1, dtype=torch.int32, device=device)  # written by check_device
        # a step's results on the host, in turns: more than there are steps in flight
        self._results = [
            (empty_host((rows,), torch.int32, device), empty_host((rows,), torch.float32, device))
            for _ in range(ring)
        ]
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.background: list[BackgroundRun] = []  # features that work between steps
        if open_weights is not None:
            self.background = [run(self, open_weights) for run in background_kinds(config).values()]
        self._prepare(phase)

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
        phase = phase or (lambda what: None)
        if background_kinds(config):
            from tridecode.backend.engine.device import memory  # it runs this engine's constructor

            memory.check_background(model, config, device)
        has_peers = False
        if device.type in cls.PEER_DEVICES and ranks.tensor_size > 1:
            ranks.barrier("the start of the joining of peers")  # with a limit and a diagnosis
            phase("the joining of peers")
            has_peers = cls._join_peers(ranks, ops, config, model)
        specs = models.family(model.family).weight_specs(model)
        specs = share_vocabulary(specs, ranks.tensor_size, device.type, has_peers)
        place, rounding = (ranks.tensor_rank, ranks.tensor_size), (config.int8_mode, config.int8_head)
        if config.weights == "random":
            made = RandomWeights(specs, 0, *place, dtype, ops, device, model.quantization, *rounding)
            return cls(model, config, made, ops, ranks, device, phase=phase)
        mine = stage_layers(model.num_layers, ranks.stage, ranks.num_stages)
        specs = [spec for spec in specs if spec.layer is None or spec.layer in mine]
        phase(f"verifying weights ({config.verify_weights})")
        reader = WeightReader(directory, model)
        reader.verify(config.verify_weights, stored_specs(specs, model.quantization))
        weights = FileWeights(reader, specs, *place, dtype, ops, device, progress, *rounding)
        try:
            others = partial(unrounded_weights, directory, config, ops, device)
            engine = cls(model, config, weights, ops, ranks, device, others, phase)
        finally:
            weights.close()
        phase("loading prompt tables and adapters")
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
        return max(2, self.micro_batches) if self.is_asynchronous else self.micro_batches

    def close(self) -> None:
        """End the threads that load adapters. Collective, after the last step."""
        if self.adapters is not None:
            self.adapters.close()

    def _widest(self) -> int:
        """Columns of the widest product of this rank, and twice those of what is normalised: the scratch of
        an input has a byte a column."""
        model, size = self.model_config.largest_layer(), self.ranks.tensor_size
        heads = model.num_heads // size + 2 * share_size(model.num_kv_heads, size)
        mlp = max(max(layer.up.weight.shape[0], layer.down.weight.shape[1]) for layer in self.model.layers)
        return max(heads * model.head_size, mlp, 2 * model.hidden_size)

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

    def _prepare(self, phase: Progress) -> None:
        """What follows the loading, in phases that all ranks begin together: the wait for others at each has
        a limit and a diagnosis, which the exchanges within have not."""

        def begin(what: str) -> None:
            self.ranks.barrier(f"the start of {what}")
            phase(what)

        if self.is_asynchronous:
            begin("the warm-up")
            self._warm_up(phase)
        begin("the allocation of the cache")
        self.num_blocks = self.ranks.smallest(
            choose_num_blocks(self.config, self._block_bytes(), self.device)
        )
        self.caches = self.allocate_cache(self.num_blocks)
        if self._can_capture():
            begin("the capture of CUDA graphs")
            self._capture(phase)
        self.ranks.barrier("the end of the start")

    @staticmethod
    def _join_peers(ranks: Ranks, ops: Ops, config: EngineConfig, model: ModelConfig) -> bool:
        """Whether the tensor ranks have mapped each other's memory. Collective."""
        assert isinstance(ranks, ProcessRanks)
        ranks.peers = join_peers(ranks, ops, config, model.hidden_size, DTYPES[config.data_type])
        return ranks.peers is not None

    def _synchronize(self) -> None:
        with waiting(self.ranks, GPU):
            torch.cuda.synchronize(self.device)

    def _warm_up(self, phase: Progress) -> None:
        """Run the largest steps, so that libraries allocate their buffers before the cache takes the rest of
        the memory."""
        self.caches = self.allocate_cache(1)
        longest = self.config.max_sequence_tokens
        assert longest is not None
        plans = warm_up_plans(self.work.hidden.shape[0], self.config.slots, longest)
        for number, plan in enumerate(plans, 1):
            phase(f"the warm-up, step {number} of {len(plans)}")
            x = self.work.hidden[: plan.num_tokens]
            self.ranks.receive(x)
            self._run(self.buffers.load(plan))
            self.ranks.send(x)
        for run in self.background:
            run.warm_up()
        self.ranks.barrier("the end of the warm-up")  # all have launched it
        self._synchronize()
        self.ranks.raise_if_lost()

    def _can_capture(self) -> bool:
        if not self.is_asynchronous or not self.config.cuda_graphs:
            return False
        if self.ranks.num_stages > 1 and not self.ranks.is_pipelined:
            log.info("no CUDA graphs: padded rows would write tokens on pipeline stages that do not sample")
            return False
        if not self.ranks.captures(self.work.hidden[: self.config.slots]):
            log.info("no CUDA graphs: the sums over the tensor ranks go through host memory")
            return False
        if all(self.ops.captures(heads) for heads in self.model.heads):
            return True
        log.info("no CUDA graphs: attention with a window or a soft cap runs through torch")
        return False

    def _capture(self, phase: Progress) -> None:
        """Graphs of decoding steps for every padded number of rows, and of small steps with prompts."""
        config, longest = self.config, self.config.max_sequence_tokens
        assert longest is not None and config.max_step_tokens is not None

        def load(plan: StepPlan, rows: int) -> Batch:
            return self.buffers.load_padded(plan, rows, longest)

        def load_mixed(plan: StepPlan, shape: StepShape) -> Batch:
            return self.buffers.load_mixed(plan, shape, longest)

        capture = Capturer(self._run, phase, self._synchronize)
        self.graphs = DecodeGraphs(padded_sizes(config.slots), load, capture)
        if self.ranks.num_stages > 1:  # a stage receives the rows of the plan, without padding between them
            return
        products = [(layer.qkv, layer.dense, layer.up, layer.down) for layer in self.model.layers]
        weights = sum(math.prod(one.weight.shape) for layer in products for one in layer)
        shapes = [
            shape
            for shape in step_shapes(config.slots, tokens_of_graphs(weights, config.max_step_tokens))
            if self.ranks.captures(self.work.hidden[: shape.decodes + shape.tokens])
        ]
        only_fresh = config.kv_cache_dtype in CACHE_DTYPES
        self.prompt_graphs = PromptGraphs(shapes, load_mixed, capture, only_fresh)

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step, on rank 0 for all ranks. On CUDA it returns while the device works, and the next step
        may be launched before `wait`."""
        if self.ranks.rank == 0:
            self.ranks.broadcast_plan(plan)
        parts: list[PartRun[Any]] = []
        if plan.parts:
            parts = part_runs(self, plan)
            with torch.inference_mode():
                for part in parts:
                    part.before()
        x = self.work.hidden[: plan.num_tokens]  # the rows of the plan alone: a graph's batch may have more
        self.ranks.receive(x)
        if not self._replay(plan):
            self._run(self.buffers.load(plan), plan, parts)
        self.ranks.send(x)
        tokens, log_probs = self._fetch_tokens(plan)
        if parts:
            with torch.inference_mode():
                for part in parts:
                    part.after_sampling(self._tokens[: plan.num_samples])
        on_result = None if self.digest is None else self._take_digest(self.digest, plan)
        ready = None
        if self.is_asynchronous:
            ready = torch.cuda.Event()
            ready.record()
        return Pending(
            self.ranks,
            tokens,
            log_probs,
            parts,
            ready,
            on_result,
            self.ranks.take_posted(),
            self.ranks.raise_if_lost,
        )

    @torch.inference_mode()
    def _fetch_tokens(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """The step's tokens and their log probabilities, (R,) each, on the way to the host."""
        count, turn = plan.num_samples, self._results[plan.step % len(self._results)]
        tokens, log_probs = self._tokens[:count], self._log_probs[:count]
        if not count:
            return turn[0][:0], turn[1][:0]
        if self.ranks.is_pipelined:
            fetch = partial(to_first, self.ranks, shape=(count,), device=self.device)
            return (
                fetch(tokens, dtype=torch.int32, host=turn[0][:count]),
                fetch(log_probs, dtype=torch.float32, host=turn[1][:count]),
            )
        if self.ranks.num_stages > 1:
            self.ranks.share(tokens)
            self.ranks.share(log_probs)
            if not self.is_last_stage:
                self._keep_tokens(plan, tokens)
        return to_host(tokens, turn[0][:count]), to_host(log_probs, turn[1][:count])

    def _keep_tokens(self, plan: StepPlan, tokens: Tensor) -> None:
        """Write last_tokens on a stage that does not sample. Slots of beams are -1."""
        slots = np.repeat(plan.slots, plan.samples)
        rows = np.flatnonzero(slots >= 0)
        kept, places = torch.from_numpy(rows).to(self.device), torch.from_numpy(slots[rows]).to(self.device)
        self.state.last_tokens[places.long()] = tokens[kept].clamp(min=0)

    def _take_digest(self, digest: StepDigest, plan: StepPlan) -> Callable[[StepResult], None]:
        """Digest the state after a step, if its turn has come; returns what digests its tokens."""
        if not self.is_asynchronous:  # on a GPU only the tokens: reading the state would wait for the device
            digest.launched(plan, lambda: copied_state(self.state, self.work.hidden, plan.num_tokens))
        if self.ranks.is_pipelined:  # few ranks get the tokens: all have them as the ids of a later plan
            return lambda result: digest.committed_ids(plan, plan.token_ids)
        return partial(digest.committed, plan)

    def _replay(self, plan: StepPlan) -> bool:
        """Run the plan as a graph, if there is one for it and all its parts allow it."""
        if self.graphs is None or self.on_logits is not None:
            return False
        if plan.parts and not all(part.captures for part in plan.parts):
            return False
        return self.graphs.replay(plan) is not None or self._replay_prompts(plan)

    @torch.inference_mode()
    def _replay_prompts(self, plan: StepPlan) -> bool:
        """Run a plan with prompts as a graph, if there is one for its shape."""
        if self.prompt_graphs is None:
            return False
        shape = self.prompt_graphs.shapes.of(plan)
        if shape is None:
            return False
        self._start_slots(plan)
        self.prompt_graphs.replay(plan, shape)
        return True

    @property
    def first_id(self) -> int:
        return 0 if self.vocab is None else self.vocab.first

    def _start_slots(self, plan: StepPlan) -> None:
        if plan.starts:
            start_slots(self.state, plan.starts, self.first_id)

    def check_device(self) -> None:
        """Make the device do a little work and wait for it: a device that died is noticed without a step.

        Raises RuntimeError, CUDA's own, for a lost device or a poisoned context. About 20 us on
        a GPU, no cost on a CPU. For the loop's thread between steps: it would wait for a step in flight.
        """
        if self.is_asynchronous:
            self._pulse.add_(1)
            self._synchronize()

    def _step_ops(self, parts: Sequence[PartRun[Any]]) -> Ops:
        """The operations of a step with these parts."""
        ops = self.ops
        for part in parts:
            ops = part.ops(ops)
        return ops

    @torch.inference_mode()
    def _run(self, batch: Batch, plan: StepPlan | None = None, parts: Sequence[PartRun[Any]] = ()) -> None:
        """One forward of this stage and, on the last, sampling. parts: of the plan.

        The output of the stage before is in work.hidden, and this one's will be.
        """
        context = Context(self._step_ops(parts), self.ranks, self.work, batch)
        x = self.work.hidden[: batch.num_tokens]
        if self.ranks.stage == 0:
            if batch.num_decodes:
                self.ops.resolve_tokens(
                    batch.token_ids, batch.sample_slots[: batch.num_decodes], self.state.last_tokens
                )
            self.model.embed(context, x)
        self.model.forward(context, x, self.caches)
        if plan is not None:
            self._start_slots(plan)  # only sampling reads them: written while the device works
        for part in parts:
            part.after_forward(context, x)
        count = batch.sample_tokens.shape[0]
        if count == 0:
            return
        logits = mask_padding(self.model.logits(context, x), self.vocab) if self.is_last_stage else None
        for part in parts:
            part.after_logits(logits, x)
        if logits is not None:
            if self.on_logits is not None and plan is not None:
                self.on_logits(plan, whole_rows(logits, self.vocab, self.ranks))
            self._sample(logits, batch.sample_slots, self._tokens[:count], self._log_probs[:count])

    def _sample(self, logits: Tensor, slots: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        results = {"tokens": tokens, "log_probs": log_probs}
        if self.vocab is None:
            self.ops.sample(logits, slots, self.state, **results)
        elif self._shared is None:
            sample(logits, slots, self.state, self.vocab, self.ranks, **results)
        else:
            self._shared.sample(logits, slots, self.state, **results)


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
