"""Quantised checkpoints, packed here with numpy from the published layouts, one number at a time.

Each of METHODS makes, of a matrix (out, in), the tensors of one module and the matrix that they stand for, in
float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import save

GROUP = 8
Packed = tuple[dict[str, Tensor], np.ndarray]


def words(values: np.ndarray, bits: int) -> Tensor:
    """(R, C) integers of `bits` -> (R, ceil(C * bits / 32)) int32, the first in the lowest bits."""
    per_word = 32 // bits
    rows, columns = values.shape
    packed = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for column in range(columns):
        shift = np.uint32(bits * (column % per_word))
        packed[:, column // per_word] |= values[:, column].astype(np.uint32) << shift
    return torch.from_numpy(packed.view(np.int32))


def rounded(
    weight: np.ndarray, bits: int, groups: np.ndarray, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """values (out, in), scales (out, G) of fp16's numbers and zeros (out, G), all integers unsigned."""
    top, count = 2**bits - 1, groups.max() + 1
    scales, zeros = np.zeros((len(weight), count)), np.zeros((len(weight), count), np.int64)
    for group in range(count):
        part = weight[:, groups == group]
        low, high = part.min(1), part.max(1)
        if symmetric:
            high = np.maximum(abs(low), abs(high))
            low = -high
        scales[:, group] = np.float16((high - low) / top)
        zeros[:, group] = 2 ** (bits - 1) if symmetric else np.clip(np.round(-low / scales[:, group]), 0, top)
    values = np.clip(np.round(weight / scales[:, groups]) + zeros[:, groups], 0, top).astype(np.int64)
    return values, scales, zeros


def dense(values: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return (values - zeros[:, groups]) * scales[:, groups]


def gptq(
    weight: np.ndarray,
    bits: int = 4,
    version: str = "gptq",
    act_order: bool = False,
    symmetric: bool = True,
    group: int = GROUP,
) -> Packed:
    columns = weight.shape[1]
    groups = np.arange(columns) // group
    if act_order:
        groups = groups[np.random.default_rng(columns).permutation(columns)]
    values, scales, zeros = rounded(weight, bits, groups, symmetric)
    stored = (zeros - 1) % 2**bits if version == "gptq" else zeros
    tensors = {
        "qweight": words(values, bits).t(),
        "qzeros": words(stored.T, bits),
        "scales": torch.from_numpy(scales.T.copy()).half(),
        "g_idx": torch.from_numpy(groups).int(),
    }
    return tensors, dense(values, scales, zeros, groups)


def awq(weight: np.ndarray) -> Packed:
    groups = np.arange(weight.shape[1]) // GROUP
    values, scales, zeros = rounded(weight, 4, groups, False)

    def by_outputs(integers: np.ndarray) -> Tensor:  # (out, R) -> (R, out / 8)
        packed = np.zeros((integers.shape[1], len(integers) // 8), np.uint32)
        for word in range(len(integers) // 8):
            for place, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                packed[:, word] |= integers[8 * word + output].astype(np.uint32) << np.uint32(4 * place)
        return torch.from_numpy(packed.view(np.int32))

    tensors = {
        "qweight": by_outputs(values),
        "qzeros": by_outputs(zeros),
        "scales": torch.from_numpy(scales.T.copy()).half(),
    }
    return tensors, dense(values, scales, zeros, groups)


def fp8(weight: np.ndarray, block: tuple[int, int] | None, scale: str, per: str = "") -> Packed:
    """per: "tensor" or "channel" without blocks."""
    rows, columns = block or ((1, weight.shape[1]) if per == "channel" else weight.shape)
    scales = np.zeros((-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)), np.float32)
    values, made = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), np.zeros(weight.shape)
    for i, j in np.ndindex(*scales.shape):
        place = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = abs(weight[place]).max() / 448
        part = torch.from_numpy(weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
        values[place] = part
        made[place] = part.double().numpy() * np.float64(scales[i, j])
    shaped = scales.reshape(()) if per == "tensor" else scales
    return {"weight": values, scale: torch.from_numpy(shaped)}, made


def bnb8(weight: np.ndarray) -> Packed:
    largest = abs(weight).max(1).astype(np.float32)
    values = np.round(weight / largest[:, None] * 127)
    made = values * largest[:, None].astype(np.float64) / 127
    tensors = {
        "weight": torch.from_numpy(values.astype(np.int8)),
        "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, made


NF4 = [
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip
FP4 = [
    0,
    1 / 192,
    2 / 3,
    1,
    1 / 3,
    1 / 2,
    1 / 6,
    1 / 4,
    0,
    -1 / 192,
    -2 / 3,
    -1,
    -1 / 3,
    -1 / 2,
    -1 / 6,
    -1 / 4,
]


def bnb4(weight: np.ndarray, kind: str = "nf4", nested: bool = False, block: int = 64) -> Packed:
    table = np.array({"nf4": NF4, "fp4": FP4}[kind], np.float32)
    flat = weight.flatten()
    starts = range(0, len(flat), block)
    scales = np.array([abs(flat[start : start + block]).max() for start in starts], np.float32)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": weight.shape,
    }
    tensors = {"weight.quant_map": torch.from_numpy(table), "weight.absmax": torch.from_numpy(scales)}
    if nested:
        offset, codes = float(scales.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
        outer = np.array(
            [abs(scales[start : start + 4] - offset).max() for start in range(0, len(scales), 4)], np.float32
        )
        wide = np.repeat(outer, 4)[: len(scales)]
        numbers = abs((scales - offset)[:, None] / wide[:, None] - codes).argmin(1).astype(np.uint8)
        scales = codes[numbers].astype(np.float64) * wide + offset
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {
            "weight.absmax": torch.from_numpy(numbers),
            "weight.nested_absmax": torch.from_numpy(outer),
            "weight.nested_quant_map": torch.from_numpy(codes),
        }
    wide = np.repeat(np.asarray(scales, np.float64), block)[: len(flat)]
    numbers = abs((flat / wide)[:, None] - table).argmin(1).astype(np.uint8)
    made = table.astype(np.float64)[numbers] * wide
    padded = np.append(numbers, np.uint8(0)) if len(numbers) % 2 else numbers
    tensors["weight"] = torch.from_numpy(padded[0::2] << 4 | padded[1::2]).reshape(-1, 1)
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors, made.reshape(weight.shape)


@dataclass(frozen=True)
class Case:
    """config: quantization_config. pack: a matrix (out, in) to its tensors and what they stand for."""

    config: dict[str, Any]
    pack: Callable[[np.ndarray], Packed]


def gptq_case(**how) -> Case:
    bits, version = how.get("bits", 4), how.get("version", "gptq")
    config = {"quant_method": "gptq", "bits": bits, "sym": how.get("symmetric", True)}
    config |= {"group_size": how.get("group", GROUP), "desc_act": how.get("act_order", False)}
    config["checkpoint_format"] = version
    return Case(config, lambda weight: gptq(weight, **how))


def autoround_case(packing_format: str, **how) -> Case:
    """auto-round's description (0.16, save_quantized_as_autoround) of GPTQ's tensors."""
    config = {"quant_method": "auto-round", "bits": how.get("bits", 4), "sym": how.get("symmetric", True)}
    config |= {"data_type": "int", "group_size": GROUP, "packing_format": packing_format}
    config |= {"autoround_version": "0.16.1", "iters": 1000, "nsamples": 512}
    config["extra_config"] = {"model.layers.9.mlp.up_proj": {"bits": 16, "data_type": "float"}}
    return Case(config, lambda weight: gptq(weight, **how))


def bnb4_case(kind: str, nested: bool, block: int = 64) -> Case:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    config |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    return Case(config, lambda weight: bnb4(weight, kind, nested, block))


METHODS = {
    "gptq 4 bit": gptq_case(),
    "gptq 4 bit asymmetric": gptq_case(symmetric=False),
    "gptq 4 bit v2 asymmetric act-order": gptq_case(version="gptq_v2", symmetric=False, act_order=True),
    "gptq 8 bit act-order": gptq_case(bits=8, act_order=True),
    "gptq 8 bit asymmetric": gptq_case(bits=8, symmetric=False),
    "auto-round as gptq": autoround_case("auto_round:auto_gptq", symmetric=False),
    "auto-round 8 bit": autoround_case("auto_round:gptq", bits=8),
    "auto-round as gptq_v2": autoround_case("auto_round", version="gptq_v2", symmetric=False),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "fp8 blocks": Case(
        {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"},
        lambda weight: fp8(weight, (16, 32), "weight_scale_inv"),
    ),
    "fp8 tensor": Case(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda weight: fp8(weight, None, "weight_scale", "tensor"),
    ),
    "fbgemm_fp8": Case(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
        lambda weight: fp8(weight, None, "weight_scale", "channel"),
    ),
    "bitsandbytes 8 bit": Case(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, bnb8
    ),
    "nf4": bnb4_case("nf4", False),
    "nf4 nested": bnb4_case("nf4", True),
    "nf4 blocks over rows": bnb4_case("nf4", True, 128),
    "fp4": bnb4_case("fp4", False),
}  # fmt: skip


def save_quantized(model, directory: Path, case: Case, layers: str = ".layers.") -> Path:
    """The checkpoint with the matrices of its layers quantised. `model` gets what they stand for."""
    save(model, directory, tokenizer=False)
    state: dict[str, Tensor] = {}
    held = dict(model.named_parameters())
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim != 2 or layers not in name:
            state[name] = tensor
            continue
        turned = model.config.model_type == "gpt2"  # Conv1D
        weight = (tensor.t() if turned else tensor).double().numpy()
        tensors, made = case.pack(weight)
        stem = name.removesuffix(".weight")
        state |= {f"{stem}.{part}": packed.contiguous() for part, packed in tensors.items()}
        with torch.no_grad():
            held[name].copy_(torch.from_numpy(made.T if turned else made))
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": case.config}))
    return directory
