"""Rotary position tables: the angles of every position, with each of transformers' scalings.

Formulas and precision (float32) are those of transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from tridecode.backend.configuration.model_config import RopeConfig
from tridecode.kernels.operands import Rope


def rope_table(rope: RopeConfig, num_positions: int, device: torch.device, long_prompt: int = 0) -> Rope:
    """Return cos and sin, (num_positions, size / 2) float32.

    transformers recomputes the frequencies of "dynamic" and "longrope" at each step, from the length of the
    sequence. Here row p has those of a sequence of p + 1 tokens, which is identical for each generated token
    and for prompts of up to original_max_positions tokens. long_prompt: ModelConfig.long_prompt_tokens. If
    sequences may be longer, num_positions more rows follow for sequences with a longer prompt, with
    longrope's long factors throughout. The scheduler adds num_positions to the positions of such a sequence.
    "dynamic" has no such rows: a longer prompt, whose frequencies transformers takes from its length, is
    rotated with those of each position.
    """
    frequencies = _frequencies(rope, num_positions)  # (size / 2,) or (positions, size / 2)
    positions = torch.arange(num_positions, dtype=torch.float32)[:, None]
    angles = positions * frequencies
    if 0 < long_prompt < num_positions:
        if rope.scaling == "longrope":
            frequencies = _longrope(replace(rope, short_factors=rope.long_factors), num_positions)
        angles = torch.cat([angles, positions * frequencies])
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return Rope(cos.to(device), sin.to(device), rope.interleaved)


def _frequencies(rope: RopeConfig, num_positions: int) -> Tensor:
    exponents = _exponents(rope)
    if rope.scaling == "dynamic":
        return _dynamic(rope, exponents, num_positions)
    if rope.scaling == "longrope":
        return _longrope(rope, num_positions)
    plain = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    if rope.scaling == "yarn":
        return _yarn(rope, rope.theta**exponents)
    return plain


def _exponents(rope: RopeConfig) -> Tensor:
    return torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size


def _dynamic(rope: RopeConfig, exponents: Tensor, num_positions: int) -> Tensor:
    """NTK scaling: beyond original_max_positions the base grows with the length of the sequence."""
    longest = rope.original_max_positions
    lengths = torch.arange(1, num_positions + 1).clamp(min=longest)
    growth = rope.factor * lengths / longest - (rope.factor - 1)
    bases = rope.theta * growth ** (rope.size / (rope.size - 2))
    return 1.0 / bases[:, None] ** exponents


def _longrope(rope: RopeConfig, num_positions: int) -> Tensor:
    """Divisors by frequency: one set up to original_max_positions, another beyond."""
    is_long = torch.arange(num_positions)[:, None] >= rope.original_max_positions
    short, long = torch.tensor(rope.short_factors), torch.tensor(rope.long_factors)
    return 1.0 / (torch.where(is_long, long, short) * rope.theta ** _exponents(rope))


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Divide low frequencies by factor, keep high ones, blend the rest."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeConfig, periods: Tensor) -> Tensor:
    """Peng et al. 2023: between two dimensions, frequencies are blended from unchanged to divided by
    factor.
    """

    def dimension(rotations: float) -> float:
        """Return the dimension that makes this many rotations within original_max_positions."""
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return rope.size * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(rope.size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept
