"""GPT-NeoX: its query_key_value is stored head by head, q, k and v of each."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.models.gptneox import GptNeoXConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, decoder_settings, partial_rope
from tridecode.converters.hf_config import activation, max_positions, rope_config, shape
from tridecode.converters.rules import (
    Rule,
    join_heads,
    module_rules,
    split_heads,
    split_heads_transposed,
    transpose,
)

EMBEDDING = "gpt_neox.embed_in.weight"


def model_config(hf: PreTrainedConfig, **common) -> GptNeoXConfig:
    sizes = shape(hf)
    rotated = int(sizes["head_size"] * hf.rope_parameters.get("partial_rotary_factor", 1.0))
    return GptNeoXConfig(
        family="gptneox",
        **sizes,
        mlp_size=hf.intermediate_size,
        max_positions=max_positions(hf),
        norm_eps=hf.layer_norm_eps,
        activation=activation(hf, "hidden_act", "GPT-NeoX"),
        rope=rope_config(hf, rotated, "GPT-NeoX"),
        residual="parallel" if hf.use_parallel_residual else "sequential",
        attention_bias=hf.attention_bias,
        **common,
    )


def rules(num_heads: int) -> list[Rule]:
    layer, out = "gpt_neox.layers.{i}", "model.layers.{i}"
    fused = partial(split_heads_transposed, num_heads), partial(split_heads, num_heads)
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules(f"{layer}.input_layernorm", f"{out}.input_layernorm"),
        *module_rules(f"{layer}.attention.query_key_value", f"{out}.attention.query_key_value", *fused),
        *module_rules(f"{layer}.attention.dense", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.post_attention_layernorm", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.mlp.dense_h_to_4h", f"{out}.mlp.dense_h_to_4h", transpose),
        *module_rules(f"{layer}.mlp.dense_4h_to_h", f"{out}.mlp.dense_4h_to_h", transpose),
        *module_rules("gpt_neox.final_layer_norm", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    """The activation is not in the file: transformers' default, which most models have."""
    return {
        **decoder_settings(header),
        "layer_norm_eps": float(header.number("attention.layer_norm_epsilon")),
        "rope_parameters": partial_rope(header),
        "use_parallel_residual": bool(header.value("use_parallel_residual", True)),
        "attention_bias": header.in_layers("attn_qkv.bias"),
    }


def _by_head(name: str, tensor: Tensor, hf: PreTrainedConfig) -> Tensor:
    """llama.cpp stores all queries, keys and values; transformers head by head."""
    return join_heads(hf.num_attention_heads, tensor) if ".attn_qkv." in name else tensor


#: buffers of old checkpoints
_IGNORED = tuple(
    f"gpt_neox.layers.{{i}}.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
)
_GGUF = GgufRules("gptneox", _gguf_settings, restore=_by_head)
#: so in files, until transformers renames it there too
_RENAMED = {"embed_out.weight": "lm_head.weight"}
FAMILY = CheckpointFamily(
    ("gpt_neox",), EMBEDDING, model_config, rules, ignored=_IGNORED, renamed=_RENAMED, gguf=_GGUF
)
