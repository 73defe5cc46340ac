"""Gemma 2: Gemma's names, and norms of the output of attention and MLP."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from tridecode.backend.models.gemma2 import Gemma2Config
from tridecode.converters.families import CheckpointFamily, llama
from tridecode.converters.families.gemma import fold_norms
from tridecode.converters.families.llama import EMBEDDING, llama_fields, whole_rope
from tridecode.converters.hf_config import demand, windows
from tridecode.converters.rules import Rule, module_rules


def gemma2_fields(hf: PreTrainedConfig, title: str) -> dict[str, Any]:
    """The fields of Gemma2Config but its family, rotary positions and soft cap of scores."""
    demand(hf, title, use_bidirectional_attention=False)
    return {
        **llama_fields(hf, title, "hidden_activation"),
        "attention_bias": hf.attention_bias,
        "mlp_bias": False,
        "residual": "sandwich",
        "windows": windows(hf, title),
        "query_scalar": float(hf.query_pre_attn_scalar),
        "logit_softcap": float(hf.final_logit_softcapping or 0),
    }


def model_config(hf: PreTrainedConfig, **common) -> Gemma2Config:
    return Gemma2Config(
        family="gemma2",
        **gemma2_fields(hf, "Gemma 2"),
        rope=whole_rope(hf, "Gemma 2"),
        attention_softcap=float(hf.attn_logit_softcapping or 0),
        **common,
    )


def rules(num_heads: int) -> list[Rule]:
    layer = "model.layers.{i}"
    names = [f"{layer}.{name}" for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")]
    outer = [rule for name in names for rule in module_rules(name, name)]
    return fold_norms(llama.rules(num_heads) + outer)


FAMILY = CheckpointFamily(
    model_types=("gemma2",),
    prefix="model.",
    embedding=EMBEDDING,
    model_config=model_config,
    rules=rules,
)
