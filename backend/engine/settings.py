"""Decides every "auto" of the engine's settings and logs the decision."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from tridecode.backend.config import EngineConfig, ModelConfig
from tridecode.backend.errors import ConfigError
from tridecode.backend.host_memory import available_memory

log = logging.getLogger("tridecode.engine")

#: tokens of a step: enough to fill the device, few enough that decoding rows do not wait long for a prompt
_STEP_TOKENS = {"cpu": 512, "cuda": 8192}
#: widths of decode attention at which the bits of a row did not depend on the width
_INVARIANT_BLOCK = 32
CPU_CACHE_SHARE = 0.25  # of the memory that is available, on a machine that others use too


def choose_device(config: EngineConfig) -> torch.device:
    """The device of `config.device`. Raises ConfigError if it is cuda and there is no GPU."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "parameter device is cuda, but torch finds no CUDA device; wanted a GPU, or device = cpu or auto"
        )
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve(config: EngineConfig, model: ModelConfig, device: torch.device) -> EngineConfig:
    """`config` with max_sequence_tokens and max_step_tokens decided; logs each decision once.

    Raises ConfigError for settings that cannot go together.
    """
    if config.batch_invariant and (device.type != "cpu" or config.data_type != "fp32"):
        raise ConfigError(
            f"parameter batch_invariant is true with data_type {config.data_type} on {device.type}; wanted "
            "fp32 on a CPU, or batch_invariant = false (docs/numerics.md)"
        )
    if config.batch_invariant and config.block_tokens % _INVARIANT_BLOCK:
        raise ConfigError(
            f"parameter block_tokens is {config.block_tokens} with batch_invariant; wanted a multiple of "
            f"{_INVARIANT_BLOCK}: attention over other widths rounds otherwise"
        )
    longest = config.max_sequence_tokens or model.max_positions
    if longest > model.max_positions:
        raise ConfigError(
            f"parameter max_sequence_tokens is {longest}; the model has {model.max_positions} positions "
            "(max_pos_seq_len in config.ini)"
        )
    step = config.max_step_tokens or max(_STEP_TOKENS[device.type], config.max_sequences)
    if step < config.max_sequences:
        raise ConfigError(
            f"parameter max_step_tokens is {step}; wanted at least max_sequences = {config.max_sequences}, "
            "one token a sequence"
        )
    if config.max_sequence_tokens is None:
        log.info("max_sequence_tokens: %d (the model's positions)", longest)
    if config.max_step_tokens is None:
        log.info("max_step_tokens: %d", step)
    return replace(config, max_sequence_tokens=longest, max_step_tokens=step)


def choose_num_blocks(config: EngineConfig, block_bytes: int, device: torch.device) -> int:
    """Blocks of the cache: what `cache_bytes` holds or, undecided, a share of the free memory, but never more
    than the longest sequences together can use. Raises ConfigError where not one sequence of the longest kind
    fits in cache_bytes."""
    assert config.max_sequence_tokens is not None
    most = config.max_sequences * -(-config.max_sequence_tokens // config.block_tokens)
    if config.cache_bytes is not None:
        available = config.cache_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        available = int(total * config.memory_fraction) - (total - free - reusable)
    else:
        available = int(available_memory() * CPU_CACHE_SHARE)
    blocks = min(most, available // block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"the cache would have {max(available, 0):,} bytes; one block of {config.block_tokens} tokens "
            f"needs {block_bytes:,} (cache_bytes and memory_fraction in config.pbtxt)"
        )
    log.info(
        "cache: %d blocks of %d tokens, %.2f GiB", blocks, config.block_tokens, blocks * block_bytes / 2**30
    )
    return blocks
