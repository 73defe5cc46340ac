"""Gemma 3's text model. Gemma Team 2025.

Gemma 2 with an RMSNorm of each query and key head before the rotation, and separate rotary positions in the
layers with a window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tridecode.backend.configuration.model_config import RopeConfig
from tridecode.backend.models import Family, gemma2
from tridecode.backend.models.config_ini import IniSection
from tridecode.backend.models.context import Ranks
from tridecode.backend.models.gemma2 import Gemma2Config, gemma2_fields
from tridecode.backend.models.rope import rope_table
from tridecode.backend.models.rope_ini import read_rope, rope_keys
from tridecode.backend.models.specs import head_norm_specs
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import WeightSpec
from tridecode.kernels.operands import Heads

#: section of the same file: the keys of read_rope for the layers with a window
LOCAL = "local_"


@dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    """local_rope: rotary positions of the layers with a window; `rope` applies to the others."""

    local_rope: RopeConfig | None = None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return tuple(rope for rope in (self.rope, self.local_rope) if rope is not None)


def read(section: IniSection, tied_head: bool) -> Gemma3Config:
    """The keys of the local rotary positions have the prefix local_."""
    fields = gemma2_fields(section, tied_head)
    local = read_rope(section.with_prefix(LOCAL), fields["head_size"])
    return Gemma3Config(family="gemma3", **fields, local_rope=local)


def keys(config: Gemma3Config) -> dict[str, object]:
    local = rope_keys(replace(config, rope=config.local_rope))
    return {**gemma2.keys(config), **{LOCAL + key: value for key, value in local.items()}}


def weight_specs(config: Gemma3Config) -> list[WeightSpec]:
    return gemma2.weight_specs(config) + head_norm_specs(config, bias=False)


class Model(gemma2.Model):
    """Gemma 3 on one rank."""

    config: Gemma3Config

    def __init__(self, config: Gemma3Config, weights: Weights, ranks: Ranks, num_positions: int):
        super().__init__(config, weights, ranks, num_positions)
        self.heads = self.with_head_norms(weights)

    def stage_heads(self, ranks: Ranks, num_positions: int) -> list[Heads]:
        held, config = super().stage_heads(ranks, num_positions), self.config
        assert config.local_rope is not None
        local = rope_table(config.local_rope, num_positions, self.device, config.long_prompt_tokens)
        return [
            replace(heads, rope=local) if config.window(layer) else heads
            for heads, layer in zip(held, self.stage)
        ]


FAMILY = Family(
    "gemma3", "Gemma 3", model_type="Gemma3", read=read, keys=keys, weight_specs=weight_specs, model=Model
)
