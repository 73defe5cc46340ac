"""BLOOM: ALiBi instead of positions, LayerNorm after the embedding, pre-LayerNorm, fused QKV, tanh GELU.
BigScience 2022.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import IniSection
from tridecode.backend.models.context import Context, Ranks, Rows
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.gpt import gpt_section_keys, has_flags, read_gpt_section
from tridecode.backend.models.layers import add_linears, alibi_slopes, attention
from tridecode.backend.models.specs import Layout
from tridecode.backend.models.weights import Weights
from tridecode.kernels.operands import CacheLayer, Heads

FLAGS = {
    "has_positional_encoding": False,
    "has_pre_decoder_layernorm": True,
    "use_attention_linear_bias": True,
}
LAYOUT = Layout(embedding_norm=True)


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    """Read section [gpt]; FasterTransformer's converter writes post_layernorm for a BLOOM whose residual is
    the norm.

    Its engine then computes another network than BLOOM. Raises UnsupportedError for a head written by that
    converter, which transposes it.
    """
    ours = "residual_from_norm" in section.items
    if not (ours or tied_head) and section.text("model_variant", "none").lower().startswith("bloom"):
        raise UnsupportedError(
            f"{section.path.parent}/model.lm_head.weight.bin is transposed, as FasterTransformer's BLOOM "
            "converter writes it; convert the directory with build-repo"
        )
    post_norm = section.text("layernorm_type", "pre_layernorm").lower() == "post_layernorm"
    from_norm = section.flag("residual_from_norm", post_norm)
    residual = "from_norm" if from_norm else "sequential"
    return read_gpt_section("bloom", section, tied_head, ("post_layernorm",), residual=residual)


def keys(config: ModelConfig) -> dict[str, object]:
    from_norm = config.residual == "from_norm"
    return {**gpt_section_keys(config, FLAGS), "model_variant": "bloom-pre", "residual_from_norm": from_norm}


class Model(Decoder):
    """BLOOM on one rank."""

    layout = LAYOUT

    def __init__(self, config: ModelConfig, weights: Weights, ranks: Ranks, num_positions: int):
        super().__init__(config, weights, ranks, num_positions)
        self.embedding_norm = weights.norm("model.pre_decoder_layernorm", config.norm_eps)

    def stage_heads(self, ranks: Ranks, num_positions: int) -> list[Heads]:
        slopes = alibi_slopes(self.config.num_heads).to(self.device)
        return self.layer_heads(ranks, lambda layer: {"slopes": slopes})

    def embed(self, context: Context, x: Tensor) -> None:
        self.look_up(context, x, norm=self.embedding_norm)

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        if self.config.residual == "sequential":
            self.sequential(context, x, self.config.activation, caches)
        else:
            self.from_norm(context, x, caches)

    def from_norm(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        """apply_residual_connection_post_layernorm: h = norm(x), x = h + attention(h); the MLP likewise."""
        for layer, heads, cache in zip(self.layers, self.heads, caches):
            mlp = context.mlp(layer)
            attended = attention(context, Rows(x, layer.attention_norm), layer.qkv, heads, cache)
            context.ops.norm(x, layer.attention_norm, out=x)
            add_linears(context, x, (attended, layer.dense))
            context.ops.linear(x, layer.up, norm=layer.mlp_norm, activation=self.config.activation, out=mlp)
            context.ops.norm(x, layer.mlp_norm, out=x)
            add_linears(context, x, (mlp, layer.down))


FAMILY = Family(
    name="bloom",
    title="BLOOM (ALiBi and a LayerNorm after the embedding)",
    section="gpt",
    model_type="GPT",
    recognises=partial(has_flags, flags=FLAGS),
    read=read,
    keys=keys,
    weight_specs=LAYOUT.specs,
    model=Model,
)
