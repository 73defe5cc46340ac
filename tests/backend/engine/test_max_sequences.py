"""max_sequences and max_step_tokens, chosen by the engine from the memory of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.memory import LIBRARY_BYTES, plan_rank
from tridecode.backend.engine.device.resolved_settings import resolve, spread_tokens
from tridecode.tools.bench.shapes.presets import PRESETS

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
LLAMA = PRESETS["llama-3-8b"].model
HALF = EngineConfig(data_type="bf16")


def chosen(gigabytes: float, **settings: object) -> int:
    return resolve(replace(HALF, **settings), LLAMA, GPU, memory=int(gigabytes * 1e9)).slots


def test_a_large_gpu_has_256_and_a_cpu_64() -> None:
    assert chosen(140) == 256
    assert resolve(HALF, LLAMA, CPU).slots == 64


def test_the_cache_holds_512_tokens_of_each_beside_what_the_slots_take() -> None:
    """Just enough for 256, 128 and less, by the exact plan of the memory."""
    for slots, fewer in ((256, 128), (128, 64)):
        config = resolve(replace(HALF, max_sequences=slots), LLAMA, GPU, memory=40 * 10**9)
        plan = plan_rank(LLAMA, config, 0, 0, "cuda")
        needed = plan.fixed + LIBRARY_BYTES + slots * 512 // HALF.block_tokens * plan.block
        enough = (needed + 1) / HALF.memory_fraction / 1e9
        assert chosen(enough + 0.001) == slots
        assert chosen(enough - 0.001) == fewer


def test_cache_bytes_count_and_a_chosen_number_stays() -> None:
    assert chosen(140, cache_bytes=64 * 512 * 131_072) == 64  # 128 KiB per token
    assert chosen(140, cache_bytes=128 * 512 * 131_072) == 128
    assert chosen(140, max_sequences=17) == 17


def test_a_gpu_of_70_gb_or_more_has_steps_of_16384_tokens() -> None:
    for gigabytes, tokens in ((24, 8192), (48, 8192), (69.9, 8192), (70, 16384), (141, 16384)):
        config = resolve(HALF, LLAMA, GPU, memory=int(gigabytes * 1e9))
        assert config.max_step_tokens == tokens
    assert resolve(HALF, LLAMA, CPU).max_step_tokens == 512
    assert (
        resolve(replace(HALF, max_step_tokens=3000), LLAMA, GPU, memory=141 * 10**9).max_step_tokens == 3000
    )


def test_prompts_are_spread_where_they_take_longer_than_a_launch() -> None:
    """Of 512 tokens or more for a large model on a GPU, of more than a step for a small one; not on a CPU."""
    assert spread_tokens(LLAMA, HALF, GPU) == 512
    assert 512 < spread_tokens(LLAMA, replace(HALF, int8_mode=2), GPU) < 1024
    assert spread_tokens(PRESETS["smollm2-135m"].model, HALF, GPU) > 16384
    assert spread_tokens(LLAMA, HALF, CPU) == 0


def test_a_step_holds_a_token_of_each() -> None:
    assert chosen(140, max_step_tokens=100) == 100
    with pytest.raises(ConfigError, match="max_step_tokens is 100; wanted at least max_sequences = 128"):
        chosen(140, max_step_tokens=100, max_sequences=128)


def test_ranks_share_the_memory() -> None:
    assert chosen(20) == 64
    assert chosen(20, tensor_para_size=2) == 128
    assert chosen(20, pipeline_para_size=4) == 256
