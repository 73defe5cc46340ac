"""A ModelConfig as transformers' configuration of the same model."""

from __future__ import annotations

from typing import Any

from transformers import BloomConfig, GPT2Config, LlamaConfig, PretrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig


def hf_config(model: ModelConfig) -> PretrainedConfig:
    """Raises UnsupportedError for a shape that the family's class cannot express."""
    ids: dict[str, Any] = {"bos_token_id": model.start_id, "eos_token_id": model.end_id}
    if model.family == "bloom":
        return BloomConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_heads,
            layer_norm_epsilon=model.norm_eps,
            **ids,
        )
    if model.family == "gpt":
        return GPT2Config(
            vocab_size=model.vocab_size,
            n_positions=model.max_positions,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_heads,
            n_inner=model.mlp_size,
            layer_norm_epsilon=model.norm_eps,
            **ids,
        )
    rope = model.rope
    if model.family != "llama" or not rope or rope.scaling != "default" or rope.size != model.head_size:
        raise UnsupportedError(
            f"{model.model_name}: {model.family} with rope {rope} has no transformers configuration here"
        )
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.mlp_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_size,
        max_position_embeddings=model.max_positions,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tied_head,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        **ids,
    )
