"""Phi-1, Phi-1.5 and Phi-2."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.models.phi import PhiConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, decoder_settings, partial_rope
from tridecode.converters.hf_config import activation, max_positions, rope_config, shape
from tridecode.converters.rules import Rule, join, join_transposed, module_rules, transpose

EMBEDDING = "model.embed_tokens.weight"


def model_config(hf: PreTrainedConfig, **common) -> PhiConfig:
    sizes = shape(hf)
    return PhiConfig(
        family="phi",
        **sizes,
        mlp_size=hf.intermediate_size,
        max_positions=max_positions(hf),
        norm_eps=hf.layer_norm_eps,
        activation=activation(hf, "hidden_act", "Phi"),
        rope=rope_config(hf, rotated_size(hf, sizes["head_size"], "Phi"), "Phi"),
        residual="parallel",
        head_bias=True,
        head_norms=hf.qk_layernorm,
        **common,
    )


def rotated_size(hf: PreTrainedConfig, head_size: int, title: str) -> int:
    """Return the number of rotated dimensions of a head. Raises UnsupportedError if it is odd or 0."""
    factor = hf.rope_parameters.get("partial_rotary_factor", 1.0)
    size = int(head_size * factor)
    if size < 2 or size % 2:
        found = f"partial_rotary_factor = {factor} rotates {size} of {head_size} dimensions"
        raise UnsupportedError(f"{title} with {found}; this version runs even numbers from 2")
    return size


def rules(num_heads: int) -> list[Rule]:
    layer, out = "model.layers.{i}", "model.layers.{i}"
    qkv = tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv")
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules(f"{layer}.input_layernorm", f"{out}.input_layernorm"),
        *module_rules(qkv, f"{out}.attention.query_key_value", join_transposed, join),
        *module_rules(f"{layer}.self_attn.q_layernorm", f"{out}.attention.q_norm"),
        *module_rules(f"{layer}.self_attn.k_layernorm", f"{out}.attention.k_norm"),
        *module_rules(f"{layer}.self_attn.dense", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.mlp.fc1", f"{out}.mlp.dense_h_to_4h", transpose),
        *module_rules(f"{layer}.mlp.fc2", f"{out}.mlp.dense_4h_to_h", transpose),
        *module_rules("model.final_layernorm", "model.final_layernorm"),
        *module_rules("lm_head", "model.lm_head"),
    ]


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    return {
        **decoder_settings(header),
        "layer_norm_eps": float(header.number("attention.layer_norm_epsilon")),
        "rope_parameters": partial_rope(header),
    }


#: of old checkpoints
_IGNORED = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)
_GGUF = GgufRules("phi2", _gguf_settings)
FAMILY = CheckpointFamily(("phi",), EMBEDDING, model_config, rules, ignored=_IGNORED, gguf=_GGUF)
