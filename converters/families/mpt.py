"""MPT, as transformers' class and as MosaicML's own.

transformers' MptForCausalLM ignores most settings and computes one network: ALiBi with a bias of at most 8,
no biases, an MLP four times as wide. A checkpoint that names this class is converted accordingly. MosaicML's
MPTForCausalLM obeys its settings: alibi_bias_max is supported, others are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import Module
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models.mpt import MptConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import GgufRules, decoder_settings
from tridecode.converters.hf_config import shape
from tridecode.converters.references.state import state_reference
from tridecode.converters.rules import Rule, module_rules, transpose
from tridecode.converters.sources import Checkpoint

EMBEDDING = "transformer.wte.weight"
#: settings for which MosaicML's class differs from transformers', and the values where they agree
_MOSAIC: dict[str, tuple[Any, ...]] = {
    "no_bias": (True,),
    "logit_scale": (None,),
    "expansion_ratio": (4,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}
_MOSAIC_ATTENTION: dict[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "qk_gn": (False,),
    "rope": (False,),
    "sliding_window_size": (-1,),
}


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    attention = hf.attn_config
    if is_mosaic(hf):
        _check_mosaic(hf)
    limit = attention.clip_qkv or 0.0
    if limit < 0:
        raise UnsupportedError(f"MPT with attn_config.clip_qkv = {limit}; this version runs 0 or more")
    return MptConfig(
        family="mpt",
        **shape(hf),
        mlp_size=4 * hf.d_model,
        max_positions=hf.max_seq_len,
        norm_eps=hf.layer_norm_epsilon,
        activation="gelu",
        attention_bias=False,
        mlp_bias=False,
        attention_scale=None if attention.softmax_scale is None else float(attention.softmax_scale),
        alibi_bias_max=_alibi_bias_max(hf),
        qkv_limit=float(limit),
        **common,
    )


def is_mosaic(hf: PreTrainedConfig) -> bool:
    return "MPTForCausalLM" in (hf.architectures or ())


def _alibi_bias_max(hf: PreTrainedConfig) -> float:
    return float(hf.attn_config.alibi_bias_max) if is_mosaic(hf) else 8.0


def _check_mosaic(hf: PreTrainedConfig) -> None:
    for config, name, fixed in ((hf, "", _MOSAIC), (hf.attn_config, "attn_config.", _MOSAIC_ATTENTION)):
        for key, wanted in fixed.items():
            found = getattr(config, key, wanted[0])
            if found not in wanted:
                runs = " or ".join(map(str, wanted))
                raise UnsupportedError(f"MPT with {name}{key} = {found}; this version runs {runs}")


def reference(checkpoint: Checkpoint, dtype: torch.dtype) -> Module:
    """transformers' model, with MosaicML's alibi_bias_max where the checkpoint is MosaicML's."""
    if checkpoint.is_gguf:
        model: Any = state_reference(checkpoint.config, checkpoint.tensors)(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=dtype, local_files_only=True, trust_remote_code=False
        ).eval()
    most = _alibi_bias_max(checkpoint.config)
    model.transformer.build_mpt_alibi_tensor = partial(build_mpt_alibi_tensor, alibi_bias_max=most)
    return model


def rules(num_heads: int) -> list[Rule]:
    layer, out = "transformer.blocks.{i}", "model.layers.{i}"
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules(f"{layer}.norm_1", f"{out}.input_layernorm"),
        *module_rules(f"{layer}.attn.Wqkv", f"{out}.attention.query_key_value", transpose),
        *module_rules(f"{layer}.attn.out_proj", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.norm_2", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.ffn.up_proj", f"{out}.mlp.dense_h_to_4h", transpose),
        *module_rules(f"{layer}.ffn.down_proj", f"{out}.mlp.dense_4h_to_h", transpose),
        *module_rules("transformer.norm_f", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    """Settings of MosaicML's models, which are what llama.cpp reads."""
    held, most = decoder_settings(header), header.number("attention.max_alibi_bias", 0.0)
    limit = header.number("attention.clamp_kqv", 0.0)
    whole = int(most) if most == int(most) else most
    attention = {"alibi": most > 0, "alibi_bias_max": whole, "clip_qkv": limit or None}
    return {
        "architectures": ["MPTForCausalLM"],
        "vocab_size": held["vocab_size"],
        "d_model": held["hidden_size"],
        "n_layers": held["num_hidden_layers"],
        "n_heads": held["num_attention_heads"],
        "max_seq_len": held["max_position_embeddings"],
        "expansion_ratio": held["intermediate_size"] // held["hidden_size"],
        "layer_norm_epsilon": float(header.number("attention.layer_norm_epsilon")),
        "tie_word_embeddings": held["tie_word_embeddings"],
        "attn_config": attention,
    }


_GGUF = GgufRules("mpt", _gguf_settings)
FAMILY = CheckpointFamily(("mpt",), EMBEDDING, model_config, rules, reference=reference, gguf=_GGUF)
