"""GPT-NeoX: partial rotary positions, pre-LayerNorm, attention and MLP in parallel. Black et al. 2022."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import ACTIVATION_NAMES, ACTIVATIONS, IniSection, read_common
from tridecode.backend.models.context import Context
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.rope_ini import read_rope, rope_keys
from tridecode.backend.models.specs import Layout
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import WeightSpec
from tridecode.kernels.operands import CacheLayer, DecoderLayer

LAYOUT = Layout()
BIAS_SUM = "mlp.attention.bias.sum"


@dataclass(frozen=True)
class GptNeoXConfig(ModelConfig):
    """bias_sum: one file holds the sum of the biases of dense and dense_4h_to_h, as in FasterTransformer's
    directories of parallel layers. Ours store both, because a sum rounded to 16 bit differs from
    transformers' result.
    """

    bias_sum: bool = False


def read(section: IniSection, tied_head: bool) -> GptNeoXConfig:
    """FasterTransformer's keys; activation_type, attn_bias, bias_sum, layernorm_eps and rope_* are ours.

    transformers rounds an odd rotary_embedding up; FasterTransformer's kernels, whose sections have no
    rope_theta, rotate pairs.
    """
    parallel = section.flag("use_gptj_residual", True)
    return GptNeoXConfig(
        family="gptneox",
        norm_eps=section.number("layernorm_eps", 1e-5),
        activation=section.choice("activation_type", "Gelu", ACTIVATIONS),
        rope=read_rope(section, None, odd="rope_theta" in section.items),
        residual="parallel" if parallel else "sequential",
        bias_sum=section.flag("bias_sum", parallel),
        attention_bias=section.flag("attn_bias", True),
        tied_head=tied_head,
        **read_common(section),
    )


def keys(config: GptNeoXConfig) -> dict[str, object]:
    return {
        "use_gptj_residual": int(config.residual == "parallel"),
        "activation_type": ACTIVATION_NAMES[config.activation],
        "attn_bias": config.attention_bias,
        "bias_sum": config.bias_sum,
        **rope_keys(config),
    }


def weight_specs(config: GptNeoXConfig) -> list[WeightSpec]:
    specs = LAYOUT.specs(config)
    if not config.bias_sum:
        return specs
    joined = (".attention.dense.bias", ".mlp.dense_4h_to_h.bias")
    sums = [
        WeightSpec(f"model.layers.{layer}.{BIAS_SUM}", (config.hidden_size,), layer=layer, divided=True)
        for layer in range(config.num_layers)
    ]
    return [spec for spec in specs if not spec.name.endswith(joined)] + sums


class Model(Decoder):
    """GPT-NeoX on one rank."""

    layout = LAYOUT

    def load_layer(self, weights: Weights, prefix: str) -> DecoderLayer:
        layer = super().load_layer(weights, prefix)
        if f"{prefix}.{BIAS_SUM}" not in weights.specs:
            return layer
        return replace(layer, down=replace(layer.down, bias=weights.tensor(f"{prefix}.{BIAS_SUM}")))

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        residual = self.parallel if self.config.residual == "parallel" else self.sequential
        residual(context, x, self.config.activation, caches)


FAMILY = Family("gptneox", "GPT-NeoX", read=read, keys=keys, weight_specs=weight_specs, model=Model)
