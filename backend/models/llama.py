"""LLaMA: rotary positions, RMSNorm, grouped heads, SwiGLU. Touvron et al. 2023; LLaMA-3's rope scaling."""

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
    rope_table,
    run_at_once,
)
from tridecode.backend.models.specs import attention_specs, column_specs, head_spec, norm_specs, row_specs
from tridecode.backend.weight_layout import WeightSpec, stage_layers
from tridecode.kernels.ops import CacheLayer, DecoderLayer


def weight_specs(config: ModelConfig) -> list[WeightSpec]:
    """Every file of a LLaMA weight directory."""
    hidden, inner = config.hidden_size, config.mlp_size
    specs = [WeightSpec("model.wte", (config.vocab_size, hidden))]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        specs += norm_specs(f"{prefix}.input_layernorm", hidden, False, layer)
        specs += attention_specs(config, layer)
        specs += norm_specs(f"{prefix}.post_attention_layernorm", hidden, False, layer)
        specs += column_specs(f"{prefix}.mlp.gate_proj", hidden, (inner,), config.mlp_bias, layer)
        specs += column_specs(f"{prefix}.mlp.up_proj", hidden, (inner,), config.mlp_bias, layer)
        specs += row_specs(f"{prefix}.mlp.down_proj", inner, hidden, config.mlp_bias, layer)
    return [*specs, *norm_specs("model.final_layernorm", hidden, False), head_spec(config)]


class Model:
    """LLaMA on one rank: the layers of its stage, its share of heads and of the MLP."""

    def __init__(self, config: ModelConfig, weights: Weights, ranks: Ranks, num_positions: int):
        assert config.rope is not None
        self.config = config
        self.embedding = weights.tensor("model.wte")
        self.heads = make_heads(
            config, ranks, rope=rope_table(config.rope, num_positions, self.embedding.device)
        )
        self.final_norm = weights.norm("model.final_layernorm", config.norm_eps, bias=False)
        self.head = weights.head(
            self.embedding if config.tied_head else weights.tensor("model.lm_head.weight")
        )
        self.layers = [
            self._layer(weights, i) for i in stage_layers(config.num_layers, ranks.stage, ranks.num_stages)
        ]

    def _layer(self, weights: Weights, index: int) -> DecoderLayer:
        prefix, config = f"model.layers.{index}", self.config
        return DecoderLayer(
            attention_norm=weights.norm(f"{prefix}.input_layernorm", config.norm_eps, bias=False),
            qkv=weights.linear(f"{prefix}.attention.query_key_value", bias=config.attention_bias),
            dense=weights.linear(f"{prefix}.attention.dense", bias=config.attention_bias),
            mlp_norm=weights.norm(f"{prefix}.post_attention_layernorm", config.norm_eps, bias=False),
            up=weights.fused_linear(
                [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], bias=config.mlp_bias
            ),
            down=weights.linear(f"{prefix}.mlp.down_proj", bias=config.mlp_bias),
        )

    def embed(self, context: Context, x: Tensor) -> None:
        context.ops.embed(context.batch.token_ids, self.embedding, out=x)

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        """x: (T, C), the embedded tokens or what the stage before sent; becomes this stage's output."""
        if run_at_once(context, x, self.layers, self.heads, "swiglu", caches):
            return
        mlp = context.work.mlp[: context.num_tokens]
        for layer, cache in zip(self.layers, caches):
            attended = attention(context, x, layer.qkv, layer.attention_norm, self.heads, cache)
            add_linear(context, attended, layer.dense, residual=x)
            context.ops.linear(x, layer.up, norm=layer.mlp_norm, activation="swiglu", out=mlp)
            add_linear(context, mlp, layer.down, residual=x)

    def logits(self, context: Context, x: Tensor) -> Tensor:
        return logits(context, x, self.final_norm, self.head)
