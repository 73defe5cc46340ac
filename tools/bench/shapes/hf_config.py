"""A ModelConfig as transformers' configuration of the same model."""

from __future__ import annotations

from transformers import LlamaConfig, PretrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.references.directory import transformers_config


def hf_config(model: ModelConfig) -> PretrainedConfig:
    """Raises UnsupportedError for a shape that the family's class cannot express."""
    made = _llama(model) if model.family == "llama" else transformers_config(model)
    if made is None:
        raise UnsupportedError(
            f"{model.model_name}: {model.family} with rope {model.rope} has no configuration of transformers"
        )
    made.bos_token_id, made.eos_token_id = model.start_id, model.end_id
    return made


def _llama(model: ModelConfig) -> PretrainedConfig | None:
    rope = model.rope
    if not rope or rope.scaling != "default" or rope.size != model.head_size:
        return None
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
    )
