"""XGLM: its positions are computed, so its checkpoints hold none."""

from __future__ import annotations

from transformers import PreTrainedConfig

from tridecode.backend.models.xglm import OFFSET, XglmConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.hf_config import activation, demand, shape
from tridecode.converters.references.xglm import reference
from tridecode.converters.rules import Rule, join, join_transposed, module_rules, transpose

EMBEDDING = "model.embed_tokens.weight"


def model_config(hf: PreTrainedConfig, **common) -> XglmConfig:
    demand(hf, "XGLM", add_cross_attention=False)
    return XglmConfig(
        family="xglm",
        **shape(hf),
        mlp_size=hf.ffn_dim,
        max_positions=hf.max_position_embeddings,
        norm_eps=1e-5,  # that of torch's LayerNorm
        activation=activation(hf, "activation_function", "XGLM"),
        scale_embedding=hf.scale_embedding,
        zero_position=zero_position(hf.pad_token_id, hf.max_position_embeddings),
        **common,
    )


def zero_position(pad_id: int | None, num_positions: int) -> int:
    """transformers zeroes the row of its table of positions that has the padding token's number."""
    if pad_id is None:
        return -1
    row = pad_id if pad_id >= 0 else num_positions + OFFSET + pad_id
    return max(row - OFFSET, -1)


def rules(num_heads: int) -> list[Rule]:
    layer, out = "model.layers.{i}", "model.layers.{i}"
    qkv = tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv")
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules(f"{layer}.self_attn_layer_norm", f"{out}.input_layernorm"),
        *module_rules(qkv, f"{out}.attention.query_key_value", join_transposed, join),
        *module_rules(f"{layer}.self_attn.out_proj", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.final_layer_norm", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.fc1", f"{out}.mlp.dense_h_to_4h", transpose),
        *module_rules(f"{layer}.fc2", f"{out}.mlp.dense_4h_to_h", transpose),
        *module_rules("model.layer_norm", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


_IGNORED = ("model.embed_positions.weights",)
FAMILY = CheckpointFamily(("xglm",), EMBEDDING, model_config, rules, ignored=_IGNORED, reference=reference)
