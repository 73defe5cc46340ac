"""Converts a GGUF file of one architecture back to transformers' config and tensors.

A family's module names its architecture and defines the meaning of the keys in `settings`. Names of tensors
come from the gguf package's table; `restore` undoes what llama.cpp's converter did to the values. Source:
llama.cpp b11549, convert_hf_to_gguf.py and src/models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.gguf.hyperparameters import GgufHeader

#: the parts of llama.cpp's fused attn_qkv
QKV_PARTS = ("attn_q", "attn_k", "attn_v")
#: parameters of the scaling of Llama 3.1 to 3.3, whose factors a file holds as rope_freqs
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _nothing(name: str, tensor: Tensor, hf: PreTrainedConfig) -> Tensor:
    return tensor


@dataclass(frozen=True)
class GgufRules:
    """architecture: llama.cpp's name. settings: of transformers' config, from the file.

    transposed: ends of llama.cpp's names of matrices that transformers keeps as (in, out).
    restore: (llama.cpp's name, tensor, config) to the tensor as transformers has it; of a fused attn_qkv the
    names are those of its parts. joined: transformers' module -> those of llama.cpp that make its rows.
    rows: end of llama.cpp's name of a matrix -> transformers' name of each row, {i} the layer, {row} the row.
    absent: modules of transformers that this file does not have, where two have one name in llama.cpp.
    """

    architecture: str
    settings: Callable[[GgufHeader], dict[str, Any]]
    transposed: tuple[str, ...] = ()
    restore: Callable[[str, Tensor, PreTrainedConfig], Tensor] = _nothing
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    absent: Callable[[GgufHeader], tuple[str, ...]] = lambda header: ()


def norms_less_one(name: str, tensor: Tensor, hf: PreTrainedConfig) -> Tensor:
    """Gemma: llama.cpp's norms scale by the stored weight, transformers' by 1 + weight."""
    return tensor - 1.0 if name.endswith("norm.weight") else tensor


def decoder_settings(header: GgufHeader) -> dict[str, Any]:
    """The settings that most of transformers' configs share, by their usual names."""
    heads = header.size("attention.head_count")
    embedding = header.shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise CheckpointError(f"{header.path} has no matrix token_embd.weight")
    return {
        "vocab_size": embedding[0],
        "hidden_size": header.size("embedding_length"),
        "num_hidden_layers": header.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.size("attention.head_count_kv", heads),
        "intermediate_size": header.size("feed_forward_length"),
        "max_position_embeddings": header.size("context_length"),
        "tie_word_embeddings": "output.weight" not in header.shapes,
    }


def head_size(header: GgufHeader) -> int:
    """attention.key_length, which must be that of the values; by default the hidden size by the heads."""
    heads = header.size("attention.head_count")
    size = header.size("attention.key_length", header.size("embedding_length") // heads)
    if header.number("attention.value_length", size) != size:
        raise UnsupportedError(f"{header.path} has keys of {size} and values of another length")
    return size


def rms_decoder_settings(header: GgufHeader, takes_factors: bool = False) -> dict[str, Any]:
    """Settings of LLaMA's kin: RMS norms, whole heads rotated, a size of the heads. takes_factors: as in
    rope_parameters.
    """
    size = head_size(header)
    rotated = header.size("rope.dimension_count", size)
    if rotated != size:
        found = f"{header.architecture}.rope.dimension_count = {rotated}"
        raise UnsupportedError(f"{header.path} has {found}; this version rotates all {size} of a head there")
    return {
        **decoder_settings(header),
        "head_dim": size,
        "rms_norm_eps": float(header.number("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope_parameters(header, size, takes_factors),
    }


def partial_rope(header: GgufHeader) -> dict[str, Any]:
    """rope_parameters with the rotated share of a head."""
    size = head_size(header)
    rotated = header.size("rope.dimension_count", size)
    if not 0 < rotated <= size:
        found = f"{header.architecture}.rope.dimension_count = {rotated}"
        raise CheckpointError(f"{header.path} has {found}; wanted at most {size}, the size of a head")
    share = rotated / size
    if int(size * share) != rotated:  # transformers rounds the product down
        share = math.nextafter(share, 2.0)
    return {**rope_parameters(header, rotated), "partial_rotary_factor": share}


def rope_parameters(header: GgufHeader, size: int, takes_factors: bool = False) -> dict[str, Any]:
    """transformers' rope_parameters. size: rotated dimensions. takes_factors: whether llama.cpp's network
    divides the frequencies by the vector rope_freqs, if there is one.
    """
    base = {"rope_theta": float(header.number("rope.freq_base", 10000.0))}
    kind = header.text("rope.scaling.type", "linear")
    factor = float(header.number("rope.scaling.factor", header.number("rope.scale_linear", 1.0)) or 1.0)
    original = header.number("rope.scaling.original_context_length", header.size("context_length"))
    attention = float(header.number("rope.scaling.attn_factor", 1.0))
    long, short = (header.tensor(f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long and short:
        return {
            **base, "rope_type": "longrope", "long_factor": long, "short_factor": short,
            "original_max_position_embeddings": original, "attention_factor": attention,
        }  # fmt: skip
    frequencies = header.tensor("rope_freqs.weight")
    if frequencies is not None:
        _check_factors(header, frequencies, size, takes_factors, kind, factor)
        return {**base, **_by_frequency(header, frequencies, base["rope_theta"])}
    if kind == "yarn":
        return {**base, **_yarn(header, factor, original, attention)}
    if kind not in ("none", "linear"):
        found = f"{header.architecture}.rope.scaling.type = {kind[:40]}"
        raise UnsupportedError(f"{header.path} has {found} without its factors; this version does not run it")
    if kind == "linear" and factor != 1.0:
        return {**base, "rope_type": "linear", "factor": factor}
    return {**base, "rope_type": "default"}


def _yarn(header: GgufHeader, factor: float, original: int, attention: float) -> dict[str, Any]:
    scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0  # llama.cpp multiplies it by attn_factor
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": scale * attention,
        "beta_fast": float(header.number("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(header.number("rope.scaling.yarn_beta_slow", 1.0)),
    }


def _check_factors(
    header: GgufHeader, found: list[float], size: int, takes_factors: bool, kind: str, factor: float
) -> None:
    if not takes_factors:
        raise UnsupportedError(f"{header.path} has rope_freqs.weight, which llama.cpp does not use there")
    if len(found) != size // 2:
        wanted = f"{size // 2}, half of the {size} rotated dimensions"
        raise CheckpointError(f"{header.path}: rope_freqs.weight has {len(found)} factors; wanted {wanted}")
    if kind not in ("none", "linear") or factor != 1.0:
        raise UnsupportedError(f"{header.path} has rope_freqs.weight and rope.scaling.type = {kind[:40]}")


def _by_frequency(header: GgufHeader, factors: list[float], theta: float) -> dict[str, Any]:
    """llama.cpp divides each frequency by its factor: Llama 3.1's scaling where the factors are its, else
    longrope with one list of factors for every length, which is the same product.
    """
    largest = max(factors)
    if largest > 1 and all(
        math.isclose(found, wanted, rel_tol=1e-5)
        for found, wanted in zip(factors, _llama3_factors(len(factors), theta, largest))
    ):
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "original_max_position_embeddings": header.size("context_length"),
        "attention_factor": 1.0,
    }


def _llama3_factors(count: int, theta: float, factor: float) -> list[float]:
    """llama.cpp's factors of Llama 3.1: 1 for short wavelengths, `factor` for long ones, and between."""
    low, high, length = (_LLAMA3[key] for key in _LLAMA3)
    factors = []
    for number in range(count):
        wavelength = 2 * math.pi * theta ** (number / count)
        smooth = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
