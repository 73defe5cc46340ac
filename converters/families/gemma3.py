"""Gemma 3: Gemma 2's names, and a norm of each query and key head."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import RopeConfig
from tridecode.backend.models.gemma3 import Gemma3Config
from tridecode.converters.families import CheckpointFamily, gemma2
from tridecode.converters.families.gemma import fold_norms
from tridecode.converters.families.gemma2 import gemma2_fields
from tridecode.converters.families.llama import EMBEDDING
from tridecode.converters.families.qwen3 import head_norm_rules
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, norms_less_one
from tridecode.converters.hf_config import demand_whole_rotary, max_positions, rope_config
from tridecode.converters.rules import Rule


def model_config(hf: PreTrainedConfig, **common) -> Gemma3Config:
    """transformers does not use attn_logit_softcapping of Gemma 3."""
    full, local = _ropes(hf)
    return Gemma3Config(
        family="gemma3",
        **{**gemma2_fields(hf, "Gemma 3"), "max_positions": _context(hf, full)},
        rope=full,
        local_rope=local,
        **common,
    )


def _context(hf: PreTrainedConfig, full: RopeConfig) -> int:
    """Released configs scale linearly by 8, and their max_position_embeddings includes that factor."""
    return int(hf.max_position_embeddings) if full.scaling == "linear" else max_positions(hf)


def _ropes(hf: PreTrainedConfig) -> tuple[RopeConfig, RopeConfig]:
    """Return the rope of the layers without and with a sliding window; a model with one kind of layer gets
    the same rope for both."""
    found = {}
    for kind in set(hf.layer_types):
        demand_whole_rotary(hf.rope_parameters[kind], "Gemma 3")
        found[kind] = rope_config(hf, hf.head_dim, "Gemma 3", layer_type=kind)
    ropes = [found.get(kind) for kind in ("full_attention", "sliding_attention")]
    limits = {rope.original_max_positions for rope in found.values() if rope.scaling == "longrope"}
    if len(limits) > 1:
        wanted = "this version runs one for all layers"
        raise UnsupportedError(f"Gemma 3 with original_max_position_embeddings of {sorted(limits)}; {wanted}")
    full, local = ropes[0] or ropes[1], ropes[1] or ropes[0]
    assert full is not None and local is not None
    return full, local


def rules(num_heads: int) -> list[Rule]:
    return gemma2.rules(num_heads) + fold_norms(head_norm_rules())


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    """Layers with a window have a base of their own and no scaling."""
    settings = gemma2.gguf_settings(header, period=6, layers_27b=62)
    local = {"rope_type": "default", "rope_theta": float(header.number("rope.freq_base_swa", 10000.0))}
    ropes = {"full_attention": settings["rope_parameters"], "sliding_attention": local}
    return {**settings, "rope_parameters": ropes}


_GGUF = GgufRules("gemma3", _gguf_settings, restore=norms_less_one)
FAMILY = CheckpointFamily(("gemma3_text",), EMBEDDING, model_config, rules, gguf=_GGUF)
