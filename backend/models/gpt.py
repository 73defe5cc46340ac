"""GPT-2: learned positions, pre-LayerNorm, fused QKV, GELU. Radford et al. 2019."""

from __future__ import annotations

from torch import Tensor

from tridecode.backend.config import ModelConfig
from tridecode.backend.models.layers import (
    Context,
    Ranks,
    Weights,
    add_linear,
    attention,
    logits,
    make_heads,
    run_at_once,
)
from tridecode.backend.models.specs import attention_specs, column_specs, head_spec, norm_specs, row_specs
from tridecode.backend.weight_layout import WeightSpec, stage_layers
from tridecode.kernels.ops import CacheLayer, DecoderLayer


def weight_specs(config: ModelConfig) -> list[WeightSpec]:
    """Every file of a GPT weight directory."""
    hidden, inner = config.hidden_size, config.mlp_size
    specs = [
        WeightSpec("model.wte", (config.vocab_size, hidden)),
        WeightSpec("model.wpe", (config.max_positions, hidden)),
    ]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        specs += norm_specs(f"{prefix}.input_layernorm", hidden, True, layer)
        specs += attention_specs(config, layer)
        specs += norm_specs(f"{prefix}.post_attention_layernorm", hidden, True, layer)
        specs += column_specs(f"{prefix}.mlp.dense_h_to_4h", hidden, (inner,), config.mlp_bias, layer)
        specs += row_specs(f"{prefix}.mlp.dense_4h_to_h", inner, hidden, config.mlp_bias, layer)
    return [*specs, *norm_specs("model.final_layernorm", hidden, True), head_spec(config)]


class Model:
    """GPT-2 on one rank: the layers of its stage, its share of heads and of the MLP."""

    def __init__(self, config: ModelConfig, weights: Weights, ranks: Ranks, num_positions: int):
        self.config = config
        self.heads = make_heads(config, ranks)
        self.embedding = weights.tensor("model.wte")
        self.positions = weights.tensor("model.wpe")
        self.final_norm = weights.norm("model.final_layernorm", config.norm_eps, bias=True)
        self.head = weights.head(
            self.embedding if config.tied_head else weights.tensor("model.lm_head.weight")
        )
        self.layers = [
            self._layer(weights, i) for i in stage_layers(config.num_layers, ranks.stage, ranks.num_stages)
        ]

    def _layer(self, weights: Weights, index: int) -> DecoderLayer:
        prefix, eps = f"model.layers.{index}", self.config.norm_eps
        return DecoderLayer(
            attention_norm=weights.norm(f"{prefix}.input_layernorm", eps, bias=True),
            qkv=weights.linear(f"{prefix}.attention.query_key_value", bias=True),
            dense=weights.linear(f"{prefix}.attention.dense", bias=True),
            mlp_norm=weights.norm(f"{prefix}.post_attention_layernorm", eps, bias=True),
            up=weights.linear(f"{prefix}.mlp.dense_h_to_4h", bias=True),
            down=weights.linear(f"{prefix}.mlp.dense_4h_to_h", bias=True),
        )

    def embed(self, context: Context, x: Tensor) -> None:
        batch = context.batch
        context.ops.embed(
            batch.token_ids, self.embedding, positions=batch.positions, position_table=self.positions, out=x
        )

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        """x: (T, C), the embedded tokens or what the stage before sent; becomes this stage's output."""
        if run_at_once(context, x, self.layers, self.heads, self.config.activation, caches):
            return
        mlp = context.work.mlp[: context.num_tokens]
        for layer, cache in zip(self.layers, caches):
            attended = attention(context, x, layer.qkv, layer.attention_norm, self.heads, cache)
            add_linear(context, attended, layer.dense, residual=x)
            context.ops.linear(x, layer.up, norm=layer.mlp_norm, activation=self.config.activation, out=mlp)
            add_linear(context, mlp, layer.down, residual=x)

    def logits(self, context: Context, x: Tensor) -> Tensor:
        return logits(context, x, self.final_norm, self.head)
