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
from tridecode.converters.families.llama import EMBEDDING, rules
from tridecode.converters.families.phi import rotated_size
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, decoder_settings, partial_rope
from tridecode.converters.hf_config import max_positions, rope_config, shape
from tridecode.converters.rules import Rule

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


def stack(*heads: Tensor) -> Tensor:
    return torch.stack(heads)


def head_rules(config: ModelConfig) -> list[Rule]:
    """Stack the vectors of all heads to q_norm (H, D) and k_norm (K, D)."""
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


#: tensors of old checkpoints that are ignored
_IGNORED = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)
_GGUF = GgufRules("stablelm", _gguf_settings, rows=_GGUF_ROWS)
FAMILY = CheckpointFamily(
    ("stablelm",), EMBEDDING, model_config, rules, head_rules=head_rules, ignored=_IGNORED, gguf=_GGUF
)
