"""Matrices that compressed-tensors itself quantises, stores and expands."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams

from tests.converters.sources.quantized_checkpoints import GROUP, Case, Packed

BLOCK = [4, 8]


def compressed(weight: np.ndarray, form: str, act_order: bool = False, **settings: Any) -> Packed:
    args = QuantizationArgs(**settings)
    matrix = torch.from_numpy(weight).float()
    rows, columns = matrix.shape
    groups = torch.arange(columns) // GROUP
    if act_order:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    parts = {
        "tensor": lambda: matrix.reshape(1, 1, -1),
        "channel": lambda: matrix[:, None],
        "group": lambda: matrix[:, groups.argsort(stable=True)].unflatten(1, (-1, GROUP)),
        "block": lambda: (
            matrix.reshape(rows // BLOCK[0], BLOCK[0], columns // BLOCK[1], BLOCK[1])
            .transpose(1, 2)
            .flatten(2)
        ),
    }[settings["strategy"]]()
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    if settings["strategy"] == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    order = {"g_idx": groups.int()} if act_order else {}
    compressor = BaseCompressor.get_value_from_registry(form)(config=None)
    tensors = compressor.compress_weight(
        weight=matrix, scale=scale, quantization_args=args, zero_point=zero, **order
    )
    tensors["weight_scale"] = scale
    if not args.symmetric:
        tensors.setdefault("weight_zero_point", zero)
    if act_order:
        tensors["weight_g_idx"] = groups.int()
    dtype = args.pytorch_dtype()
    values = quantize(matrix, scale, zero, args, dtype, **order)
    return tensors, dequantize(values, scale, zero, args, torch.float32, **order).double().numpy()


def case(
    form: str, strategy: str, inputs: dict[str, Any] | None = None, act_order: bool = False, **settings: Any
) -> Case:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, **settings}
    if strategy == "group":
        weights["group_size"] = GROUP
    if strategy == "block":
        weights["block_structure"] = BLOCK
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "version": "0.12.2",
    }
    return Case(config, lambda weight: compressed(weight, form, act_order, **weights))


_TOKENS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
CASES = {
    "W4A16 groups": case("pack-quantized", "group", num_bits=4),
    "W4A16 groups, asymmetric": case("pack-quantized", "group", num_bits=4, symmetric=False),
    "W4A16 groups, act-order": case("pack-quantized", "group", num_bits=4, act_order=True),
    "W4A16 channels": case("pack-quantized", "channel", num_bits=4),
    "W8A16 channels, asymmetric": case("pack-quantized", "channel", symmetric=False),
    "W8A16 groups": case("pack-quantized", "group"),
    "W8A8": case("int-quantized", "channel", _TOKENS),
    "W8A8 tensor": case("int-quantized", "tensor", _TOKENS),
    "int8 asymmetric": case("int-quantized", "channel", symmetric=False),
    "int8 groups": case("naive-quantized", "group"),
    "FP8 channels": case("float-quantized", "channel", {**_TOKENS, "type": "float"}, type="float"),
    "FP8 tensor": case("float-quantized", "tensor", type="float"),
    "FP8 blocks": case("float-quantized", "block", type="float"),
    "FP8 naive": case("naive-quantized", "channel", type="float"),
}
