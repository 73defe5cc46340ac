"""StableLM: LayerNorm, partial rotary positions, SwiGLU, grouped heads; StableLM 2 12B: attention and MLP in
parallel after one norm, and a norm of each head. Bellagente et al. 2024."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import ACTIVATION_NAMES, ACTIVATIONS, IniSection, read_grouped
from tridecode.backend.models.context import Context, Ranks
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.llama import GATED
from tridecode.backend.models.rope_ini import read_rope, rope_keys
from tridecode.backend.models.specs import HEAD_NORMS, Layout
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import WeightSpec
from tridecode.kernels.operands import CacheLayer


@dataclass(frozen=True)
class StableLmConfig(ModelConfig):
    """head_norms: a LayerNorm without bias of each query head and of each key head, each with weights of its
    own."""

    head_norms: bool = False


def read(section: IniSection, tied_head: bool) -> StableLmConfig:
    """Section [stablelm]: ours, in FasterTransformer's spelling."""
    gated = {name: kind for name, kind in ACTIVATIONS.items() if kind in GATED}
    return StableLmConfig(
        family="stablelm",
        norm_eps=section.number("layernorm_eps", 1e-5),
        activation=section.choice("activation_type", "Silu", gated),
        rope=read_rope(section, None),
        residual="parallel" if section.flag("use_gptj_residual", False) else "sequential",
        attention_bias=section.flag("attn_bias", False),
        dense_bias=False,
        mlp_bias=False,
        tied_head=tied_head,
        head_norms=section.flag("qk_layernorm", False),
        **read_grouped(section),
    )


def keys(config: StableLmConfig) -> dict[str, object]:
    return {
        "kv_head_num": config.num_kv_heads,
        "hidden_units": config.hidden_size,
        "activation_type": ACTIVATION_NAMES[config.activation],
        "use_gptj_residual": config.residual == "parallel",
        "attn_bias": config.attention_bias,
        "qk_layernorm": config.head_norms,
        **rope_keys(config),
    }


def layout(config: StableLmConfig) -> Layout:
    shared = config.residual == "parallel"
    norm = "input_layernorm" if shared else "post_attention_layernorm"
    return Layout(up=("gate_proj", "up_proj"), down="down_proj", mlp_norm=norm)


def weight_specs(config: StableLmConfig) -> list[WeightSpec]:
    specs = layout(config).specs(config)
    for layer in range(config.num_layers if config.head_norms else 0):
        sizes = config.of_layer(layer)
        for name, count in zip(HEAD_NORMS, (sizes.num_heads, sizes.num_kv_heads)):
            stem, shape = f"model.layers.{layer}.attention.{name}.weight", (count, config.head_size)
            specs.append(WeightSpec(stem, shape, axis=0, layer=layer, heads=(count,)))
    return specs


class Model(Decoder):
    """StableLM on one rank."""

    config: StableLmConfig

    def __init__(self, config: StableLmConfig, weights: Weights, ranks: Ranks, num_positions: int):
        self.layout = layout(config)
        super().__init__(config, weights, ranks, num_positions)
        if config.head_norms:
            self.heads = self.with_head_norms(weights, centred=True)

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        residual = self.parallel if self.config.residual == "parallel" else self.sequential
        residual(context, x, GATED[self.config.activation], caches)


FAMILY = Family("stablelm", "StableLM", read=read, keys=keys, weight_specs=weight_specs, model=Model)
