"""Pruned checkpoints, cut here with slices by transformers' layouts, and the unpruned models that equal them.

A head that is cut is zeroed in the model by its columns of the output projection, a neuron of the MLP by its
column of the down projection: transformers then computes what the pruned network computes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.checkpoints import FAMILIES


@dataclass(frozen=True)
class _Names:
    """A layer of one family. fused: of query_key_value, "joined" (q | k | v, inputs first), "by head", or ""
    for q_proj, k_proj and v_proj. turned: matrices are (out, in)."""

    layer: str
    attention: str
    dense: str
    up: tuple[str, ...]
    down: str
    fused: str
    turned: bool = True


_NAMES = {
    "gpt2": _Names(
        "transformer.h.{}", "attn.c_attn", "attn.c_proj", ("mlp.c_fc",), "mlp.c_proj", "joined", False,
    ),
    "bloom": _Names(
        "transformer.h.{}", "self_attention.query_key_value", "self_attention.dense",
        ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h", "by head",
    ),
    "gpt_neox": _Names(
        "gpt_neox.layers.{}", "attention.query_key_value", "attention.dense",
        ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h", "by head",
    ),
    "llama": _Names(
        "model.layers.{}", "self_attn", "self_attn.o_proj",
        ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "",
    ),
}  # fmt: skip


#: 3 layers of 12 heads
_SIZES = {
    "gpt2": {"n_head": 12, "n_embd": 48, "n_layer": 3, "n_inner": 60},
    "bloom": {"n_head": 12, "hidden_size": 48, "n_layer": 3},
    "gpt_neox": {
        "num_attention_heads": 12, "hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 72,
    },
    "llama": {
        "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8, "num_hidden_layers": 3,
        "hidden_size": 48, "intermediate_size": 72,
    },
}  # fmt: skip


def unpruned(family: str, **overrides) -> PreTrainedModel:
    """A tiny model of 3 layers with 12 heads; LLaMA's in 6 groups."""
    return FAMILIES[family](**{**_SIZES[family], **overrides})


@dataclass(frozen=True)
class Cut:
    """What a layer loses: numbers of heads, and of the MLP's columns."""

    heads: tuple[int, ...] = ()
    neurons: tuple[int, ...] = ()


@dataclass
class Pruned:
    """model: zeroed in place. state: the tensors that are left. kept: of each layer."""

    model: PreTrainedModel
    state: dict[str, Tensor] = field(default_factory=dict)
    kept_heads: list[list[int]] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)

    def save(self, directory: Path, **config) -> Path:
        """A directory with the model's config.json, changed by `config`, and model.safetensors."""
        self.model.config.save_pretrained(directory)
        raw = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**raw, **config}))
        state = {name: tensor.contiguous() for name, tensor in self.state.items()}
        save_file(state, directory / "model.safetensors", {"format": "pt"})
        return directory


def prune(model: PreTrainedModel, cuts: dict[int, Cut]) -> Pruned:
    """Zero the heads and columns of `cuts` (layer: Cut) in the model, and cut them out of its tensors."""
    hf, names = model.config, _NAMES[model.config.model_type]
    pruned, state = Pruned(model), model.state_dict()
    heads = hf.num_attention_heads
    size = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    for layer in range(hf.num_hidden_layers):
        cut, prefix = cuts.get(layer, Cut()), names.layer.format(layer)
        kept = [head for head in range(heads) if head not in cut.heads]
        down = state[f"{prefix}.{names.down}.weight"]
        inner = [i for i in range(down.shape[1 if names.turned else 0]) if i not in cut.neurons]
        pruned.kept_heads.append(kept)
        pruned.inner.append(len(inner))
        _zero(state[f"{prefix}.{names.dense}.weight"], _columns(cut.heads, size), names.turned)
        _zero(down, list(cut.neurons), names.turned)
        pruned.state.update(_layer(state, prefix, names, kept, heads, size, inner))
    for name, tensor in state.items():
        if name not in pruned.state and not (hf.tie_word_embeddings and name == "lm_head.weight"):
            pruned.state[name] = tensor.clone()
    return pruned


def _columns(heads, size: int) -> list[int]:
    return [head * size + i for head in heads for i in range(size)]


def _zero(weight: Tensor, inputs: list[int], turned: bool) -> None:
    (weight.t() if turned else weight)[inputs] = 0


def _layer(state, prefix: str, names: _Names, kept: list[int], heads: int, size: int, inner: list[int]):
    """The tensors of one layer that change."""
    out: dict[str, Tensor] = {}

    def take(name: str, indices: list[int], outputs: bool) -> None:
        weight = state[f"{name}.weight"]
        out[f"{name}.weight"] = weight.index_select(
            0 if outputs == names.turned else 1, torch.tensor(indices, dtype=torch.long)
        )
        if outputs and f"{name}.bias" in state:
            out[f"{name}.bias"] = state[f"{name}.bias"][indices]

    attention = f"{prefix}.{names.attention}"
    if names.fused == "joined":
        take(attention, [part * heads * size + i for part in range(3) for i in _columns(kept, size)], True)
    elif names.fused == "by head":
        take(attention, _columns(kept, 3 * size), True)
    else:
        kv_heads = state[f"{attention}.k_proj.weight"].shape[0] // size
        used = sorted({head * kv_heads // heads for head in kept})
        take(f"{attention}.q_proj", _columns(kept, size), True)
        take(f"{attention}.k_proj", _columns(used, size), True)
        take(f"{attention}.v_proj", _columns(used, size), True)
    take(f"{prefix}.{names.dense}", _columns(kept, size), False)
    for name in names.up:
        take(f"{prefix}.{name}", inner, True)
    take(f"{prefix}.{names.down}", inner, False)
    return out
