"""A decoder on one rank: its weights, and the residual forms in which families arrange attention and MLP.

A family subclasses `Decoder` and says in `forward` which form it has. Letters as in kernels.ops.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tridecode.backend.config import ModelConfig, check_tensor_size
from tridecode.backend.models.layers import (
    Context,
    Ranks,
    Weights,
    add_linears,
    attention,
    make_heads,
    rope_table,
)
from tridecode.backend.models.specs import Layout
from tridecode.backend.weight_layout import stage_layers
from tridecode.kernels.ops import CacheLayer, DecoderLayer, Heads, Rope


class Decoder:
    """The layers of a rank's pipeline stage, with its share of heads and of the MLP.

    heads: those of each layer of the stage, one object where they are the same. Here all layers share the
    config's rotary positions, if it has any; a family with other heads replaces them in its __init__.
    Raises ConfigError if the tensor ranks cannot share the heads or the MLP.
    """

    layout: Layout  # the family's

    def __init__(self, config: ModelConfig, weights: Weights, ranks: Ranks, num_positions: int):
        check_tensor_size(config, ranks.tensor_size)
        self.config = config
        self.embedding = weights.tensor("model.wte")
        self.final_norm = weights.norm("model.final_layernorm", config.norm_eps)
        self.head = weights.head(
            self.embedding if config.tied_head else weights.tensor("model.lm_head.weight")
        )
        self.stage = stage_layers(config.num_layers, ranks.stage, ranks.num_stages)
        self.layers = [self.load_layer(weights, f"model.layers.{index}") for index in self.stage]
        rope = rope_table(config, num_positions, self.embedding.device) if config.rope else None
        self.heads: Sequence[Heads] = self.stage_heads(ranks, rope)

    def stage_heads(self, ranks: Ranks, rope: Rope | None) -> list[Heads]:
        """The heads of each layer, one object where they are the same."""
        slopes, kinds, heads = self.slopes(), {}, []
        for layer in self.stage:
            sizes, numbers = self.config.of_layer(layer), self.config.head_numbers(layer)
            kind = (sizes.num_heads, sizes.num_kv_heads, slopes is not None and tuple(numbers))
            if kind not in kinds:
                mine = None if slopes is None else slopes[list(numbers)]
                kinds[kind] = make_heads(sizes, ranks, rope=rope, slopes=mine)
            heads.append(kinds[kind])
        return heads

    def slopes(self) -> Tensor | None:
        """(num_heads,) ALiBi slopes of the heads before pruning, of all ranks; None: the model has none."""
        return None

    def load_layer(self, weights: Weights, prefix: str) -> DecoderLayer:
        eps = self.config.norm_eps
        return DecoderLayer(
            attention_norm=weights.norm(f"{prefix}.input_layernorm", eps),
            qkv=weights.linear(f"{prefix}.attention.query_key_value"),
            dense=weights.linear(f"{prefix}.attention.dense"),
            mlp_norm=weights.norm(f"{prefix}.post_attention_layernorm", eps),
            up=weights.linear(*(f"{prefix}.mlp.{name}" for name in self.layout.up)),
            down=weights.linear(f"{prefix}.mlp.{self.layout.down}"),
        )

    def embed(self, context: Context, x: Tensor) -> None:
        """x: (T, C), written: the embedded tokens."""
        context.ops.embed(context.batch.token_ids, self.embedding, out=x)

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        """x: (T, C), the embedded tokens or the output of the stage before; becomes this stage's output."""
        raise NotImplementedError

    def logits(self, context: Context, x: Tensor) -> Tensor:
        """(R, V) float32 logits of the rows that the batch wants."""
        rows = context.batch.sample_tokens
        last, out = context.work.last[: rows.shape[0]], context.work.logits[: rows.shape[0]]
        context.ops.gather_rows(x, rows, out=last)
        context.ops.linear(last, self.head, norm=self.final_norm, out=out)
        return out

    def sequential(self, context: Context, x: Tensor, activation: str, caches: list[CacheLayer]) -> None:
        """x += attention(norm(x)), then x += mlp(norm(x)), layer after layer."""
        if self._run_at_once(context, x, activation, caches):
            return
        for layer, heads, cache in zip(self.layers, self.heads, caches):
            mlp = context.mlp(layer)
            attended = attention(context, x, layer.qkv, layer.attention_norm, heads, cache)
            add_linears(context, x, (attended, layer.dense))
            context.ops.linear(x, layer.up, norm=layer.mlp_norm, activation=activation, out=mlp)
            add_linears(context, x, (mlp, layer.down))

    def parallel(self, context: Context, x: Tensor, activation: str, caches: list[CacheLayer]) -> None:
        """x += attention(attention_norm(x)) + mlp(mlp_norm(x)), layer after layer."""
        for layer, heads, cache in zip(self.layers, self.heads, caches):
            mlp = context.mlp(layer)
            attended = attention(context, x, layer.qkv, layer.attention_norm, heads, cache)
            context.ops.linear(x, layer.up, norm=layer.mlp_norm, activation=activation, out=mlp)
            add_linears(context, x, (attended, layer.dense), (mlp, layer.down))

    def _run_at_once(
        self, context: Context, x: Tensor, activation: str, caches: Sequence[CacheLayer]
    ) -> bool:
        """All layers of a small step in one launch, if the operations have one for it. False: not done.

        The layers must have the same heads and equally wide MLPs, and no rank may wait for another.
        """
        if context.ranks.tensor_size > 1 or len(set(map(id, self.heads))) != 1:
            return False
        if len({layer.down.weight.shape for layer in self.layers}) != 1:
            return False
        return context.ops.decoder_layers(x, self.layers, self.heads[0], activation, context.batch, caches)
