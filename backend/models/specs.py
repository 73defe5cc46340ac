"""Weight specifications that families share. No torch: the converter and the planner use them too."""

from __future__ import annotations

from tridecode.backend.config import ModelConfig
from tridecode.backend.weight_layout import WeightSpec


def norm_specs(name: str, size: int, bias: bool, layer: int | None = None) -> list[WeightSpec]:
    """`<name>.weight` and, for a LayerNorm, `<name>.bias`: (size,), whole on every rank."""
    specs = [WeightSpec(f"{name}.weight", (size,), layer=layer)]
    if bias:
        specs.append(WeightSpec(f"{name}.bias", (size,), layer=layer))
    return specs


def column_specs(
    name: str, inner: int, sections: tuple[int, ...], bias: bool, layer: int
) -> list[WeightSpec]:
    """A matrix (inner, sum(sections)) whose columns, and bias, are split over ranks section by section."""
    outer = sum(sections)
    specs = [WeightSpec(f"{name}.weight", (inner, outer), axis=1, sections=sections, layer=layer)]
    if bias:
        specs.append(WeightSpec(f"{name}.bias", (outer,), axis=0, sections=sections, layer=layer))
    return specs


def row_specs(name: str, inner: int, outer: int, bias: bool, layer: int) -> list[WeightSpec]:
    """A matrix (inner, outer) whose rows are split over ranks; its bias is whole on every rank."""
    specs = [WeightSpec(f"{name}.weight", (inner, outer), axis=0, layer=layer)]
    if bias:
        specs.append(WeightSpec(f"{name}.bias", (outer,), layer=layer))
    return specs


def attention_specs(config: ModelConfig, layer: int) -> list[WeightSpec]:
    """Fused query_key_value (C, q | k | v) and dense (H * D, C) of one layer."""
    queries = config.num_heads * config.head_size
    keys = config.num_kv_heads * config.head_size
    prefix = f"model.layers.{layer}.attention"
    return [
        *column_specs(
            f"{prefix}.query_key_value",
            config.hidden_size,
            (queries, keys, keys),
            config.attention_bias,
            layer,
        ),
        *row_specs(f"{prefix}.dense", queries, config.hidden_size, config.attention_bias, layer),
    ]


def head_spec(config: ModelConfig) -> WeightSpec:
    """The language model's head (V, C); absent where it is the word embedding."""
    return WeightSpec("model.lm_head.weight", (config.vocab_size, config.hidden_size), optional=True)
