"""transformers' model of a weight directory: its arithmetic is independent of ours.

The conversion rules are inverted, from our files to transformers' tensors, so a wrong conversion is not
detected; comparing with the checkpoint that the directory was made from (build-repo --reference) is stronger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    OPTConfig,
    PreTrainedConfig,
)

from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.configuration.model_config import DEFAULT_MAX_POSITIONS, ModelConfig
from tridecode.backend.models.opt import OptConfig
from tridecode.converters.families import families
from tridecode.converters.families.opt import OFFSET, without_offset
from tridecode.converters.rules import (
    join,
    join_heads,
    join_transposed,
    same,
    split_heads,
    split_heads_transposed,
    transpose,
)
from tridecode.converters.sources import TensorSource

_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}


def _gpt2(config: ModelConfig) -> PreTrainedConfig | None:
    if config.attention_scale not in (None, 1.0):
        return None
    return GPT2Config(
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.mlp_size,
        n_positions=config.max_positions,
        activation_function=_ACTIVATIONS[config.activation],
        layer_norm_epsilon=config.norm_eps,
        scale_attn_weights=config.attention_scale is None,
        scale_attn_by_inverse_layer_idx=config.scale_by_layer,
    )


def _bloom(config: ModelConfig) -> PreTrainedConfig | None:
    if config.activation != "gelu_tanh" or config.mlp_size != 4 * config.hidden_size:
        return None
    return BloomConfig(
        hidden_size=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        layer_norm_epsilon=config.norm_eps,
        apply_residual_connection_post_layernorm=config.residual == "from_norm",
    )


def _gptneox(config: ModelConfig) -> PreTrainedConfig | None:
    if config.rope is None or config.rope.scaling != "default":
        return None
    return GPTNeoXConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_size,
        max_position_embeddings=min(config.max_positions, DEFAULT_MAX_POSITIONS),
        hidden_act=_ACTIVATIONS[config.activation],
        layer_norm_eps=config.norm_eps,
        use_parallel_residual=config.residual == "parallel",
        attention_bias=config.attention_bias,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": config.rope.theta,
            "partial_rotary_factor": (config.rope.size + 0.1) / config.head_size,
        },
    )


def _gptj(config: ModelConfig) -> PreTrainedConfig | None:
    rope = config.rope
    if rope is None or rope.scaling != "default" or rope.theta != 10000.0:
        return None
    return GPTJConfig(
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.mlp_size,
        n_positions=config.max_positions,
        rotary_dim=rope.size,
        activation_function=_ACTIVATIONS[config.activation],
        layer_norm_epsilon=config.norm_eps,
    )


def _opt(config: OptConfig) -> PreTrainedConfig | None:
    is_pre_norm = config.residual == "sequential"
    biases_differ = config.attention_bias != config.mlp_bias
    if config.norm_eps != 1e-5 or biases_differ or (config.final_norm and not is_pre_norm):
        return None
    return OPTConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        ffn_dim=config.mlp_size,
        max_position_embeddings=config.max_positions,
        activation_function=_ACTIVATIONS[config.activation],
        word_embed_proj_dim=config.embedding_size,
        do_layer_norm_before=is_pre_norm,
        _remove_final_layer_norm=is_pre_norm and not config.final_norm,
        enable_bias=config.attention_bias,
        layer_norm_elementwise_affine=config.norm_weights,
    )


#: ModelConfig.family -> transformers' model type, and its config
_CONFIGS: Mapping[str, tuple[str, Callable[[Any], PreTrainedConfig | None]]] = {
    "gpt": ("gpt2", _gpt2),
    "bloom": ("bloom", _bloom),
    "gptneox": ("gpt_neox", _gptneox),
    "gptj": ("gptj", _gptj),
    "opt": ("opt", _opt),
}


def transformers_config(config: ModelConfig) -> PreTrainedConfig | None:
    """Return transformers' configuration; None if transformers does not support these settings."""
    model_type, make = _CONFIGS.get(config.family, ("", lambda config: None))
    hf_config = make(config) if model_type in families() else None
    if hf_config is not None:
        hf_config.vocab_size = config.vocab_size
        hf_config.tie_word_embeddings = config.tied_head
    return hf_config


def directory_reference(config: ModelConfig, tensors: TensorSource) -> Callable[[torch.dtype], Module] | None:
    """Return (dtype) -> transformers' model; None if transformers does not support these settings.

    tensors: by our names.
    """
    hf_config = transformers_config(config)
    return None if hf_config is None else partial(_model, hf_config, config, tensors)


def _model(
    hf_config: PreTrainedConfig, config: ModelConfig, tensors: TensorSource, dtype: torch.dtype
) -> Module:
    model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=False)
    wanted = model.state_dict()
    source = families()[hf_config.model_type]
    renamed = {today: stored for stored, today in source.renamed.items() if stored in wanted}
    with torch.no_grad():
        for rule in source.rules(config.num_heads):
            for layer in range(config.num_layers) if "{i}" in rule.target else (0,):
                filled = rule.of_layer(layer)
                if filled.target not in tensors.shapes:
                    continue
                names = [renamed.get(name, name) for name in filled.sources]
                parts = _undo(filled.transform, tensors.read(filled.target), [wanted[name] for name in names])
                for name, part in zip(names, parts):
                    wanted.pop(name).copy_(part)
    missing = [
        name for name in wanted if not (config.tied_head and name in ("lm_head.weight", "embed_out.weight"))
    ]
    if missing:
        raise CheckpointError(f"the weight directory makes no {missing[0]} of {type(model).__name__}")
    return model.eval()


def _undo(transform: Callable[..., Tensor], made: Tensor, sources: list[Tensor]) -> tuple[Tensor, ...]:
    """Invert `transform`: return the tensors from which it made `made`. sources: tensors of their shapes."""
    heads = transform.args[0] if isinstance(transform, partial) else 0
    kind = transform.func if isinstance(transform, partial) else transform
    rows = [source.shape[0] for source in sources]
    if kind is same:
        return (made,)
    if kind is transpose:
        return (made.t(),)
    if kind is split_heads:
        return (join_heads(heads, made),)
    if kind is split_heads_transposed:
        return (join_heads(heads, made.t()),)
    if kind is join:
        return made.split(rows)
    if kind is without_offset:
        return (torch.cat([made.new_zeros(OFFSET, made.shape[1]), made]),)
    if kind is join_transposed:
        return made.t().split(rows)
    raise CheckpointError(f"{kind} has no inverse here; see converters/references/directory.py")
