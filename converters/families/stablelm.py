"""StableLM 3B and StableLM 2: norms of heads are stored head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models.stablelm import StableLmConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.families.phi import rotated_size
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, decoder_settings, partial_rope
from tridecode.converters.hf_config import max_positions, rope_config, shape
from tridecode.converters.rules import Rule, join, join_transposed, module_rules, transpose

EMBEDDING = "model.embed_tokens.weight"
_GATES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def model_config(hf: PreTrainedConfig, **common) -> StableLmConfig:
    if hf.hidden_act not in _GATES:
        found = f"hidden_act = {hf.hidden_act}"
        raise UnsupportedError(f"StableLM with {found}; this version runs {', '.join(_GATES)}")
    sizes = {**shape(hf), "head_size": hf.hidden_size // hf.num_attention_heads}
    return StableLmConfig(
        family="stablelm",
        **sizes,
        mlp_size=hf.intermediate_size,
        max_positions=max_positions(hf),
        norm_eps=hf.layer_norm_eps,
        activation=_GATES[hf.hidden_act],
        rope=rope_config(hf, rotated_size(hf, sizes["head_size"], "StableLM"), "StableLM"),
        residual="parallel" if hf.use_parallel_residual else "sequential",
        attention_bias=hf.use_qkv_bias,
        dense_bias=False,
        mlp_bias=False,
        head_norms=hf.qk_layernorm,
        **common,
    )


def rules(num_heads: int) -> list[Rule]:
    layer, out = "model.layers.{i}", "model.layers.{i}"
    qkv = tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv")
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules(f"{layer}.input_layernorm", f"{out}.input_layernorm"),
        *module_rules(qkv, f"{out}.attention.query_key_value", join_transposed, join),
        *module_rules(f"{layer}.self_attn.o_proj", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.post_attention_layernorm", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.mlp.gate_proj", f"{out}.mlp.gate_proj", transpose),
        *module_rules(f"{layer}.mlp.up_proj", f"{out}.mlp.up_proj", transpose),
        *module_rules(f"{layer}.mlp.down_proj", f"{out}.mlp.down_proj", transpose),
        *module_rules("model.norm", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


def stack(*heads: Tensor) -> Tensor:
    return torch.stack(heads)


def head_rules(config: ModelConfig) -> list[Rule]:
    """q_norm (H, D) and k_norm (K, D), from a vector for each head."""
    layer, out = "model.layers.{i}.self_attn", "model.layers.{i}.attention"
    return [
        Rule(
            tuple(f"{layer}.{name}_layernorm.norms.{head}.weight" for head in range(count)),
            f"{out}.{name}_norm.weight",
            stack,
        )
        for name, count in (("q", config.num_heads), ("k", config.num_kv_heads))
    ]


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    return {
        **decoder_settings(header),
        "layer_norm_eps": float(header.number("attention.layer_norm_epsilon")),
        "rope_parameters": partial_rope(header),
        "use_parallel_residual": not header.in_layers("ffn_norm.weight"),
        "use_qkv_bias": header.in_layers("attn_q.bias") or header.in_layers("attn_qkv.bias"),
        "qk_layernorm": header.in_layers("attn_q_norm.weight"),
    }


_GGUF_ROWS = {
    f"attn_{name}_norm.weight": f"model.layers.{{i}}.self_attn.{name}_layernorm.norms.{{row}}.weight"
    for name in "qk"
}


FAMILY = CheckpointFamily(
    model_types=("stablelm",),
    prefix="model.",
    embedding=EMBEDDING,
    model_config=model_config,
    rules=rules,
    head_rules=head_rules,
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),  # of old checkpoints
    gguf=GgufRules("stablelm", _gguf_settings, rows=_GGUF_ROWS),
)
