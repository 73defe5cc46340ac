"""GPT-NeoX: query_key_value is stored head by head; in the parallel form two biases become one sum."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.config import ModelConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.hf_config import activation, rope_config
from tridecode.converters.rules import Rule, module_rules, split_heads, split_heads_transposed, transpose

EMBEDDING = "gpt_neox.embed_in.weight"


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    head_size = hf.hidden_size // hf.num_attention_heads
    rotated = int(head_size * hf.rope_parameters.get("partial_rotary_factor", 1.0))
    return ModelConfig(
        family="gptneox",
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_attention_heads,
        head_size=head_size,
        mlp_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        max_positions=hf.max_position_embeddings,
        norm_eps=hf.layer_norm_eps,
        activation=activation(hf, "hidden_act", "GPT-NeoX"),
        rope=rope_config(hf, rotated, "GPT-NeoX"),
        residual="parallel" if hf.use_parallel_residual else "sequential",
        attention_bias=hf.attention_bias,
        **common,
    )


def add(*biases: Tensor) -> Tensor:
    return torch.stack(biases).sum(0)


def rules(config: ModelConfig) -> list[Rule]:
    layer, out, heads = "gpt_neox.layers.{i}", "model.layers.{i}", config.num_heads
    fused = partial(split_heads_transposed, heads), partial(split_heads, heads)
    biases = (f"{layer}.attention.dense.bias", f"{layer}.mlp.dense_4h_to_h.bias")
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules(f"{layer}.input_layernorm", f"{out}.input_layernorm"),
        *module_rules(f"{layer}.attention.query_key_value", f"{out}.attention.query_key_value", *fused),
        *module_rules(f"{layer}.attention.dense", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.post_attention_layernorm", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.mlp.dense_h_to_4h", f"{out}.mlp.dense_h_to_4h", transpose),
        *module_rules(f"{layer}.mlp.dense_4h_to_h", f"{out}.mlp.dense_4h_to_h", transpose),
        Rule(biases if config.attention_bias else biases[1], f"{out}.mlp.attention.bias.sum", add),
        *module_rules("gpt_neox.final_layer_norm", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


FAMILY = CheckpointFamily(
    model_types=("gpt_neox",),
    prefix="gpt_neox.",
    embedding=EMBEDDING,
    model_config=model_config,
    rules=rules,
    ignored=tuple(
        f"gpt_neox.layers.{{i}}.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
    ),  # buffers that old checkpoints have
    renamed={"embed_out.weight": "lm_head.weight"},  # so in files, until transformers renames it there too
)
