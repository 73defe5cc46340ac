"""Specs of the weight files that families share. No torch: the converter and the planner use them too."""

from __future__ import annotations

from dataclasses import dataclass

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.weights.layout import WeightSpec

#: below model.layers.<i>.attention: the norms of query and key heads
HEAD_NORMS = "q_norm", "k_norm"


@dataclass(frozen=True)
class Layout:
    """The files of a decoder whose layers have two norms, query_key_value and dense, and an MLP.

    positions: a table of learned positions. embedding_norm: a norm after the embedding. norm_bias: norms have
    biases (LayerNorm). up: the MLP's input matrices, with a gate before its values; down: its output matrix.
    mlp_norm: the norm before the MLP; "input_layernorm" if attention and MLP share it. final_norm: a norm
    before the head.
    """

    positions: bool = False
    embedding_norm: bool = False
    norm_bias: bool = True
    up: tuple[str, ...] = ("dense_h_to_4h",)
    down: str = "dense_4h_to_h"
    mlp_norm: str = "post_attention_layernorm"
    final_norm: bool = True

    def specs(self, config: ModelConfig) -> list[WeightSpec]:
        """Every file, in the order in which Decoder reads them."""
        hidden = config.hidden_size
        specs = [WeightSpec("model.wte", (config.vocab_size, hidden))]
        if self.positions:
            specs.append(WeightSpec("model.wpe", (config.max_positions, hidden)))
        if self.embedding_norm:
            specs += norm_specs("model.pre_decoder_layernorm", hidden, self.norm_bias)
        for layer in range(config.num_layers):
            prefix, sizes = f"model.layers.{layer}", config.of_layer(layer)
            queries, keys = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
            heads, inner = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads), sizes.mlp_size
            specs += norm_specs(f"{prefix}.input_layernorm", hidden, self.norm_bias, layer)
            qkv, bias = f"{prefix}.attention.query_key_value", config.attention_bias
            specs += column_specs(qkv, hidden, (queries, keys, keys), bias, layer, heads)
            dense_bias = bias if config.dense_bias is None else config.dense_bias
            specs += row_specs(f"{prefix}.attention.dense", queries, hidden, dense_bias, layer, heads[:1])
            if self.mlp_norm != "input_layernorm":
                specs += norm_specs(f"{prefix}.{self.mlp_norm}", hidden, self.norm_bias, layer)
            for name in self.up:
                specs += column_specs(f"{prefix}.mlp.{name}", hidden, (inner,), config.mlp_bias, layer)
            specs += row_specs(f"{prefix}.mlp.{self.down}", inner, hidden, config.mlp_bias, layer)
        if self.final_norm:
            specs += norm_specs("model.final_layernorm", hidden, self.norm_bias)
        if not config.tied_head:
            specs.append(WeightSpec("model.lm_head.weight", (config.vocab_size, hidden)))
        if config.head_bias:
            specs.append(WeightSpec("model.lm_head.bias", (config.vocab_size,)))
        return specs


def norm_specs(name: str, size: int, bias: bool, layer: int | None = None) -> list[WeightSpec]:
    """Return `<name>.weight` and, for a LayerNorm, `<name>.bias`: (size,), not split over ranks."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [WeightSpec(f"{name}.{kind}", (size,), layer=layer) for kind in kinds]


def column_specs(
    name: str,
    inner: int,
    sections: tuple[int, ...],
    bias: bool,
    layer: int,
    heads: tuple[int, ...] = (),
) -> list[WeightSpec]:
    """Return a matrix (inner, sum(sections)) whose columns, and bias, are split over ranks section by
    section.

    heads: number of heads of each section; ranks get whole heads. Empty: an MLP, padded if the ranks do not
    divide it.
    """
    outer, padded = sum(sections), not heads
    specs = [WeightSpec(f"{name}.weight", (inner, outer), 1, sections, layer, heads=heads, padded=padded)]
    if bias:
        specs.append(WeightSpec(f"{name}.bias", (outer,), 0, sections, layer, heads=heads, padded=padded))
    return specs


def row_specs(
    name: str, inner: int, outer: int, bias: bool, layer: int, heads: tuple[int, ...] = ()
) -> list[WeightSpec]:
    """Return a matrix (inner, outer) whose rows are split over ranks, with heads as in column_specs; its bias
    is not split.
    """
    padded = not heads
    specs = [WeightSpec(f"{name}.weight", (inner, outer), 0, layer=layer, heads=heads, padded=padded)]
    if bias:
        specs.append(WeightSpec(f"{name}.bias", (outer,), layer=layer))
    return specs


def head_norm_specs(config: ModelConfig, bias: bool) -> list[WeightSpec]:
    """HEAD_NORMS of each layer: (D,), shared by its heads."""
    return [
        spec
        for layer in range(config.num_layers)
        for name in HEAD_NORMS
        for spec in norm_specs(f"model.layers.{layer}.attention.{name}", config.head_size, bias, layer)
    ]
