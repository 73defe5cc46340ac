"""LLaMA: rotary positions, RMSNorm, grouped heads, SwiGLU. Touvron et al. 2023; LLaMA-3's rope scaling."""

from __future__ import annotations

from torch import Tensor

from tridecode.backend.config import ModelConfig
from tridecode.backend.errors import ConfigError
from tridecode.backend.models import Family
from tridecode.backend.models.config_ini import IniSection, read_common, read_rope, rope_keys
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.layers import Context
from tridecode.backend.models.specs import Layout
from tridecode.kernels.ops import CacheLayer

LAYOUT = Layout(norm_bias=False, up=("gate_proj", "up_proj"), down="down_proj")


def read(section: IniSection, tied_head: bool) -> ModelConfig:
    """Section [llama]: ours, in FasterTransformer's spelling."""
    common = read_common(section)
    num_heads = common["num_heads"]
    common["num_kv_heads"] = num_kv_heads = section.integer("kv_head_num", num_heads, minimum=1)
    common["hidden_size"] = section.integer("hidden_units", common["hidden_size"], minimum=1)
    if num_heads % num_kv_heads:
        found = f"[llama] head_num = {num_heads}, kv_head_num = {num_kv_heads}"
        raise ConfigError(f"{section.path}: {found}; wanted a head_num that is a multiple of it")
    return ModelConfig(
        family="llama",
        norm_eps=section.number("layernorm_eps", 1e-6),
        activation="silu",
        rope=read_rope(section, common["head_size"]),
        attention_bias=section.flag("attn_bias", False),
        mlp_bias=section.flag("mlp_bias", False),
        tied_head=tied_head,
        **common,
    )


def keys(config: ModelConfig) -> dict[str, object]:
    return {
        "kv_head_num": config.num_kv_heads,
        "hidden_units": config.hidden_size,
        "attn_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        **rope_keys(config),
    }


class Model(Decoder):
    """LLaMA on one rank."""

    layout = LAYOUT

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        self.sequential(context, x, "swiglu", caches)


FAMILY = Family(
    name="llama",
    title="LLaMA",
    section="llama",
    model_type="LLaMA",
    read=read,
    keys=keys,
    weight_specs=LAYOUT.specs,
    model=Model,
)
