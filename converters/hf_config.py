"""Settings that several of transformers' configs share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.backend.configuration.model_config import RopeConfig

# the first five spellings compute one tanh formula
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_GATES = {
    "silu": "silu",
    "swish": "silu",
    **{name: ours for name, ours in _ACTIVATIONS.items() if ours.startswith("gelu")},
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
    return _choice(hf, key, title, _ACTIVATIONS)


def gated_activation(hf: PreTrainedConfig, key: str, title: str) -> str:
    """ModelConfig.activation of an MLP with a gate. title: the family's name, for the error."""
    return _choice(hf, key, title, _GATES)


def _choice(hf: PreTrainedConfig, key: str, title: str, values: dict[str, str]) -> str:
    name = getattr(hf, key)
    if name not in values:
        raise UnsupportedError(f"{title} with {key} = {name}; this version runs {', '.join(values)}")
    return values[name]


def demand(hf: PreTrainedConfig, title: str, **wanted: Any) -> None:
    """Raise UnsupportedError for a setting that is neither absent, nor None, nor the value in `wanted`."""
    for key, value in wanted.items():
        found = getattr(hf, key, None)
        if found is not None and found != value:
            raise UnsupportedError(f"{title} with {key} = {found}; this version runs {value}")


def demand_whole_rotary(rope: dict[str, Any], title: str) -> None:
    """Refuse partial rotation, for families whose heads transformers rotates as a whole."""
    found = rope.get("partial_rotary_factor", 1.0)
    if found != 1.0:
        raise UnsupportedError(f"{title} with partial_rotary_factor = {found}; this version runs 1.0")


def rope_config(
    hf: PreTrainedConfig,
    size: int,
    title: str,
    *,
    interleaved: bool = False,
    layer_type: str | None = None,
) -> RopeConfig:
    """Return the rope from rope_parameters, to which transformers 5 moves rope_theta, rope_scaling and
    rotary_pct.

    size: rotated dimensions of a head. title: the family's name, for the error. layer_type: selects an entry
    if rope_parameters has one per layer type.
    """
    rope = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    scaling = rope["rope_type"]
    if scaling not in _ROPE_FIELDS:
        known = ", ".join(_ROPE_FIELDS)
        raise UnsupportedError(f"{title} with rope scaling {scaling}; this version runs {known}")
    return RopeConfig(
        size,
        float(rope["rope_theta"]),
        scaling,
        interleaved=interleaved,
        **_ROPE_FIELDS[scaling](rope, hf),
    )


def _longest(rope: dict[str, Any]) -> dict[str, Any]:
    return {"original_max_positions": int(rope["original_max_position_embeddings"])}


def _llama3(rope: dict[str, Any], hf: PreTrainedConfig) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    return {**{name: float(rope[name]) for name in names}, **_longest(rope)}


def _yarn(rope: dict[str, Any], hf: PreTrainedConfig) -> dict[str, Any]:
    longest = _longest(rope)
    given = rope["factor"]
    factor = float(hf.max_position_embeddings / longest["original_max_positions"] if given is None else given)
    attention = rope.get("attention_factor")
    if attention is None:
        scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        if scale and scale_all:
            attention = _yarn_attention(factor, scale) / _yarn_attention(factor, scale_all)
        else:
            attention = _yarn_attention(factor)
    return {
        "factor": factor,
        "attention_factor": float(attention),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        # not rope's own where layers differ: so in transformers
        "truncate": bool(hf.rope_parameters.get("truncate", True)),
        **longest,
    }


def _yarn_attention(factor: float, scale: float = 1.0) -> float:
    """Peng et al. 2023, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(rope: dict[str, Any], hf: PreTrainedConfig) -> dict[str, Any]:
    longest = _longest(rope)
    length = longest["original_max_positions"]
    given, attention = rope.get("factor"), rope.get("attention_factor")
    factor = hf.max_position_embeddings / length if given is None else given
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return {
        "attention_factor": float(attention),
        "short_factors": tuple(map(float, rope["short_factor"])),
        "long_factors": tuple(map(float, rope["long_factor"])),
        **longest,
    }


#: by rope_type: the fields of RopeConfig besides size and theta, from (rope_parameters, config)
_ROPE_FIELDS: dict[str, Callable[[dict[str, Any], PreTrainedConfig], dict[str, Any]]] = {
    "default": lambda rope, hf: {},
    "linear": lambda rope, hf: {"factor": float(rope["factor"])},
    "dynamic": lambda rope, hf: {
        "factor": float(rope["factor"]),
        "original_max_positions": hf.max_position_embeddings,
    },
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}


#: rope types whose published configs keep the length before the scaling in max_position_embeddings
_EXTENDING = ("linear", "dynamic", "yarn")


def max_positions(hf: PreTrainedConfig) -> int:
    """The context length of a model whose positions are computed, with its rope scaling.

    linear, dynamic, yarn: the trained length times the factor. The trained length is
    original_max_position_embeddings, or max_position_embeddings where a config has no such key (Vicuna 16k,
    Qwen2.5 with YaRN). A larger max_position_embeddings is kept unchanged, never multiplied. llama3, longrope
    and unscaled positions: max_position_embeddings.
    """
    rope = getattr(hf, "rope_parameters", None) or {}
    nested = [entry for entry in rope.values() if isinstance(entry, dict)]
    extended = [_extended(entry, hf) for entry in nested or [rope]]
    return int(max([hf.max_position_embeddings, *extended]))


def _extended(rope: dict[str, Any], hf: PreTrainedConfig) -> int:
    """Return the trained length times factor; 0 if the scaling does not extend max_position_embeddings."""
    if rope.get("rope_type") not in _EXTENDING or rope.get("factor") is None:
        return 0
    named = rope.get("original_max_position_embeddings")
    trained = named or getattr(hf, "original_max_position_embeddings", None) or hf.max_position_embeddings
    return int(trained * float(rope["factor"]))


def context_note(hf: PreTrainedConfig, positions: int) -> str:
    """Describe how the context length follows from max_position_embeddings; "" if they are equal."""
    stated = getattr(hf, "max_position_embeddings", None) or positions
    if stated == positions:
        return ""
    return (
        f"context: {positions:,} tokens with rope scaling (max_position_embeddings is {stated:,}); another "
        "length: --set max_sequence_tokens=N"
    )


def windows(hf: PreTrainedConfig, title: str) -> tuple[int, ...]:
    """ModelConfig.windows, from sliding_window and, if layers differ, layer_types.

    Raises UnsupportedError for another type of layer, CheckpointError for layers with a window of unknown
    size. title: the family's name.
    """
    window, layers = getattr(hf, "sliding_window", None), hf.num_hidden_layers
    everywhere = ["full_attention" if window is None else "sliding_attention"] * layers
    types = getattr(hf, "layer_types", None) or everywhere
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            found = f"{title} with a layer of {kind}"
            raise UnsupportedError(f"{found}; this version runs full_attention and sliding_attention")
    if len(types) != layers:
        raise CheckpointError(f"{title} with {len(types)} layer_types; wanted {layers}, one for each layer")
    if "sliding_attention" not in types:
        return ()
    if window is None or window < 1:
        raise CheckpointError(f"{title} with sliding_window = {window}; wanted 1 or more tokens")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
