"""GPT-Neo: queries, keys and values in matrices of their own, without biases."""

from __future__ import annotations

from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.hf_config import activation, shape
from tridecode.converters.rules import Rule, join_transposed, module_rules, transpose

EMBEDDING = "transformer.wte.weight"


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    inner = hf.intermediate_size
    return ModelConfig(
        family="gptneo",
        **shape(hf),
        mlp_size=inner if inner is not None else 4 * hf.hidden_size,
        max_positions=hf.max_position_embeddings,
        norm_eps=hf.layer_norm_epsilon,
        activation=activation(hf, "activation_function", "GPT-Neo"),
        attention_bias=False,
        dense_bias=True,
        attention_scale=1.0,
        windows=_windows(hf),
        **common,
    )


def _windows(hf: PreTrainedConfig) -> tuple[int, ...]:
    kinds = hf.attention_layers
    if unknown := set(kinds) - {"global", "local"}:
        raise UnsupportedError(
            f"GPT-Neo with attention_types {', '.join(map(str, unknown))}; this version runs global and local"
        )
    if "local" not in kinds:
        return ()
    if hf.window_size < 1:
        raise UnsupportedError(f"GPT-Neo with window_size = {hf.window_size}; this version runs 1 or more")
    return tuple(hf.window_size if kind == "local" else 0 for kind in kinds)


def rules(num_heads: int) -> list[Rule]:
    layer, out = "transformer.h.{i}", "model.layers.{i}"
    qkv = tuple(f"{layer}.attn.attention.{name}_proj" for name in "qkv")
    return [
        Rule(EMBEDDING, "model.wte"),
        Rule("transformer.wpe.weight", "model.wpe"),
        *module_rules(f"{layer}.ln_1", f"{out}.input_layernorm"),
        *module_rules(qkv, f"{out}.attention.query_key_value", join_transposed),
        *module_rules(f"{layer}.attn.attention.out_proj", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.ln_2", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.mlp.c_fc", f"{out}.mlp.dense_h_to_4h", transpose),
        *module_rules(f"{layer}.mlp.c_proj", f"{out}.mlp.dense_4h_to_h", transpose),
        *module_rules("transformer.ln_f", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


_IGNORED = tuple(f"transformer.h.{{i}}.attn.attention.{name}" for name in ("bias", "masked_bias"))
FAMILY = CheckpointFamily(("gpt_neo",), EMBEDDING, model_config, rules, ignored=_IGNORED)
