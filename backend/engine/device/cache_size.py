"""Chooses the number of blocks in the KV cache."""

from __future__ import annotations

import logging

import torch

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.host_memory import available_memory
from tridecode.backend.configuration.engine_config import EngineConfig

log = logging.getLogger("tridecode.engine")

CPU_CACHE_SHARE = 0.25  # share of the available host memory; other programs use the machine too


def choose_num_blocks(config: EngineConfig, block_bytes: int, device: torch.device) -> int:
    """Return the number of blocks that fit in `cache_bytes` or, if it is None, in a share of the free memory.

    Never more than sequences of max_sequence_tokens in all slots can use. Raises ConfigError if not one block
    fits.
    """
    assert config.max_sequence_tokens is not None and config.max_sequences is not None
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
