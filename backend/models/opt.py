"""OPT: learned positions, ReLU, pre-LayerNorm; OPT-350m: post-LayerNorm and a narrow word embedding between
two projections. Zhang et al. 2022.

It shares the section [gpt] of config.ini with GPT-2. FasterTransformer's converter multiplies the projections
into model.wte and model.lm_head; our directories store them separately, and the product is computed at load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import ACTIVATION_NAMES, ACTIVATIONS, IniSection, read_common
from tridecode.backend.models.context import Context, Ranks
from tridecode.backend.models.gpt import GPT2_FLAGS, has_flags, is_opt
from tridecode.backend.models.gpt import Model as GptModel
from tridecode.backend.models.specs import Layout
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import WeightSpec
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.operands import CacheLayer, Linear, Norm

RESIDUALS = {"pre_layernorm": "sequential", "post_layernorm": "post_norm"}
PROJECTIONS = "model.project_in.weight", "model.project_out.weight"


@dataclass(frozen=True)
class OptConfig(ModelConfig):
    """embedding_size: columns of the word embedding and of the head; the projections exist if it differs from
    hidden_size. final_norm: a LayerNorm before the head. norm_weights: norms have weights and biases.
    """

    embedding_size: int = 0
    final_norm: bool = True
    norm_weights: bool = True

    @property
    def is_projected(self) -> bool:
        return self.embedding_size != self.hidden_size


def recognises(section: IniSection) -> bool:
    return has_flags(section, GPT2_FLAGS) and is_opt(section)


def read(section: IniSection, tied_head: bool) -> OptConfig:
    """FasterTransformer's keys; attn_bias, mlp_bias, embedding_size and layernorm_weights are ours."""
    section.demand("has_adapters", False)
    common = read_common(section, None)
    return OptConfig(
        family="opt",
        norm_eps=section.number("layernorm_eps", 1e-6),
        activation=section.choice("activation_type", "Gelu", ACTIVATIONS),
        residual=section.choice("layernorm_type", "pre_layernorm", RESIDUALS),
        attention_bias=section.flag("attn_bias", True),
        mlp_bias=section.flag("mlp_bias", True),
        tied_head=tied_head,
        embedding_size=section.integer("embedding_size", common["hidden_size"], minimum=1),
        final_norm=section.flag("has_post_decoder_layernorm", True),
        norm_weights=section.flag("layernorm_weights", True),
        **common,
    )


def keys(config: OptConfig) -> dict[str, object]:
    norm_type = {residual: name for name, residual in RESIDUALS.items()}[config.residual]
    return {
        "model_variant": "opt-" + norm_type.partition("_")[0],
        "layernorm_type": norm_type,
        "activation_type": ACTIVATION_NAMES[config.activation],
        "has_post_decoder_layernorm": config.final_norm,
        "attn_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "embedding_size": config.embedding_size,
        "layernorm_weights": config.norm_weights,
        **GPT2_FLAGS,
    }


def layout(config: OptConfig) -> Layout:
    return Layout(positions=True, final_norm=config.final_norm)


def weight_specs(config: OptConfig) -> list[WeightSpec]:
    narrow = config.vocab_size, config.embedding_size
    specs = [
        replace(spec, shape=narrow) if spec.name in ("model.wte", "model.lm_head.weight") else spec
        for spec in layout(config).specs(config)
        if config.norm_weights or "layernorm." not in spec.name
    ]
    if config.is_projected:
        shapes = (config.embedding_size, config.hidden_size), (config.hidden_size, config.embedding_size)
        specs += [WeightSpec(name, shape) for name, shape in zip(PROJECTIONS, shapes)]
    return specs


class Model(GptModel):
    """OPT on one rank."""

    config: OptConfig

    def __init__(self, config: OptConfig, weights: Weights, ranks: Ranks, num_positions: int):
        self.layout = layout(config)
        super().__init__(config, weights, ranks, num_positions)
        if config.is_projected:
            narrow = self.embedding
            assert isinstance(narrow, Tensor)
            self.embedding = product(narrow, weights.tensor(PROJECTIONS[0]))

    def load_embedding(self, weights: Weights) -> Tensor | QuantizedWeight:
        """Load the embedding; projected (narrower) rows stay in the files' dtype until they are projected."""
        return weights.embedding(self.config.tied_head and not self.config.is_projected)

    def load_head(self, weights: Weights) -> Linear:
        if not self.config.is_projected:
            return super().load_head(weights)
        narrow = self.embedding if self.config.tied_head else weights.tensor("model.lm_head.weight")
        assert isinstance(narrow, Tensor)
        return weights.head(product(narrow, weights.tensor(PROJECTIONS[1]).t()))

    def load_norm(self, weights: Weights, name: str) -> Norm:
        if self.config.norm_weights:
            return super().load_norm(weights, name)
        ones = torch.ones(self.config.hidden_size, dtype=self.dtype, device=self.device)
        return Norm(ones, torch.zeros_like(ones), self.config.norm_eps)

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        residual = self.post_norm if self.config.residual == "post_norm" else self.sequential
        residual(context, x, self.config.activation, caches)


def product(rows: Tensor, matrix: Tensor, chunk: int = 4096) -> Tensor:
    """Return rows (V, E) @ matrix (E, C), rounded once; computed in float64, `chunk` rows at a time."""
    out, wide = rows.new_empty(rows.shape[0], matrix.shape[1]), matrix.double()
    for first in range(0, rows.shape[0], chunk):
        out[first : first + chunk] = rows[first : first + chunk].double() @ wide
    return out


FAMILY = Family(
    name="opt",
    title="OPT (learned positions, norms before or after)",
    section="gpt",
    model_type="GPT",
    recognises=recognises,
    read=read,
    keys=keys,
    weight_specs=weight_specs,
    model=Model,
)
