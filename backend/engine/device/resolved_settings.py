"""Resolves every "auto" of the engine's settings and logs the decision."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import torch

from tridecode.backend import models
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.parts.table import BACKGROUND

log = logging.getLogger("tridecode.engine")

#: tokens of a step: enough to fill the device, few enough that decode rows do not wait long for prefill
_STEP_TOKENS = {"cpu": 512, "cuda": 8192}
#: on a GPU of LARGE_GPU_BYTES, with 1.0 (BLOOM-7B1) to 1.2 GB (LLaMA-3-8B) more buffers. While sequences
#: decode, the planner limits steps to fewer (planner.MIXED_TOKENS)
LARGE_STEP_TOKENS, LARGE_GPU_BYTES = 16384, 70 * 10**9
#: decode attention widths for which a row's bits did not depend on the width
_INVARIANT_BLOCK = 32
#: for a prefill step without a graph: host time to launch a layer (LLaMA-3-8B: 8 ms per step), and
#: multiply-adds per second of an H200; its 8-bit ones are twice as fast
_HOST_S_PER_LAYER, _MULTIPLIES_PER_S = 0.25e-3, 3.5e14
_FEWEST_SPREAD_TOKENS = 512
FEWEST_SLOTS = 64
MORE_SLOTS = (256, 128)  # on a GPU whose cache then holds USUAL_TOKENS per sequence
USUAL_TOKENS = 512


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device of `config.device`. Raises ConfigError if it is cuda and there is no GPU."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "parameter device is cuda, but torch finds no CUDA device; wanted a GPU, or device = cpu or auto"
        )
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve(
    config: EngineConfig, model: ModelConfig, device: torch.device, memory: int | None = None
) -> EngineConfig:
    """Return `config` with max_sequences, max_sequence_tokens and max_step_tokens resolved; log each decision
    once.

    memory: bytes of a GPU that the engine may use; None: those free on `device` and, for max_step_tokens, all
    of its memory. Raises ConfigError for incompatible settings.
    """
    if config.batch_invariant and (device.type != "cpu" or config.data_type != "fp32"):
        raise ConfigError(
            f"parameter batch_invariant is true with data_type {config.data_type} on {device.type}; wanted "
            "fp32 on a CPU, or batch_invariant = false (docs/design/numerics.md)"
        )
    if config.batch_invariant and config.block_tokens % _INVARIANT_BLOCK:
        raise ConfigError(
            f"parameter block_tokens is {config.block_tokens} with batch_invariant; wanted a multiple of "
            f"{_INVARIANT_BLOCK}: attention over other widths rounds otherwise"
        )
    longest = config.max_sequence_tokens or model.max_positions
    models.check_context(model, longest)
    if longest > model.max_positions:
        log.warning(
            "max_sequence_tokens: %d is beyond the model's %d positions (max_pos_seq_len in config.ini): the "
            "model was not made for longer texts, and its answers to them may be poor",
            longest,
            model.max_positions,
        )
    most = config.max_step_tokens or max(_step_tokens(device, memory), config.max_sequences or 0)
    decided = replace(config, max_sequence_tokens=longest, max_step_tokens=most)
    for feature in BACKGROUND:
        if getattr(config, feature.switch):
            decided = feature.resolve(model, decided, device.type)
    slots = config.max_sequences or min(most, _choose_slots(decided, model, device, memory))
    if most < slots:
        raise ConfigError(
            f"parameter max_step_tokens is {most}; wanted at least max_sequences = {slots}, one token a "
            "sequence"
        )
    if config.max_sequence_tokens is None:
        log.info("max_sequence_tokens: %d (the model's positions)", longest)
    if config.max_step_tokens is None:
        log.info("max_step_tokens: %d", most)
    if config.max_sequences is None:
        log.info("max_sequences: %d", slots)
    return replace(decided, max_sequences=slots)


def _step_tokens(device: torch.device, memory: int | None) -> int:
    """Return the default of max_step_tokens. memory: None: the GPU's total, 0 if torch finds none."""
    if device.type == "cuda" and memory is None:
        found = torch.cuda.is_available()
        memory = torch.cuda.get_device_properties(device).total_memory if found else 0
    if device.type == "cuda" and (memory or 0) >= LARGE_GPU_BYTES:
        return LARGE_STEP_TOKENS
    return _STEP_TOKENS[device.type]


def _choose_slots(config: EngineConfig, model: ModelConfig, device: torch.device, memory: int | None) -> int:
    """Return the largest slot count that leaves USUAL_TOKENS of KV cache per slot, including the slots'
    buffers.
    """
    if device.type != "cuda":
        return FEWEST_SLOTS
    # imported here: it runs the engine, which needs this module
    from tridecode.backend.engine.device import memory as plans

    if memory is None:
        memory = torch.cuda.mem_get_info(device)[0]
    assert config.max_sequence_tokens is not None
    tokens = min(USUAL_TOKENS, config.max_sequence_tokens)
    for slots in MORE_SLOTS:
        trial = replace(config, max_sequences=slots)
        ranks = [plans.plan_rank(model, trial, 0, stage, "cuda") for stage in _ends(config)]
        left = int(memory * config.memory_fraction) - max(rank.fixed for rank in ranks) - plans.LIBRARY_BYTES
        cache = left if config.cache_bytes is None else min(left, config.cache_bytes)
        blocks = slots * -(-tokens // config.block_tokens)
        if blocks * max(rank.block for rank in ranks) <= cache:
            return slots
    return FEWEST_SLOTS


def _ends(config: EngineConfig) -> set[int]:
    """Return the stages with the most memory: the first and the last."""
    return {0, config.pipeline_para_size - 1}


def spread_tokens(model: ModelConfig, config: EngineConfig, device: torch.device) -> int:
    """Return SchedulerLimits.spread_tokens.

    It is the number of tokens whose computation takes a GPU longer than reading the weights, and longer than
    the host needs to launch the step. 0 on a CPU, where decode rows cost as much as prefill tokens.
    """
    if device.type != "cuda":
        return 0
    specs = models.family(model.family).weight_specs(model)
    weights = sum(math.prod(spec.shape) for spec in specs if spec.layer is not None and len(spec.shape) == 2)
    is_8_bit = config.int8_mode == 2 or (model.quantization is not None and model.quantization.activations)
    rate = _MULTIPLIES_PER_S * config.tensor_para_size * (2 if is_8_bit else 1)
    return max(_FEWEST_SPREAD_TOKENS, int(_HOST_S_PER_LAYER * model.num_layers * rate / weights))
