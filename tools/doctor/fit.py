"""Check whether a model fits: bytes of every rank, blocks of the cache, and sequences at several lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.base.host_memory import available_memory
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.cache_size import CPU_CACHE_SHARE
from tridecode.backend.engine.device.memory import (
    LIBRARY_BYTES,
    NCCL_BYTES,
    RankMemory,
    plan_rank,
    plan_ranks,
)
from tridecode.backend.engine.device.resolved_settings import USUAL_TOKENS, resolve
from tridecode.backend.engine.parts.table import BACKGROUND
from tridecode.tools.byte_sizes import in_words
from tridecode.tools.checks.findings import Finding

_LENGTHS = (128, 512, 2048, 8192, 32768, 131072)  # tokens of prompt and answer
_MOST_RANKS = 64


@dataclass(frozen=True)
class Place:
    """Device of a rank. kind: "cuda" or "cpu". memory: bytes of its GPU, or what the machine has available.
    devices: GPUs; 1 for a CPU. capability: of the GPUs, 90 for 9.0; None: not known. engines: number of
    engines of the model, which share the machine's memory.
    """

    kind: str
    memory: int
    devices: int = 1
    capability: int | None = None
    engines: int = 1


@dataclass(frozen=True)
class Fit:
    """Bytes are of one rank. libraries: an estimate. cache: of the rank with the fewest blocks; may be
    negative where not even the weights fit. sequences: (tokens of a sequence, how many fit). slots:
    max_sequences, as given or as the engine would choose it. cache_dtype: dtype of keys and values, such as
    "fp16" or "int8". host_cache: host_cache_bytes, which each engine has, as given or as proposed for this
    machine; 0: none.
    """

    ranks: list[RankMemory]
    place: Place
    libraries: int
    cache: int
    blocks: int
    block_tokens: int
    longest: int
    sequences: list[tuple[int, int]]
    slots: int = 0
    cache_dtype: str = ""
    host_cache: int = 0

    @property
    def fits(self) -> bool:
        return self.blocks > 0

    @property
    def tokens(self) -> int:
        """Capacity of the whole cache in tokens."""
        return self.blocks * self.block_tokens

    @property
    def host_tokens(self) -> int:
        """Capacity of a host tier of host_cache bytes in tokens."""
        return self.host_cache // sum(rank.block for rank in self.ranks) * self.block_tokens


def fit(model: ModelConfig, config: EngineConfig, place: Place) -> Fit:
    """Compute the fit. Raises ConfigError for incompatible settings, like the engine."""
    config = resolve(config, model, torch.device(place.kind), place.memory)
    ranks = plan_ranks(model, config, place.kind)
    return _fit(ranks, config, place)


def _fit(ranks: list[RankMemory], config: EngineConfig, place: Place) -> Fit:
    assert config.max_sequence_tokens is not None and config.max_sequences is not None
    libraries = _libraries(place, len(ranks))
    per_rank = [_cache_bytes(rank, config, place, libraries) for rank in ranks]
    blocks = min(min(rank.max_blocks, cache // rank.block) for rank, cache in zip(ranks, per_rank))
    blocks = max(blocks, 0)
    longest = config.max_sequence_tokens
    lengths = [*(length for length in _LENGTHS if length < longest), longest]
    sequences = [(length, blocks // -(-length // config.block_tokens)) for length in lengths]
    dtype = config.data_type if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    size, slots = config.block_tokens, config.max_sequences
    host = config.host_cache_bytes or (_proposed_host_cache(place) if place.kind == "cuda" else 0)
    host = host if config.shares_prefixes else 0
    return Fit(ranks, place, libraries, min(per_rank), blocks, size, longest, sequences, slots, dtype, host)


def _proposed_host_cache(place: Place) -> int:
    """Return an engine's share of half of the available host memory, in whole GiB."""
    return available_memory() // (2 * place.engines) >> 30 << 30


def _libraries(place: Place, ranks: int) -> int:
    if place.kind == "cpu":
        return 0
    return LIBRARY_BYTES + (NCCL_BYTES if ranks > 1 else 0)


def _cache_bytes(rank: RankMemory, config: EngineConfig, place: Place, libraries: int) -> int:
    """Return the cache bytes that choose_num_blocks would find on an otherwise empty device."""
    room = place.memory - rank.fixed - libraries
    if config.cache_bytes is not None:
        return config.cache_bytes if config.cache_bytes <= room else room - config.cache_bytes
    if place.kind == "cpu":
        return int(room * CPU_CACHE_SHARE)
    return int(place.memory * config.memory_fraction) - rank.fixed - libraries


def fit_findings(
    where: str, model: ModelConfig, config: EngineConfig, place: Place, found: Fit
) -> Iterator[Finding]:
    """Find problems (the model, or one longest sequence, does not fit) and warn of useless settings."""
    kind = f"GPU with {in_words(place.memory)}" if place.kind == "cuda" else "machine"
    if not found.fits:
        largest = max(rank.fixed for rank in found.ranks)
        needs = f"{in_words(largest)} a rank for weights, workspace and scratch"
        for feature in BACKGROUND:
            if size := max(rank.background.get(feature.name, 0) for rank in found.ranks):
                needs += f", of which {in_words(size)} for {feature.memory}"
        if config.cache_bytes is not None:
            needs += f", cache_bytes {in_words(config.cache_bytes)}"
        if place.kind == "cuda":
            needs += f", about {in_words(found.libraries)} for libraries, on a {kind}"
        else:
            needs += f", with {in_words(place.memory)} of memory available"
        yield Finding("error", where, needs, "a model that fits, with a cache", _advice(model, config, place))
        return
    wanted = -(-found.longest // found.block_tokens)
    if found.blocks < wanted:
        yield Finding(
            "error",
            where,
            f"max_sequence_tokens {found.longest:,}; the cache holds {found.tokens:,} tokens",
            "room for one sequence of maximum length",
            f"Set max_sequence_tokens to {found.tokens} or less. {_advice(model, config, place)}",
        )
        return
    yield from _adapter_findings(where, config, place, found)
    if config.host_cache_bytes and not config.has_host_tier:
        yield Finding(
            "warning",
            where,
            f"host_cache_bytes {config.host_cache_bytes}, prefix_cache {str(config.prefix_cache).lower()}, "
            f"cache_scope {config.cache_scope}; the engine runs without a host tier",
            "host_cache_bytes 0, or a prefix cache that requests share",
            "Set host_cache_bytes to 0, or prefix_cache to true and cache_scope to all or salt.",
        )
    elif config.host_cache_bytes * place.engines > available_memory():
        engines = f"for each of {place.engines} engines" if place.engines > 1 else "for one engine"
        yield Finding(
            "warning",
            where,
            f"host_cache_bytes {in_words(config.host_cache_bytes)} {engines}; the machine has "
            f"{in_words(available_memory())} of memory available",
            "a host tier within the memory, else the engine runs without it",
            f"Set host_cache_bytes to {_proposed_host_cache(place)} or less.",
        )
    usual = min(USUAL_TOKENS, found.longest)
    room = found.blocks // -(-usual // found.block_tokens)
    if found.slots > room:
        yield Finding(
            "warning",
            where,
            f"max_sequences {found.slots}; the cache holds {room} of {usual} tokens",
            "no more sequences than the cache holds",
            f"Set max_sequences to {max(room, 1)}: more preempt each other, and their buffers take "
            "memory from the cache.",
        )


def _adapter_findings(where: str, config: EngineConfig, place: Place, found: Fit) -> Iterator[Finding]:
    """Check adapters, which are loaded while the engine serves, into memory that the cache leaves free."""
    adapters = max(rank.adapters for rank in found.ranks)
    used = max(rank.fixed + found.blocks * rank.block for rank in found.ranks) + found.libraries
    if place.kind != "cuda" or adapters <= place.memory - used:
        return
    percent = max(100 * (place.memory - adapters) // place.memory, 1)
    yield Finding(
        "warning",
        where,
        f"{config.max_loras} adapters of rank {config.max_lora_rank} take up to {in_words(adapters)}; "
        f"{in_words(max(place.memory - used, 0))} are left next to the cache",
        "room for max_loras adapters",
        f"Lower max_loras or max_lora_rank, or set memory_fraction to {percent / 100:g}.",
    )


def _advice(model: ModelConfig, config: EngineConfig, place: Place) -> str:
    """Return the smallest change that makes it fit."""
    for feature in BACKGROUND:
        without = replace(config, **{feature.switch: 0})  # type: ignore[arg-type]
        if without != config and fit(model, without, place).fits:
            return f"Set {feature.switch} to 0: {feature.memory} does not fit next to the model."
    if config.cache_bytes is not None:
        room = fit(model, replace(config, cache_bytes=None), place)
        if room.fits:
            return f"Lower cache_bytes to {room.cache} or set it to auto."
    if config.data_type == "fp32" and place.kind == "cuda":
        for dtype in ("bf16", "fp16"):
            if dtype == "bf16" and (place.capability or 90) < 80:
                continue
            if fit(model, replace(config, data_type=dtype), place).fits:
                return f"Set data_type to {dtype}."
    if place.kind == "cuda":
        for ranks in range(2, _MOST_RANKS + 1):
            for tensor in sorted((size for size in range(1, ranks + 1) if ranks % size == 0), reverse=True):
                if _fits_at(model, config, place, tensor, ranks // tensor):
                    more = f", which takes {ranks} GPUs" if ranks > place.devices else ""
                    stages = ranks // tensor
                    return f"Set tensor_para_size {tensor} and pipeline_para_size {stages}{more}."
    return "Use a smaller model, or a machine with more memory."


def _fits_at(model: ModelConfig, config: EngineConfig, place: Place, tensor: int, stages: int) -> bool:
    """Return whether the first ranks of the first and of the last stage can hold one sequence of maximum
    length.
    """
    if stages > model.num_layers or tensor > 16 or stages > 16:
        return False
    config = replace(config, tensor_para_size=tensor, pipeline_para_size=stages)
    try:
        config = resolve(config, model, torch.device(place.kind), place.memory)
        ends = [plan_rank(model, config, 0, stage, place.kind) for stage in sorted({0, stages - 1})]
    except TridecodeError:  # the heads cannot be split this way
        return False
    libraries = _libraries(place, tensor * stages)
    wanted = -(-(config.max_sequence_tokens or 1) // config.block_tokens)
    return all(_cache_bytes(rank, config, place, libraries) // rank.block >= wanted for rank in ends)
