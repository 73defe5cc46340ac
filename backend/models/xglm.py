"""XGLM: sinusoidal positions, computed at load, a scaled word embedding, pre-LayerNorm, exact GELU.

Lin et al. 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import ACTIVATION_NAMES, ACTIVATIONS, IniSection, read_common
from tridecode.backend.models.context import Context, Ranks
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.specs import Layout
from tridecode.backend.models.weights import Weights
from tridecode.kernels.operands import CacheLayer

LAYOUT = Layout()
#: position 0 has the angles of index 2
OFFSET = 2


@dataclass(frozen=True)
class XglmConfig(ModelConfig):
    """scale_embedding: word embeddings are multiplied by sqrt(hidden_size). zero_position: a position whose
    vector is zero, that of fairseq's padding token; -1: none, as in the released models.
    """

    scale_embedding: bool = True
    zero_position: int = -1


def read(section: IniSection, tied_head: bool) -> XglmConfig:
    """Section [xglm]: ours, in FasterTransformer's spelling."""
    common = read_common(section, None)
    return XglmConfig(
        family="xglm",
        norm_eps=section.number("layernorm_eps", 1e-5),
        activation=section.choice("activation_type", "gelu_erf", ACTIVATIONS),
        tied_head=tied_head,
        scale_embedding=section.flag("scale_embedding", True),
        zero_position=section.integer("zero_position", -1, -1, common["max_positions"] - 1),
        **common,
    )


def keys(config: XglmConfig) -> dict[str, object]:
    return {
        "activation_type": ACTIVATION_NAMES[config.activation],
        "scale_embedding": config.scale_embedding,
        "zero_position": config.zero_position,
    }


def sinusoids(num_positions: int, size: int) -> Tensor:
    """(num_positions, size) float32: the sines of the angles, the cosines, and a zero if size is odd.

    Source: transformers' XGLMSinusoidalPositionalEmbedding, after tensor2tensor.
    """
    half = size // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / max(half - 1, 1)))
    angles = torch.arange(OFFSET, OFFSET + num_positions).float()[:, None] * frequencies
    parts = [angles.sin(), angles.cos(), torch.zeros(num_positions, size % 2)]
    return torch.cat(parts, dim=1)


class Model(Decoder):
    """XGLM on one rank."""

    layout = LAYOUT

    def __init__(self, config: XglmConfig, weights: Weights, ranks: Ranks, num_positions: int):
        super().__init__(config, weights, ranks, num_positions)
        self.embedding_scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        table = sinusoids(num_positions, config.hidden_size)
        if 0 <= config.zero_position < num_positions:
            table[config.zero_position] = 0
        self.positions = (table / self.embedding_scale).to(self.device, self.dtype)

    def embed(self, context: Context, x: Tensor) -> None:
        """Compute scale * (word + position / scale), so that the look-up includes the sum."""
        self.look_up(context, x, self.positions)

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        self.sequential(context, x, self.config.activation, caches)


FAMILY = Family(
    name="xglm",
    title="XGLM",
    read=read,
    keys=keys,
    weight_specs=LAYOUT.specs,
    model=Model,
    has_slopes=lambda config: False,
)
