"""Megatron-LM's and NeMo's checkpoints of a GPT-2 of transformers, written with torch from the documented
layout: no code of ours.

Sources: Megatron-LM's checkpointing.py and its layers; FasterTransformer's megatron_ckpt_convert.py.
"""

from __future__ import annotations

import io
import tarfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import torch
import yaml
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
    """Megatron core has one flat dict, and states of its kernel library that are not tensors."""
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


def nemo_settings(model: GPT2LMHeadModel, ranks: int, stages: int, **extra) -> dict[str, object]:
    """model_config.yaml, as OmegaConf writes it: interpolations stay."""
    config = model.config
    return {
        "target": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
        "nemo_version": "1.20.0", "num_layers": config.n_layer, "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head, "ffn_hidden_size": "${multiply:3,${.hidden_size}}",
        "encoder_seq_length": config.n_positions, "max_position_embeddings": "${.encoder_seq_length}",
        "layernorm_epsilon": config.layer_norm_epsilon, "normalization": "layernorm", "bias": True,
        "position_embedding_type": "learned_absolute", "transformer_block_type": "pre_ln",
        "activation": "gelu",
        "bias_activation_fusion": True, "share_embeddings_and_output_weights": True, "kv_channels": None,
        "tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": stages, "precision": 32,
        "optim": {"name": "adam", "sched": {"warmup_steps": 10}}, **extra,
    }  # fmt: skip


def nemo_members(
    model: GPT2LMHeadModel,
    ranks: int = 1,
    stages: int = 1,
    folder: str = "mp_rank_{rank:02d}",
    tokenizer: dict[str, bytes] | None = None,
    **extra,
) -> dict[str, bytes]:
    """The files of an archive; tokenizer: those that its settings name."""
    state, members = model.state_dict(), {}
    for stage in range(stages):
        for rank in range(ranks):
            layers = rank_state(model, rank, ranks, stage, stages, 3.0, NEWER)
            flat = {f"model.language_model.encoder.{name}": tensor for name, tensor in layers.items()}
            embedding = "model.language_model.embedding"
            if stage == 0:
                words = state["transformer.wte.weight"].chunk(ranks)[rank].clone()
                flat[f"{embedding}.word_embeddings.weight"] = words
                flat[f"{embedding}.position_embeddings.weight"] = state["transformer.wpe.weight"]
            if stage == stages - 1:
                for kind in ("weight", "bias"):
                    final = f"model.language_model.encoder.final_layernorm.{kind}"
                    flat[final] = state[f"transformer.ln_f.{kind}"]
            if stages > 1 and stage == stages - 1:
                flat["model.word_embeddings.weight"] = state["transformer.wte.weight"].chunk(ranks)[rank]
            place = folder.format(rank=rank, stage=stage) + "/" if ranks * stages > 1 else ""
            members[f"./{place}model_weights.ckpt"] = torch_bytes(OrderedDict(flat))
    settings = nemo_settings(model, ranks, stages, **extra)
    if tokenizer:
        names = {"vocab.json": "vocab_file", "merges.txt": "merge_file", "tokenizer.model": "model"}
        named = {names[name]: f"nemo:8a_{name}" for name in tokenizer}
        settings["tokenizer"] = {"library": "megatron", "type": "GPT2BPETokenizer", **named}
        members.update({f"./8a_{name}": data for name, data in tokenizer.items()})
    return {"./model_config.yaml": yaml.safe_dump(settings).encode(), **members}


def torch_bytes(tree: object) -> bytes:
    data = io.BytesIO()
    torch.save(tree, data)
    return data.getvalue()


def write_tar(path: Path, members: dict[str, bytes], compressed: bool = False) -> Path:
    """A .nemo archive."""
    with tarfile.open(path, "w:gz" if compressed else "w") as archive:
        root = tarfile.TarInfo("./")
        root.type = tarfile.DIRTYPE
        archive.addfile(root)
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def prompt_members(hidden: int, tasks: dict[str, int], embeddings: dict[str, Tensor]) -> dict[str, bytes]:
    """An archive of prompt learning: tasks' numbers of virtual tokens, in order."""
    weights = {f"prompt_table.{task}.prompt_embeddings.weight": tensor for task, tensor in embeddings.items()}
    settings = {
        "target": "nemo.collections.nlp.models.language_modeling.megatron_gpt_prompt_learning_model.X",
        "virtual_prompt_style": "p-tuning",
        "task_templates": [
            {
                "taskname": task,
                "total_virtual_tokens": length,
                "prompt_template": "<|VIRTUAL_PROMPT_0|> {text}",
            }
            for task, length in tasks.items()
        ],
    }
    return {
        "./model_config.yaml": yaml.safe_dump(settings).encode(),
        "./model_weights.ckpt": torch_bytes({"prompt_table": weights}),
    }
