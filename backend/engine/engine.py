"""One rank's model, cache and sampler: runs a plan and returns its tokens."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
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
from tridecode.backend.engine.graphs import DecodeGraphs, padded_sizes, warm_up_plans
from tridecode.backend.engine.loader import DTYPES, FileWeights
from tridecode.backend.engine.parallel import ProcessRanks, SingleRank
from tridecode.backend.engine.plan import StepPlan, StepResult
from tridecode.backend.engine.random_weights import RandomWeights
from tridecode.backend.engine.sampling import copy_slots, start_slots
from tridecode.backend.engine.settings import choose_num_blocks
from tridecode.backend.engine.step_buffers import StepBuffers
from tridecode.backend.models.layers import Context, Weights, Workspace
from tridecode.backend.weight_layout import share_size, stage_layers
from tridecode.backend.weights import WeightReader
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
    embeddings: list[Tensor]
    ready: torch.cuda.Event | None = None

    def wait(self) -> StepResult:
        if self.ready is not None:
            self.ready.synchronize()
        return StepResult(
            self.tokens.numpy().copy(),
            self.log_probs.numpy().copy(),
            [sums.cpu().numpy() for sums in self.embeddings],
        )


class Engine:
    """Owns the device: weights, cache blocks, sampling state, buffers. Used by one thread.

    config is resolved (settings.resolve). `on_logits`, where set, sees the logits of each step and its plan
    before they
    are sampled from: for checks against other implementations.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        weights: Weights,
        ops: Ops,
        ranks: Ranks,
        device: torch.device,
    ):
        assert config.max_sequence_tokens is not None and config.max_step_tokens is not None
        self.model_config, self.config, self.ranks, self.device = model, config, ranks, device
        self.dtype = DTYPES[config.data_type]
        self.ops = ops
        self.model = models.family(model.family).model(model, weights, ranks, config.max_sequence_tokens)
        self.adapters: AdapterStore | None = None
        self.is_asynchronous = device.type == "cuda"
        self.is_last_stage = ranks.stage == ranks.num_stages - 1
        self.on_logits: Callable[[StepPlan, Tensor], None] | None = None
        rows = config.max_sequences
        self.work = Workspace.allocate(
            model, config.max_step_tokens, rows, ranks.tensor_size, self.dtype, device
        )
        self.state = SamplingState.allocate(
            rows, config.max_sequence_tokens, model.vocab_size, config.max_bad_word_tokens, device
        )
        self.ops.reserve(
            config.max_step_tokens,
            self._widest(),
            rows,
            config.max_sequence_tokens,
            model.vocab_size,
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
        self.graphs: DecodeGraphs | None = None
        if self.is_asynchronous:
            self._warm_up()
        self.num_blocks = ranks.smallest(choose_num_blocks(config, self._block_bytes(), device))
        self.caches = self._allocate_cache(self.num_blocks)
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
    ) -> Engine:
        """An engine over the weight files of `directory`. Raises WeightFileError, ConfigError,
        UnsupportedError."""
        specs = models.family(model.family).weight_specs(model)
        dtype, ops = DTYPES[config.data_type], kernels.select(device, config.batch_invariant)
        place = (ranks.tensor_rank, ranks.tensor_size)
        if config.weights == "random":
            return cls(model, config, RandomWeights(specs, 0, *place, dtype, ops, device), ops, ranks, device)
        mine = stage_layers(model.num_layers, ranks.stage, ranks.num_stages)
        specs = [spec for spec in specs if spec.layer is None or spec.layer in mine]
        reader = WeightReader(directory, model)
        reader.verify(config.verify_weights, specs)
        weights = FileWeights(reader, specs, *place, dtype, ops, device, progress)
        try:
            engine = cls(model, config, weights, ops, ranks, device)
        finally:
            weights.close()
        engine._serve_adapters(directory, weights)
        return engine

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

    def _block_bytes(self) -> int:
        """Of a block in the caches of all layers of this stage."""
        return sum(math.prod(shape) for shape in self._block_shapes()) * self.dtype.itemsize

    def _allocate_cache(self, num_blocks: int) -> list[CacheLayer]:
        shapes = [(num_blocks, *shape) for shape in self._block_shapes()]
        return [CacheLayer(_zeros(shape, self.dtype, self.device)) for shape in shapes]

    def _warm_up(self) -> None:
        """Run the largest steps, so that libraries allocate their buffers before the cache takes the rest of
        the memory."""
        self.caches = self._allocate_cache(1)
        longest = self.config.max_sequence_tokens
        assert longest is not None
        for plan in warm_up_plans(self.work.hidden.shape[0], self.config.max_sequences, longest):
            self._run(self.buffers.load(plan))
        torch.cuda.synchronize(self.device)

    def _can_capture(self) -> bool:
        if not self.is_asynchronous or not self.config.cuda_graphs:
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

        return DecodeGraphs(padded_sizes(self.config.max_sequences), load, self._run)

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step, on rank 0 for all ranks. On CUDA it returns while the device works, and the next step
        may be launched before `wait`."""
        if self.ranks.rank == 0:
            self.ranks.broadcast_plan(plan)
        embeddings: list[Tensor] = []
        if self.adapters is not None:
            self.adapters.drop(plan.drop_adapters)
        self._copy_for_forks(plan)
        count = plan.num_samples
        if not self._replay(plan):
            embeddings = self._run(self.buffers.load(plan), plan)
        if not self.is_asynchronous:
            return Pending(self._tokens[:count], self._log_probs[:count], embeddings)
        tokens, log_probs = self._results[plan.step % len(self._results)]
        tokens[:count].copy_(self._tokens[:count], non_blocking=True)
        log_probs[:count].copy_(self._log_probs[:count], non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Pending(tokens[:count], log_probs[:count], embeddings, ready)

    def _replay(self, plan: StepPlan) -> bool:
        """Run the plan as a graph, if there is one for it; a step with adapters has none."""
        if self.graphs is None or self.on_logits is not None or plan.adapters is not None:
            return False
        return self.graphs.replay(plan) is not None

    def _step_ops(self, plan: StepPlan | None) -> Ops:
        """The operations of a step: with the deltas of its adapters, if it has any."""
        if plan is None or plan.adapters is None:
            return self.ops
        assert self.adapters is not None
        numbers = set(plan.adapters[plan.adapters >= 0].tolist())
        tables = {number: self.adapters.table(number) for number in numbers}
        return cast(Ops, AdaptedOps(self.ops, plan, tables, self.device))

    @torch.inference_mode()
    def _copy_for_forks(self, plan: StepPlan) -> None:
        """Execute the plan's copies; all sources are read before any destination is written."""
        if plan.block_copies:
            sources, destinations = torch.tensor(plan.block_copies, device=self.device).unbind(1)
            for cache in self.caches:
                for tensor in (cache.blocks, cache.scales):
                    if tensor is not None:
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
    def _run(self, batch: Batch, plan: StepPlan | None = None) -> list[Tensor]:
        """One forward of this stage and, on the last, sampling. Returns the plan's context embeddings."""
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
            start_slots(self.state, plan.starts)
        sums = self._context_embeddings(x, plan) if plan is not None else []
        count = batch.sample_tokens.shape[0]
        tokens, log_probs = self._tokens[:count], self._log_probs[:count]
        if count == 0:
            return sums
        if self.is_last_stage:
            logits = self.model.logits(context, x)
            if self.on_logits is not None and plan is not None:
                self.on_logits(plan, logits)
            self.ops.sample(logits, batch.sample_slots, self.state, tokens=tokens, log_probs=log_probs)
        self.ranks.share_tokens(tokens, log_probs)
        if not self.is_last_stage:
            self.state.last_tokens[batch.sample_slots.long()] = tokens
        return sums

    def _context_embeddings(self, x: Tensor, plan: StepPlan) -> list[Tensor]:
        """(C,) float32 sums of the last layer's output over the prompts' rows that the plan names."""
        sums = []
        for row, count in plan.embeds:
            first = plan.query_starts[row]
            sums.append(x[first : first + count].float().sum(0))
            self.ranks.share_sums(sums[-1])
        return sums


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU as pages that take no memory before they are written, which torch.zeros would
    touch."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    words = np.zeros(shape, np.int32 if dtype.itemsize == 4 else np.int16)
    return torch.from_numpy(words).view(dtype)
