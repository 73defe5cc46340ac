"""Megatron-LM's and NeMo's checkpoints of a GPT-2 of transformers, written with torch from the documented
layout: no code of ours.

Sources: Megatron-LM's checkpointing.py and its layers; FasterTransformer's megatron_ckpt_convert.py.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

#: transformers' modules of a layer -> Megatron's, and the axis of (out, in) that tensor ranks share
LEGACY = {
    "ln_1": ("input_layernorm", None),
    "attn.c_attn": ("attention.query_key_value", 0),
    "attn.c_proj": ("attention.dense", 1),
    "ln_2": ("post_attention_layernorm", None),
    "mlp.c_fc": ("mlp.dense_h_to_4h", 0),
    "mlp.c_proj": ("mlp.dense_4h_to_h", 1),
}
NEWER = {key: (name.replace("attention.", "self_attention."), axis) for key, (name, axis) in LEGACY.items()}
CORE = {
    "ln_1": ("self_attention.linear_qkv.layer_norm", None),
    "attn.c_attn": ("self_attention.linear_qkv", 0),
    "attn.c_proj": ("self_attention.linear_proj", 1),
    "ln_2": ("mlp.linear_fc1.layer_norm", None),
    "mlp.c_fc": ("mlp.linear_fc1", 0),
    "mlp.c_proj": ("mlp.linear_fc2", 1),
}


def ordered_qkv(rows: Tensor, heads: int, version: float) -> Tensor:
    """(3 * heads * size, …), all queries first, to the order of a checkpoint_version."""
    apart = rows.reshape(3, heads, -1, *rows.shape[1:])
    if version >= 2:
        apart = apart.transpose(0, 1)  # (heads, 3, size)
    elif version >= 1:
        apart = apart.movedim(0, 2)  # (heads, size, 3)
    return apart.reshape(rows.shape)


def rank_state(
    model: GPT2LMHeadModel, rank: int, ranks: int, stage: int, stages: int, version: float, names: dict
) -> dict[str, Tensor]:
    """The flat state of one rank's transformer, by names of a layer; without embeddings."""
    config, state = model.config, model.state_dict()
    per_stage = config.n_layer // stages
    found = {}
    for local in range(per_stage):
        source = f"transformer.h.{stage * per_stage + local}."
        for theirs, (ours, axis) in names.items():
            for kind in ("weight", "bias"):
                tensor = state[f"{source}{theirs}.{kind}"]
                if kind == "weight" and theirs not in ("ln_1", "ln_2"):
                    tensor = tensor.t()  # (out, in)
                if theirs == "attn.c_attn":
                    by_part = tensor.reshape(3, -1, *tensor.shape[1:]).chunk(ranks, dim=1)[rank]
                    part = by_part.reshape(-1, *tensor.shape[1:])
                    tensor = ordered_qkv(part, config.n_head // ranks, version)
                elif axis == 0 or (axis == 1 and kind == "weight"):
                    tensor = tensor.chunk(ranks, dim=axis)[rank]
                joint = "_" if ours.endswith("layer_norm") else "."
                found[f"layers.{local}.{ours}{joint}{kind}"] = tensor.clone()
    return found


def arguments(model: GPT2LMHeadModel, ranks: int, stages: int, **extra) -> Namespace:
    config = model.config
    return Namespace(**{
        "num_layers": config.n_layer, "hidden_size": config.n_embd, "num_attention_heads": config.n_head,
        "ffn_hidden_size": config.n_inner, "max_position_embeddings": config.n_positions,
        "layernorm_epsilon": config.layer_norm_epsilon, "padded_vocab_size": config.vocab_size,
        "tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": stages,
        "params_dtype": torch.float32, "bias_gelu_fusion": True, "openai_gelu": False, "onnx_safe": None,
        "position_embedding_type": "learned_absolute", "fp16": False, "rank": 0, "data_path": ["corpus"],
        "swiglu": False, "num_experts": None, "kv_channels": config.n_embd // config.n_head, **extra,
    })  # fmt: skip


def write_megatron(
    model: GPT2LMHeadModel,
    directory: Path,
    ranks: int = 1,
    stages: int = 1,
    version: float = 3.0,
    names: dict = NEWER,
    encoder: str = "encoder",
    file: str = "model_optim_rng.pt",
    with_args: bool = True,
    zipped: bool = True,
    **extra,
) -> Path:
    """mp_rank_XX[_YYY]/model_optim_rng.pt of every rank; `extra`: further arguments."""
    state = model.state_dict()
    for stage in range(stages):
        for rank in range(ranks):
            layers = rank_state(model, rank, ranks, stage, stages, version, names)
            language: dict = {}
            if stage == 0:
                words = state["transformer.wte.weight"].chunk(ranks)[rank].clone()
                positions = state["transformer.wpe.weight"]
                language["embedding"] = {
                    "word_embeddings": {"weight": words}, "position_embeddings": {"weight": positions},
                }  # fmt: skip
            final = {}
            if stage == stages - 1:
                final = {
                    f"final_layernorm.{kind}": state[f"transformer.ln_f.{kind}"]
                    for kind in ("weight", "bias")
                }
                if not model.config.tie_word_embeddings:
                    language["output_layer"] = {"weight": state["lm_head.weight"].chunk(ranks)[rank].clone()}
            whole = {"language_model": {**language, encoder: {**layers, **final}}}
            if stages > 1 and stage == stages - 1 and model.config.tie_word_embeddings:
                whole["word_embeddings_for_head"] = {
                    "weight": state["transformer.wte.weight"].chunk(ranks)[rank]
                }
            if names is CORE:
                whole = core_names(whole)
            tree: dict = {"iteration": 7, "model": whole, "optimizer": {"step": torch.tensor(7)}}
            if version:
                tree["checkpoint_version"] = version
            if with_args:
                tree["args"] = arguments(model, ranks, stages, **extra)
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            (directory / name).mkdir(parents=True)
            torch.save(tree, directory / name / file, _use_new_zipfile_serialization=zipped)
    return directory


def core_names(whole: dict) -> dict[str, object]:
    """Megatron core has one flat dict, and states of its kernels' library that are no tensors."""
    flat: dict[str, object] = {}
    language = whole["language_model"]
    for group in ("embedding", "output_layer"):
        for name, value in language.get(group, {}).items():
            if isinstance(value, dict):
                flat[f"{group}.{name}.weight"] = value["weight"]
            else:
                flat[f"{group}.{name}"] = value
    for name, value in language["encoder"].items():
        flat[f"decoder.{name}"] = value
        flat["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
    return flat
