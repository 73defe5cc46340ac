"""A decoder on one rank: its weights, and the residual forms of attention and MLP that families use.

A family subclasses `Decoder` and chooses its form in `forward`. Letters as in kernels.ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig, check_ranks
from tridecode.backend.models.context import Context, Ranks, Rows
from tridecode.backend.models.halves import half_sums, sequential_in_halves
from tridecode.backend.models.layers import (
    Following,
    add_and_norm,
    add_linears,
    add_normed,
    add_over_ranks,
    attention,
    finish_layer,
    finish_sandwich_layer,
    make_heads,
)
from tridecode.backend.models.rope import rope_table
from tridecode.backend.models.specs import HEAD_NORMS, Layout
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import VocabShare, stage_layers
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.operands import CacheLayer, DecoderLayer, Heads, Linear, Norm


class Decoder:
    """The layers of a rank's pipeline stage, with its share of heads and of the MLP.

    heads: those of each layer of the stage, from stage_heads; equal ones are one object. vocab: this rank's
    ids if embedding and head are split by vocabulary; else None. Raises ConfigError if the tensor ranks
    cannot share the heads or the MLP.
    """

    layout: Layout  # config of the family
    embedding_scale: float = 1.0  # factor by which `embed` multiplies the rows of the table

    def __init__(self, config: ModelConfig, weights: Weights, ranks: Ranks, num_positions: int):
        check_ranks(config, ranks.tensor_size, ranks.num_stages)
        self.config = config
        self.dtype, self.embedding = weights.dtype, self.load_embedding(weights)
        self.vocab: VocabShare | None = None
        if weights.specs["model.wte"].axis == 0:
            self.vocab = VocabShare(config.vocab_size, ranks.tensor_rank, ranks.tensor_size)
        self.final_norm = self.load_norm(weights, "model.final_layernorm") if self.layout.final_norm else None
        self.head = self.load_head(weights)
        self.stage = stage_layers(config.num_layers, ranks.stage, ranks.num_stages)
        self.layers = [self.load_layer(weights, f"model.layers.{index}") for index in self.stage]
        self.heads: Sequence[Heads] = self.stage_heads(ranks, num_positions)

    def stage_heads(self, ranks: Ranks, num_positions: int) -> list[Heads]:
        """Return the heads of each layer: all share the config's rotary positions, if any, and use
        `config.windows`.
        """
        config, rope = self.config, None
        if config.rope is not None:
            rope = rope_table(config.rope, num_positions, self.device, config.long_prompt_tokens)
        return self.layer_heads(
            ranks, lambda layer: {"rope": rope, "window": seen_window(config, layer, num_positions)}
        )

    def layer_heads(self, ranks: Ranks, fields: Callable[[int], dict[str, Any]]) -> list[Heads]:
        """Return the heads of each layer of the stage, with the layer's sizes; equal ones are one object.

        fields(layer number): arguments of make_heads; equal tensors must be one object. slopes and key_bias
        belong to the heads of an unpruned layer.
        """
        kinds: dict[object, Heads] = {}
        every = {layer: fields(layer) for layer in self.stage}
        heads = []
        for layer, mine in every.items():
            sizes, numbers = self.config.of_layer(layer), list(self.config.head_numbers(layer))
            by_head = {name: mine[name] for name in ("slopes", "key_bias") if mine.get(name) is not None}
            values = [value if isinstance(value, (int, float)) else id(value) for value in mine.values()]
            kind = (sizes.num_heads, sizes.num_kv_heads, *values, *(numbers if by_head else ()))
            if kind not in kinds:
                own = {name: tensor[numbers] for name, tensor in by_head.items()}
                kinds[kind] = make_heads(sizes, ranks, **{**mine, **own})
            heads.append(kinds[kind])
        return heads

    @property
    def device(self) -> torch.device:
        table = self.embedding
        return table.device if isinstance(table, Tensor) else table.values.device

    def load_embedding(self, weights: Weights) -> Tensor | QuantizedWeight:
        return weights.embedding(self.config.tied_head)

    def load_head(self, weights: Weights) -> Linear:
        return weights.head(
            self.embedding if self.config.tied_head else weights.tensor("model.lm_head.weight"),
            weights.tensor("model.lm_head.bias") if self.config.head_bias else None,
        )

    def with_head_norms(self, weights: Weights, centred: bool = False) -> list[Heads]:
        """Return `heads` with the query and key norms of their layers. centred: see Weights.norm."""

        def normed(held: Heads, layer: int) -> Heads:
            query, key = (
                weights.norm(f"model.layers.{layer}.attention.{name}", self.config.norm_eps, centred)
                for name in HEAD_NORMS
            )
            return replace(held, query_norm=query, key_norm=key)

        return [normed(held, layer) for held, layer in zip(self.heads, self.stage)]

    def load_norm(self, weights: Weights, name: str) -> Norm:
        """Return a LayerNorm if there is a bias file, else an RMSNorm; families with other norms override
        it.
        """
        return weights.norm(name, self.config.norm_eps)

    def load_layer(self, weights: Weights, prefix: str) -> DecoderLayer:
        attention_norm = self.load_norm(weights, f"{prefix}.input_layernorm")
        shares = self.layout.mlp_norm == "input_layernorm"
        return DecoderLayer(
            attention_norm=attention_norm,
            qkv=weights.linear(f"{prefix}.attention.query_key_value"),
            dense=weights.linear(f"{prefix}.attention.dense"),
            mlp_norm=attention_norm
            if shares
            else self.load_norm(weights, f"{prefix}.{self.layout.mlp_norm}"),
            up=weights.linear(*(f"{prefix}.mlp.{name}" for name in self.layout.up)),
            down=weights.linear(f"{prefix}.mlp.{self.layout.down}"),
        )

    def embed(self, context: Context, x: Tensor) -> None:
        """Write the embedded tokens to x (T, C)."""
        self.look_up(context, x)

    def look_up(
        self,
        context: Context,
        x: Tensor,
        position_table: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Compute x = norm(embedding_scale * (rows of the word embedding + rows of position_table at the
        batch's positions)).

        If the ranks share the vocabulary, each looks up its own ids and sets the other rows of x to 0. The
        sum over the ranks is then bitwise equal to a look-up in the whole table.
        """
        batch, vocab = context.batch, self.vocab
        context.ops.embed(
            batch.token_ids,
            self.embedding,
            positions=None if position_table is None else batch.positions,
            position_table=position_table,
            first_id=None if vocab is None else vocab.first,
            factor=self.embedding_scale,
            out=x,
        )
        if vocab is not None:
            add_over_ranks(context, x, norm)
        elif norm is not None:
            context.ops.norm(x, norm, out=x)

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        """Run the layers. x: (T, C), the embedded tokens or the previous stage's output; becomes this
        stage's."""
        raise NotImplementedError

    def logits(self, context: Context, x: Tensor) -> Tensor:
        """Return float32 logits (R, V) of the batch's sampled rows; if the ranks share the vocabulary, (R,
        size) of this rank's ids, whose columns from `count` on are padding.
        """
        rows = context.batch.sample_tokens
        last, out = context.work.last[: rows.shape[0]], context.work.logits[: rows.shape[0]]
        context.ops.gather_rows(x, rows, out=last)
        context.ops.linear(last, self.head, norm=self.final_norm, out=out)
        return out

    def sequential(self, context: Context, x: Tensor, activation: str, caches: list[CacheLayer]) -> None:
        """Compute x += attention(norm(x)), then x += mlp(norm(x)), layer by layer."""
        halved = half_sums(context, x, self.layers)
        if halved is not None:
            sequential_in_halves(context, x, self.layers, self.heads, activation, caches, halved)
            return
        at_once = _at_once(context, x)
        rows: Rows | None = self._first_rows(x)
        for i, (layer, heads, cache) in enumerate(zip(self.layers, self.heads, caches)):
            attended = attention(context, rows, layer.qkv, heads, cache)
            if at_once and finish_layer(context, x, attended, layer, activation, self._following(i)):
                rows = None
                continue
            mlp = context.mlp(layer)
            rows = add_linears(context, x, (attended, layer.dense), norm=layer.mlp_norm)
            context.ops.linear(rows.x, layer.up, norm=rows.norm, activation=activation, out=mlp)
            rows = add_linears(context, x, (mlp, layer.down), norm=self._next_norms[i])

    def _following(self, i: int) -> Following | None:
        """Return the attention that follows layer i of this stage; None after the last layer."""
        if i + 1 == len(self.layers):
            return None
        layer = self.layers[i + 1]
        return Following(layer.attention_norm, layer.qkv, self.heads[i + 1].qkv_size)

    def parallel(self, context: Context, x: Tensor, activation: str, caches: list[CacheLayer]) -> None:
        """Compute x += attention(attention_norm(x)) + mlp(mlp_norm(x)), layer by layer."""
        at_once = _at_once(context, x)
        rows: Rows | None = self._first_rows(x)
        for i, (layer, heads, cache) in enumerate(zip(self.layers, self.heads, caches)):
            attended = attention(context, rows, layer.qkv, heads, cache)
            if at_once and finish_layer(
                context, x, attended, layer, activation, self._following(i), parallel=True
            ):
                rows = None
                continue
            mlp = context.mlp(layer)
            of_mlp = Rows(x, layer.mlp_norm)
            if rows is not None and layer.mlp_norm is layer.attention_norm:
                of_mlp = rows
            context.ops.linear(of_mlp.x, layer.up, norm=of_mlp.norm, activation=activation, out=mlp)
            rows = add_linears(
                context, x, (attended, layer.dense), (mlp, layer.down), norm=self._next_norms[i]
            )

    def post_norm(self, context: Context, x: Tensor, activation: str, caches: list[CacheLayer]) -> None:
        """Compute x = attention_norm(x + attention(x)), then x = mlp_norm(x + mlp(x)), layer by layer."""
        for layer, heads, cache in zip(self.layers, self.heads, caches):
            mlp = context.mlp(layer)
            attended = attention(context, Rows(x, None), layer.qkv, heads, cache)
            add_and_norm(context, x, (attended, layer.dense), layer.attention_norm)
            context.ops.linear(x, layer.up, activation=activation, out=mlp)
            add_and_norm(context, x, (mlp, layer.down), layer.mlp_norm)

    def sandwich(
        self,
        context: Context,
        x: Tensor,
        activation: str,
        after: Sequence[tuple[Norm, Norm]],
        caches: list[CacheLayer],
    ) -> None:
        """Compute x += norm(attention(attention_norm(x))), then x += norm(mlp(mlp_norm(x))), layer by layer.

        after: the outer norms of attention and MLP, per layer.
        """
        at_once = _at_once(context, x)
        rows: Rows | None = self._first_rows(x)
        for i, (layer, norms, heads, cache) in enumerate(zip(self.layers, after, self.heads, caches)):
            attended = attention(context, rows, layer.qkv, heads, cache)
            if at_once and finish_sandwich_layer(
                context, x, attended, layer, activation, norms, self._following(i)
            ):
                rows = None
                continue
            mlp = context.mlp(layer)
            of_mlp = add_normed(context, x, (attended, layer.dense), norms[0], layer.mlp_norm)
            context.ops.linear(of_mlp.x, layer.up, norm=of_mlp.norm, activation=activation, out=mlp)
            rows = add_normed(context, x, (mlp, layer.down), norms[1], self._next_norms[i])

    def _first_rows(self, x: Tensor) -> Rows:
        """Return the input of the first layer's attention; a stage may have no layer."""
        return Rows(x, self.layers[0].attention_norm if self.layers else None)

    @cached_property
    def _next_norms(self) -> list[Norm | None]:
        """Return, for each layer, the norm of the next layer's attention; None for the last."""
        return [*(layer.attention_norm for layer in self.layers[1:]), None]


def _at_once(context: Context, x: Tensor) -> bool:
    """Return whether the operations may compute several GEMMs of these rows in one launch."""
    return x.shape[0] <= context.ops.most_linears_rows


def seen_window(config: ModelConfig, layer: int, num_positions: int) -> int:
    """Return the window of a layer; 0 if no sequence is longer than it."""
    window = config.window(layer)
    return window if window < num_positions else 0
