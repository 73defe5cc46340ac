"""Settings that several of transformers' configs share."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from tridecode.backend.config import RopeConfig
from tridecode.backend.errors import UnsupportedError

# the first three spellings compute one tanh formula
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def shape(hf: PreTrainedConfig) -> dict[str, Any]:
    """The fields of ModelConfig that every config of transformers has by the same names."""
    heads = hf.num_attention_heads
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_heads": heads,
        "num_kv_heads": getattr(hf, "num_key_value_heads", heads),
        "head_size": getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        "vocab_size": hf.vocab_size,
    }


def activation(hf: PreTrainedConfig, key: str, title: str) -> str:
    """ModelConfig.activation of an MLP without a gate. title: the family's name, for the error."""
    name = getattr(hf, key)
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"{title} with {key} = {name}; this version runs {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def rope_config(hf: PreTrainedConfig, size: int, title: str) -> RopeConfig:
    """From rope_parameters; transformers 5 moves rope_theta, rope_scaling and rotary_pct there.

    size: rotated dimensions of a head. title: the family's name, for the error.
    """
    rope = hf.rope_parameters
    scaling, theta = rope["rope_type"], float(rope["rope_theta"])
    if scaling not in ("default", "linear", "llama3"):
        raise UnsupportedError(
            f"{title} with rope scaling {scaling}; this version runs default, linear and llama3"
        )
    if scaling == "default":
        return RopeConfig(size, theta)
    if scaling == "linear":
        return RopeConfig(size, theta, scaling, factor=float(rope["factor"]))
    return RopeConfig(
        size,
        theta,
        scaling,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )
