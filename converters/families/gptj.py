"""GPT-J: queries, keys and values in matrices of their own, all Linears without biases but the MLP's and the
head's.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig, RopeConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.hf_config import activation, shape
from tridecode.converters.rules import Rule, join_transposed, module_rules, transpose

EMBEDDING = "transformer.wte.weight"


def gptj_config(title: str, hf: PreTrainedConfig, **common) -> ModelConfig:
    """ModelConfig of GPT-J's network. title: the checkpoint's, for errors."""
    sizes = shape(hf)
    rotated, size = hf.rotary_dim, sizes["head_size"]
    if not rotated or rotated % 2 or not 0 < rotated <= size:
        raise UnsupportedError(
            f"{title} with rotary_dim = {rotated}; this version runs even numbers up to the head size, {size}"
        )
    return ModelConfig(
        family="gptj",
        **sizes,
        mlp_size=hf.n_inner if hf.n_inner is not None else 4 * hf.n_embd,
        max_positions=hf.n_positions,
        norm_eps=hf.layer_norm_epsilon,
        activation=activation(hf, "activation_function", title),
        rope=RopeConfig(rotated, interleaved=True),
        residual="parallel",
        attention_bias=False,
        head_bias=True,
        **common,
    )


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    return gptj_config("GPT-J", hf, **common)


def shared_rules() -> list[Rule]:
    """Return the rules that CodeGen shares: all except query_key_value's."""
    layer, out = "transformer.h.{i}", "model.layers.{i}"
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules(f"{layer}.ln_1", f"{out}.input_layernorm"),
        *module_rules(f"{layer}.attn.out_proj", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.mlp.fc_in", f"{out}.mlp.dense_h_to_4h", transpose),
        *module_rules(f"{layer}.mlp.fc_out", f"{out}.mlp.dense_4h_to_h", transpose),
        *module_rules("transformer.ln_f", "model.final_layernorm"),
        *module_rules("lm_head", "model.lm_head"),
    ]


def rules(num_heads: int) -> list[Rule]:
    qkv = tuple(f"transformer.h.{{i}}.attn.{name}_proj.weight" for name in "qkv")
    return [*shared_rules(), Rule(qkv, "model.layers.{i}.attention.query_key_value.weight", join_transposed)]


#: buffers that old checkpoints have: causal masks, and angles that follow from the positions
BUFFERS = tuple(
    f"transformer.h.{{i}}.attn.{name}" for name in ("bias", "masked_bias", "embed_positions", "causal_mask")
)

FAMILY = CheckpointFamily(("gptj",), EMBEDDING, model_config, rules, ignored=BUFFERS)
