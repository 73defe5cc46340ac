"""Baichuan and Baichuan 2: LLaMA's layers, with rotary positions (7B) or ALiBi (13B). Yang et al. 2023.

Baichuan 2 normalises the rows of its head, which the conversion does once.
"""

from __future__ import annotations

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import Family, llama
from tridecode.backend.models.config_ini import IniSection, read_common
from tridecode.backend.models.context import Ranks
from tridecode.backend.models.layers import alibi_slopes
from tridecode.backend.models.rope_ini import read_rope, rope_keys
from tridecode.kernels.operands import Heads


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    """Section [baichuan]: ours, in FasterTransformer's spelling."""
    common = read_common(section)
    has_alibi = section.flag("use_attention_linear_bias", False)
    return ModelConfig(
        family="baichuan",
        norm_eps=section.number("layernorm_eps", 1e-6),
        activation="silu",
        rope=None if has_alibi else read_rope(section, common["head_size"]),
        attention_bias=False,
        mlp_bias=False,
        tied_head=tied_head,
        **common,
    )


def keys(config: ModelConfig) -> dict[str, object]:
    rope = {} if config.rope is None else rope_keys(config)
    return {"use_attention_linear_bias": config.rope is None, **rope}


class Model(llama.Model):
    """Baichuan on one rank."""

    def stage_heads(self, ranks: Ranks, num_positions: int) -> list[Heads]:
        if self.config.rope is not None:
            return super().stage_heads(ranks, num_positions)
        slopes = alibi_slopes(self.config.num_heads).to(self.device)
        return self.layer_heads(ranks, lambda layer: {"slopes": slopes})


FAMILY = Family("baichuan", "Baichuan", read=read, keys=keys, weight_specs=llama.LAYOUT.specs, model=Model)
