"""The keys of config.ini for rotary positions. No torch."""

from __future__ import annotations

from typing import Any

from tridecode.backend.configuration.model_config import ModelConfig, RopeConfig
from tridecode.backend.models.config_ini import IniSection, joined

ROPE_SCALINGS = {name: name for name in ("default", "linear", "dynamic", "yarn", "longrope", "llama3")}
#: key -> field of RopeConfig
_ROPE_NUMBERS = {
    "rope_theta": "theta",
    "rope_scaling_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_attention_factor": "attention_factor",
}
_ROPE_FLAGS = {
    "rope_truncate": "truncate",
    "rope_interleaved": "interleaved",
    "rope_recompute": "recompute",
}
_ROPE_LISTS = {"rope_short_factors": "short_factors", "rope_long_factors": "long_factors"}


def read_rope(section: IniSection, default_size: int | None, odd: bool = False) -> RopeConfig:
    """Read rotary_embedding (rotated dimensions of a head) and our own keys.

    default_size: the head size; None: rotary_embedding is mandatory. odd: accept an odd number, which is
    rounded up but keeps its own frequencies. Raises ConfigError for a number that does not fit the head.
    """
    original = section.integer("rope_original_max_positions", RopeConfig.original_max_positions, minimum=1)
    # FasterTransformer's converter writes Python's None
    if section.text("rotary_embedding", "").lower() == "none":
        size = section.integer("size_per_head", minimum=2)
    else:
        size = section.integer("rotary_embedding", default_size, minimum=1)
    head = default_size if default_size is not None else section.integer("size_per_head", minimum=1)
    if size % 2 and not odd:
        raise section.wrong("rotary_embedding", size, f"an even number up to size_per_head = {head}")
    if size + size % 2 > head:
        raise section.wrong("rotary_embedding", size, f"at most size_per_head = {head}")
    scaling = section.choice("rope_scaling_type", RopeConfig.scaling, ROPE_SCALINGS)
    fields: dict[str, Any] = {
        **{field: section.number(key, getattr(RopeConfig, field)) for key, field in _ROPE_NUMBERS.items()},
        **{field: section.flag(key, getattr(RopeConfig, field)) for key, field in _ROPE_FLAGS.items()},
        **{field: section.numbers(key, (size + 1) // 2) for key, field in _ROPE_LISTS.items()},
    }
    if scaling == "longrope" and not (fields["short_factors"] and fields["long_factors"]):
        wanted = f"rope_short_factors and rope_long_factors of {(size + 1) // 2} numbers each"
        raise section.wrong("rope_scaling_type", scaling, wanted)
    if scaling == "dynamic" and size <= 2:
        raise section.wrong("rotary_embedding", size, "more than 2 with rope_scaling_type = dynamic")
    for key, name in _ROPE_LISTS.items():
        if any(factor <= 0 for factor in fields[name]):
            raise section.wrong(key, min(fields[name]), "numbers above 0")
    low, high = fields["low_freq_factor"], fields["high_freq_factor"]
    if scaling == "llama3" and high <= low:
        raise section.wrong("rope_high_freq_factor", high, f"more than rope_low_freq_factor = {low}")
    return RopeConfig(size=size, scaling=scaling, original_max_positions=original, **fields)


def rope_keys(config: ModelConfig) -> dict[str, object]:
    """The keys that read_rope reads."""
    rope = config.rope
    assert rope is not None, config
    return {
        "rotary_embedding": rope.size,
        "rope_scaling_type": rope.scaling,
        "rope_original_max_positions": rope.original_max_positions,
        **{key: getattr(rope, field) for key, field in {**_ROPE_NUMBERS, **_ROPE_FLAGS}.items()},
        **{key: joined(getattr(rope, field)) for key, field in _ROPE_LISTS.items() if getattr(rope, field)},
    }
