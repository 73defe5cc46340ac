"""Gemma 2: Gemma's names, and norms of the output of attention and MLP."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from tridecode.backend.models.gemma2 import Gemma2Config
from tridecode.converters.families import CheckpointFamily, llama
from tridecode.converters.families.gemma import fold_norms
from tridecode.converters.families.llama import EMBEDDING, llama_fields, whole_rope
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, norms_less_one, rms_decoder_settings
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


def gguf_settings(header: GgufHeader, period: int, layers_27b: int) -> dict[str, Any]:
    """Settings that Gemma 2 and 3 share. period: each such layer has no window, the others have; layers_27b:
    of the model whose scores llama.cpp scales by another length than a head's."""
    settings = rms_decoder_settings(header)
    layers, window = settings["num_hidden_layers"], header.number("attention.sliding_window", 0)
    pattern = header.value("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        is_local = [bool(local) for local in pattern[:layers]]
    else:
        is_local = [bool(pattern) and layer % pattern < pattern - 1 for layer in range(layers)]
    kinds = ["sliding_attention" if window and local else "full_attention" for local in is_local]
    whole = settings["hidden_size"] // settings["num_attention_heads"]
    return {
        **settings,
        "sliding_window": window or None,
        "layer_types": kinds,
        "query_pre_attn_scalar": whole if layers == layers_27b else settings["head_dim"],
        "final_logit_softcapping": header.number("final_logit_softcapping", 0.0) or None,
    }


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    return {
        **gguf_settings(header, period=2, layers_27b=46),
        "attn_logit_softcapping": header.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": header.number("final_logit_softcapping", 30.0) or None,
        "sliding_window": header.size("attention.sliding_window", 4096),
    }


_GGUF = GgufRules("gemma2", _gguf_settings, restore=norms_less_one)
FAMILY = CheckpointFamily(("gemma2",), EMBEDDING, model_config, rules, gguf=_GGUF)
