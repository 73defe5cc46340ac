"""max_sequences, chosen by the engine from the memory of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tridecode.backend.config import EngineConfig
from tridecode.backend.engine.memory import LIBRARY_BYTES, plan_rank
from tridecode.backend.engine.settings import resolve
from tridecode.backend.errors import ConfigError
from tridecode.tools.bench.presets import PRESETS

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
        plan = plan_rank(LLAMA, resolve(replace(HALF, max_sequences=slots), LLAMA, GPU), 0, 0, "cuda")
        needed = plan.fixed + LIBRARY_BYTES + slots * 512 // HALF.block_tokens * plan.block
        enough = (needed + 1) / HALF.memory_fraction / 1e9
        assert chosen(enough + 0.001) == slots
        assert chosen(enough - 0.001) == fewer


def test_cache_bytes_count_and_a_chosen_number_stays() -> None:
    assert chosen(140, cache_bytes=64 * 512 * 131_072) == 64  # 128 KiB a token
    assert chosen(140, cache_bytes=128 * 512 * 131_072) == 128
    assert chosen(140, max_sequences=17) == 17


def test_a_step_holds_a_token_of_each() -> None:
    assert chosen(140, max_step_tokens=100) == 100
    with pytest.raises(ConfigError, match="max_step_tokens is 100; wanted at least max_sequences = 128"):
        chosen(140, max_step_tokens=100, max_sequences=128)


def test_ranks_share_the_memory() -> None:
    assert chosen(20) == 64
    assert chosen(20, tensor_para_size=2) == 128
    assert chosen(20, pipeline_para_size=4) == 256
