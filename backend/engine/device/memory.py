"""Computes, to the byte, what an engine allocates on a rank's device, without the device, weights or memory.

The engine's own constructor runs on torch's meta device, whose tensors have shapes but no data, so the
figures come from the allocating code itself. Memory of libraries (CUDA's context, cuBLAS, NCCL) is not in our
tensors: see LIBRARY_BYTES.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from tridecode.backend import models
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.host_memory import available_memory
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.adapters.place import modules_of
from tridecode.backend.engine.device.drafters.draft_loading import draft_config
from tridecode.backend.engine.device.drafters.trained_loading import shapes_of_trained
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.file_weights import DTYPES
from tridecode.backend.engine.device.parts.table import background_kinds
from tridecode.backend.engine.device.preparation import build_engine
from tridecode.backend.engine.host_tier.slots import blocks_of_buffer
from tridecode.backend.engine.ranks.parallel import SingleRank
from tridecode.backend.engine.ranks.vocab_share import share_vocabulary
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import stage_layers
from tridecode.backend.weights.reader import FILE_DTYPES
from tridecode.kernels import scratch
from tridecode.kernels.cpu import keeps_int8
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.gemm.packing import pack_linear
from tridecode.kernels.operands import Linear
from tridecode.kernels.reference import Reference

#: estimated memory of libraries on a GPU: CUDA's context with our and torch's kernels and cuBLAS; in addition
#: NCCL's buffers with several ranks
LIBRARY_BYTES, NCCL_BYTES = 1 << 30, 1 << 29
#: limit of the plan's buffers on the host; a larger size means a nonsensical setting
_MAX_HOST_BYTES = 4 << 30


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    weights: weights of the model and its drafter, including tables of positions and slopes. workspace:
    activations, sampling state and the arrays of a step. scratch: temporary memory of kernels; 0 on a CPU.
    block: one block of the cache, in all layers of this rank. host: host buffers of a GPU's rank. max_blocks:
    the number of blocks that sequences of maximum length can use. adapters: the limit for LoRA adapters,
    which are loaded while serving; not part of `fixed`. background: feature that runs its own model between
    steps -> its bytes.
    """

    stage: int
    tensor_rank: int
    weights: int
    workspace: int
    scratch: int
    block: int
    host: int
    max_blocks: int
    adapters: int = 0
    background: dict[str, int] = field(default_factory=dict)

    @property
    def fixed(self) -> int:
        """Return the bytes of everything except the cache."""
        return self.weights + self.workspace + self.scratch + sum(self.background.values())


class _Place(SingleRank):
    """Stands for a rank of a group without starting the group."""

    def __init__(self, tensor_rank: int, tensor_size: int, stage: int, num_stages: int):
        self.rank = stage * tensor_size + tensor_rank
        self.tensor_rank, self.tensor_size, self.stage, self.num_stages = (
            tensor_rank,
            tensor_size,
            stage,
            num_stages,
        )


class _Shapes(Weights):
    """Weights with the right shape and dtype but no data."""

    def tensor(self, name: str) -> Tensor:
        spec = self.files[name]
        dtype = FILE_DTYPES[spec.dtype] if spec.dtype else self.dtype
        return torch.empty(spec.shard_shape(self.size), dtype=dtype, device="meta")


class _CpuShapes(Reference):
    """Packs like kernels.cpu.Cpu: a float32 weight is copied into oneDNN's layout, which has no padding if
    its sizes are multiples of oneDNN's blocks (16 to 64).
    """

    def __init__(self, batch_invariant: bool) -> None:
        super().__init__()
        self._batch_invariant = batch_invariant

    def pack(self, linear: Linear, dtype: torch.dtype = torch.float32, is_head: bool = False) -> Linear:
        weight = linear.weight
        if isinstance(weight, QuantizedWeight):
            if keeps_int8(weight, self._batch_invariant):
                return linear
            return replace(linear, weight=torch.empty(weight.shape, dtype=dtype, device="meta"))
        if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
            return linear
        return Linear(torch.empty(weight.shape, device="meta"), linear.bias)


class _CudaShapes(Reference):
    """Packs and reserves like kernels.cuda.Cuda, whose arenas grow to float32's size during warm-up."""

    @property
    def fuses_adapters(self) -> bool:
        return _capability() >= 90

    def __init__(self, itemsize: int) -> None:
        super().__init__()
        self.bytes, self._widening = scratch.fixed_bytes(), itemsize // 2
        self._expanded, self._sorts_inputs = 0, False

    @property
    def has_top_log_probs(self) -> bool:
        return True

    def pack(self, linear: Linear, dtype: torch.dtype = torch.float32, is_head: bool = False) -> Linear:
        packed = pack_linear(linear, dtype, _capability(), is_head)
        more = max(packed.dequantised_bytes - self._expanded, 0)  # scratch for the weight that needs the most
        self._expanded, self.bytes = self._expanded + more, self.bytes + more
        self._sorts_inputs |= packed.sorts_inputs
        return packed.linear

    def reserve(
        self,
        max_tokens: int,
        max_columns: int,
        max_rows: int,
        max_context: int,
        vocab_size: int,
        context_bytes: int = 0,
    ) -> None:
        arenas = scratch.arena_bytes(max_tokens, max_columns, self._sorts_inputs)
        self.bytes += self._widening * sum(arenas.values()) + scratch.sample_bytes(max_rows, vocab_size)
        self.bytes += scratch.expanded_bytes(context_bytes) if context_bytes else 0


def _capability() -> int:
    """Return 10 * major + minor of this machine's GPU; 90 without one."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def plan_rank(
    model: ModelConfig, config: EngineConfig, tensor_rank: int, stage: int, device_type: str
) -> RankMemory:
    """Return the memory of one rank. config: with "auto" values resolved. device_type: "cpu" or "cuda".

    Raises ConfigError if the ranks cannot share the model, like load_engine.
    """
    assert config.max_sequence_tokens is not None and config.max_step_tokens is not None
    columns = -(-config.max_sequence_tokens // config.block_tokens)
    words = 8 * config.max_step_tokens + config.slots * (columns + 8)
    if 16 * words > _MAX_HOST_BYTES:
        raise ConfigError(
            f"max_sequences {config.slots:,} and max_sequence_tokens {config.max_sequence_tokens:,} "
            f"need {16 * words:,} bytes for block tables alone; lower one of them"
        )
    size, stages = config.tensor_para_size, config.pipeline_para_size
    place = _Place(tensor_rank, size, stage, stages)
    mine = stage_layers(model.num_layers, stage, stages)
    row_bytes = model.hidden_size * DTYPES[config.data_type].itemsize
    has_peers = device_type == "cuda" and size > 1 and config.enable_custom_all_reduce
    has_peers = has_peers and not scratch.peers_unsupported(size, row_bytes)
    specs = models.family(model.family).weight_specs(model)
    specs = share_vocabulary(specs, size, device_type, has_peers)
    specs = [spec for spec in specs if spec.layer is None or spec.layer in mine]
    dtype = DTYPES[config.data_type]
    ops = _CudaShapes(dtype.itemsize) if device_type == "cuda" else _CpuShapes(config.batch_invariant)
    modes = (model.quantization, config.int8_mode)
    weights = _Shapes(specs, ops, *modes, tensor_rank, size, dtype, config.head_mode)
    unlimited = replace(config, cache_bytes=1 << 62)

    def others(directory: Path | None, other: ModelConfig) -> AbstractContextManager[Weights]:
        return nullcontext(_Shapes(specs, ops, None, 0, tensor_rank, size, dtype))

    draft, drafting = draft_config(config, model), None
    if draft is not None:
        of_draft = share_vocabulary(
            models.family(draft.family).weight_specs(draft), size, device_type, has_peers
        )
        modes = (draft.quantization, config.int8_mode)
        drafting = draft, _Shapes(of_draft, ops, *modes, tensor_rank, size, dtype, config.head_mode)
    trained = shapes_of_trained(config, model)
    engine = build_engine(
        model, unlimited, weights, ops, place, torch.device("meta"), others, draft=drafting, trained=trained
    )
    seen: set[int] = set()
    cache = _total(engine.state.caches, seen)
    held = _total(engine.state.model, seen)[0]
    if engine.state.draft is not None:
        held += _total(engine.state.draft.model, seen)[0]
    if engine.drafter is not None:
        held += _total(engine.drafter.weights, seen)[0]
    background = _background_bytes(engine, config, seen, device_type)
    device, host = _total(engine, seen)
    if device_type == "cuda":  # the host has a ring of buffers, the device one
        device += engine.buffers.device_bytes
    else:
        device, host = device + host, 0
    kernels = ops.bytes if isinstance(ops, _CudaShapes) else 0
    if has_peers:
        kernels += scratch.peer_bytes(size, config.max_step_tokens, row_bytes)
        kernels += scratch.exchange_bytes(size, config.slots) + scratch.chain_exchange_bytes(size)
        kernels += scratch.copied_bytes(size, config.max_step_tokens, row_bytes)
    block = cache[0] // engine.state.num_blocks
    if config.has_host_tier:
        slots = config.host_cache_bytes // (size * stages) // block
        device += 2 * block * blocks_of_buffer(block, slots, device_type)
    adapters = _adapter_bytes(weights, config, dtype.itemsize)
    return RankMemory(
        stage, tensor_rank, held, device, kernels, block, host, engine.state.num_blocks, adapters, background
    )


def _background_bytes(
    engine: Engine, config: EngineConfig, seen: set[int], device_type: str
) -> dict[str, int]:
    """Return the bytes of each feature between steps.

    The served model is already in `seen`; the rest is added to it.
    """
    found = {}
    for kind, run in zip(background_kinds(config), engine.background):
        device, host = _total(run, seen)
        found[kind.name] = device + (run.buffers.device_bytes if device_type == "cuda" else host)
    return found


def _adapter_bytes(weights: Weights, config: EngineConfig, itemsize: int) -> int:
    """Return the bytes of max_loras adapters of the highest rank that change every matrix.

    See adapters.store.Place. A fused matrix counts as three modules, each with a rank of its own, because
    some families have three.
    """
    if config.lora_path == "none" or config.batch_invariant:
        return 0
    one = 0
    for names, linear in weights.linears.items():
        one += modules_of(weights.specs, names) * config.max_lora_rank * sum(linear.weight.shape)
    return config.max_loras * one * itemsize


def check_background(
    model: ModelConfig, config: EngineConfig, device: torch.device, memory: int | None = None
) -> None:
    """Check the files of the features between steps, and that the engine fits with them and one block of the
    cache. config: resolved. memory: usable bytes; None: memory_fraction of the GPU's free memory, or the
    host's available memory. Raises ConfigError.
    """
    kinds = background_kinds(config)
    for run in kinds.values():
        run.check(model, config)
    planned = plan_rank(model, config, 0, 0, device.type)
    if memory is None and device.type == "cuda":
        memory = int(torch.cuda.mem_get_info(device)[0] * config.memory_fraction)
    elif memory is None:
        memory = available_memory()
    served = planned.fixed - sum(planned.background.values()) + planned.block
    served += LIBRARY_BYTES if device.type == "cuda" else 0
    need = served
    for kind in kinds:
        need += planned.background[kind.name]
        if need > memory:
            raise ConfigError(
                f"parameter {kind.switch} is {getattr(config, kind.switch):g}: the served model needs "
                f"{served:,} bytes and {kind.memory} {planned.background[kind.name]:,} more; {memory:,} may "
                f"be used. Wanted a smaller model, more memory, or {kind.switch} = 0"
            )


def plan_ranks(model: ModelConfig, config: EngineConfig, device_type: str) -> list[RankMemory]:
    """Return the memory of every rank, in rank order."""
    return [
        plan_rank(model, config, tensor_rank, stage, device_type)
        for stage in range(config.pipeline_para_size)
        for tensor_rank in range(config.tensor_para_size)
    ]


def _total(value: Any, seen: set[int]) -> tuple[int, int]:
    """Return (bytes on the meta device, bytes on the host) of the tensors below `value` that are not in
    `seen`.

    Each storage counts once.
    """
    device = host = 0
    for tensor in _tensors(value, set()):
        storage = tensor.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        if tensor.device.type == "meta":
            device += storage.nbytes()
        else:
            host += storage.nbytes()
    return device, host


def _tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """Yield every tensor in the attributes, elements and items of `value`."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, (str, bytes, int, float, type, PurePath)) or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from _tensors(part, visited)
