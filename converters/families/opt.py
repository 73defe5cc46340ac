"""OPT: the first two rows of its position table are unused."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.models.opt import OptConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.hf_config import activation, shape
from tridecode.converters.rules import Rule, join, join_transposed, module_rules, transpose

EMBEDDING = "model.decoder.embed_tokens.weight"
OFFSET = 2


def model_config(hf: PreTrainedConfig, **common) -> OptConfig:
    is_pre_norm = hf.do_layer_norm_before
    return OptConfig(
        family="opt",
        **shape(hf),
        mlp_size=hf.ffn_dim,
        max_positions=hf.max_position_embeddings,
        norm_eps=1e-5,  # the default of torch's LayerNorm
        activation=activation(hf, "activation_function", "OPT"),
        residual="sequential" if is_pre_norm else "post_norm",
        attention_bias=hf.enable_bias,
        mlp_bias=hf.enable_bias,
        embedding_size=hf.word_embed_proj_dim,
        final_norm=is_pre_norm and not hf._remove_final_layer_norm,
        norm_weights=hf.layer_norm_elementwise_affine,
        **common,
    )


def without_offset(positions: Tensor) -> Tensor:
    return positions[OFFSET:]


def rules(num_heads: int) -> list[Rule]:
    decoder = "model.decoder"
    layer, out = f"{decoder}.layers.{{i}}", "model.layers.{i}"
    qkv = tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv")
    return [
        Rule(EMBEDDING, "model.wte"),
        Rule(f"{decoder}.embed_positions.weight", "model.wpe", without_offset),
        *module_rules(f"{decoder}.project_in", "model.project_in", transpose),
        *module_rules(f"{layer}.self_attn_layer_norm", f"{out}.input_layernorm"),
        *module_rules(qkv, f"{out}.attention.query_key_value", join_transposed, join),
        *module_rules(f"{layer}.self_attn.out_proj", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.final_layer_norm", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.fc1", f"{out}.mlp.dense_h_to_4h", transpose),
        *module_rules(f"{layer}.fc2", f"{out}.mlp.dense_4h_to_h", transpose),
        *module_rules(f"{decoder}.final_layer_norm", "model.final_layernorm"),
        *module_rules(f"{decoder}.project_out", "model.project_out", transpose),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


FAMILY = CheckpointFamily(("opt",), EMBEDDING, model_config, rules)
