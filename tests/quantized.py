"""Rounding to 8 and 4 bit in numpy, as docs/guides/quantization.md says: the oracle of the tests."""

from __future__ import annotations

import copy
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch

from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.convert import PlannedConversion


def rounded_int8(weight: np.ndarray) -> np.ndarray:
    """(out, in) float32 -> float64: what int8 of one scale per output keeps."""
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
    return np.rint(weight / scale).astype(np.float64) * scale


def rounded_fp8(weight: np.ndarray) -> np.ndarray:
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(448)
    return (weight / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def rounded_fp8_blocks(weight: np.ndarray, size: int = 128) -> np.ndarray:
    """A scale for each size x size."""
    out = np.empty(weight.shape)
    for row in range(0, weight.shape[0], size):
        for column in range(0, weight.shape[1], size):
            block = weight[row : row + size, column : column + size]
            scale = np.abs(block).max() / np.float32(448)
            values = (block / scale).astype(ml_dtypes.float8_e4m3fn)
            out[row : row + size, column : column + size] = values.astype(np.float64) * scale
    return out


def rounded_int4(weight: np.ndarray, size: int) -> np.ndarray:
    out = np.empty(weight.shape)
    for row, values in enumerate(weight):
        for start in range(0, len(values), size):
            group = values[start : start + size]
            low, high = min(group.min(), np.float32(0)), max(group.max(), np.float32(0))
            scale = (high - low) / np.float32(15)
            zero = np.rint(-low / scale)
            levels = np.clip(np.rint(group / scale) + zero, 0, 15)
            out[row, start : start + size] = (levels.astype(np.float64) - zero) * scale
    return out


def rounding(quantization: Quantization) -> Callable[[np.ndarray], np.ndarray]:
    if quantization.weights == "int4":
        return lambda weight: rounded_int4(weight, quantization.group or weight.shape[1])
    return {"int8": rounded_int8, "fp8": rounded_fp8}[quantization.weights]


def rounded_model(model: torch.nn.Module, planned: PlannedConversion, turned: bool) -> torch.nn.Module:
    """A copy of transformers' model with the modules rounded that become quantised matrices.

    Rules move whole outputs, and scales belong to outputs or to groups of their inputs: rounding the source
    is rounding the target. turned: modules are (out, in), those of Linear, not (in, out).
    """
    quantization = planned.config.quantization
    assert quantization is not None
    round_ = rounding(quantization)
    out = copy.deepcopy(model)
    state = out.state_dict()
    for item in planned.conversions:
        if quantization.covers(item.spec):
            for name in item.sources:
                weight = state[name].numpy()
                weight = round_(weight) if turned else round_(np.ascontiguousarray(weight.T)).T
                state[name].copy_(torch.from_numpy(weight.astype(np.float32)))
    return out
