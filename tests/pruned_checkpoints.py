"""Pruned checkpoints, made with numpy from transformers' layouts, and equivalent unpruned models.

The equivalent model zeroes the output projection's columns of each pruned head, and the down projection's
column of each pruned neuron, so that transformers computes the pruned network.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tests.checkpoints import FAMILIES, FamilyCase

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
_LAYER = "model.layers.{i}"
_KV_KEYS = ("num_key_value_heads", "num_kv_heads")


def unpruned(family: str, **overrides) -> PreTrainedModel:
    """Make a tiny model of 3 layers with 12 heads; LLaMA's are in 6 groups."""
    return FAMILIES[family](**{**_SIZES[family], **overrides})


@dataclass(frozen=True)
class Cut:
    """Heads and MLP columns that are removed from a layer."""

    heads: tuple[int, ...] = ()
    neurons: tuple[int, ...] = ()


@dataclass
class Pruned:
    """A pruned model. model: zeroed in place. state: the remaining tensors. The lists have one entry per
    layer."""

    model: PreTrainedModel
    state: dict[str, Tensor] = field(default_factory=dict)
    kept_heads: list[list[int]] = field(default_factory=list)
    kv_heads: list[int] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)

    def save(self, directory: Path, **config) -> Path:
        """Write a directory with the model's config.json, changed by `config`, and model.safetensors."""
        self.model.config.save_pretrained(directory)
        raw = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**raw, **config}))
        state = {name: tensor.contiguous() for name, tensor in self.state.items()}
        save_file(state, directory / "model.safetensors", {"format": "pt"})
        return directory


def prune(model: PreTrainedModel, cuts: dict[int, Cut]) -> Pruned:
    """Zero the heads and columns of `cuts` (layer: Cut) in the model, and cut them out of its tensors."""
    hf, pruned = model.config, Pruned(model)
    state = model.state_dict()
    for layer in range(hf.num_hidden_layers):
        _prune_layer(_Layer(hf, state, layer), cuts.get(layer, Cut()), pruned)
    for name, tensor in state.items():
        if (
            name not in pruned.state
            and name not in pruned.gone
            and not (hf.tie_word_embeddings and name == "lm_head.weight")
        ):
            pruned.state[name] = tensor.clone()
    return pruned


def _cuts(hf: PreTrainedConfig) -> dict[int, Cut]:
    """Return the cuts of 3 layers with 12 heads: the first layer loses four heads or whole groups; the second
    one or two heads of each group, and a part of the MLP."""
    kv_heads = FAMILIES[hf.model_type].num_kv_heads(hf)
    group = 12 // kv_heads
    first = (1, 5, 6, 11) if kv_heads in (1, 12) else tuple(range(kv_heads // 3 * group or group))
    second = (2, 3) if kv_heads in (1, 12) else tuple(range(1, 12, group))
    return {0: Cut(first), 1: Cut(second, (0, 7, 30, 31))}


def pruned_family(family: str) -> tuple[Pruned, dict[str, list[int]]]:
    """Return a tiny model of any family, pruned in two of three layers, and its config.json's
    pruned_heads."""
    case = FAMILIES[family]
    model = unpruned(family) if family == "llama" else case(**case.shared)
    cuts = _cuts(model.config)
    return prune(model, cuts), {str(layer): list(cut.heads) for layer, cut in cuts.items()}


@dataclass(frozen=True)
class _Layer:
    """One layer of a state dict; its matrices are views (in, out)."""

    hf: PreTrainedConfig
    state: dict[str, Tensor]
    number: int

    @property
    def case(self) -> FamilyCase:
        return FAMILIES[self.hf.model_type]

    def names(self, stem: str) -> tuple[str, ...]:
        """Return transformers' modules that make up one of our files."""
        found = self.case.names.get(f"{_LAYER}.{stem}", ())
        names = (found,) if isinstance(found, str) else found
        return tuple(name.replace("{i}", str(self.number)) for name in names)

    def matrix(self, name: str) -> np.ndarray:
        tensor = self.state[f"{name}.weight"]
        return (tensor.t() if self.case.turned else tensor).numpy()

    def put(self, pruned: Pruned, name: str, matrix: np.ndarray, bias: np.ndarray | None = None) -> None:
        tensor = torch.from_numpy(np.ascontiguousarray(matrix))
        pruned.state[f"{name}.weight"] = tensor.t().contiguous() if self.case.turned else tensor
        if bias is not None and f"{name}.bias" in self.state:
            pruned.state[f"{name}.bias"] = torch.from_numpy(np.ascontiguousarray(bias))

    def bias(self, name: str) -> np.ndarray:
        """Return the bias (out,); zeros if there is none."""
        held = self.state.get(f"{name}.bias")
        return np.zeros(self.matrix(name).shape[1], np.float32) if held is None else held.numpy()


def _prune_layer(layer: _Layer, cut: Cut, pruned: Pruned) -> None:
    hf, case = layer.hf, layer.case
    heads, kv_heads = hf.num_attention_heads, case.num_kv_heads(hf)
    size = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    kept = [head for head in range(heads) if head not in cut.heads]
    used = sorted({head * kv_heads // heads for head in kept})
    dense = layer.names("attention.dense")[0]
    layer.matrix(dense)[_columns(cut.heads, size)] = 0
    layer.put(pruned, dense, layer.matrix(dense)[_columns(kept, size)])
    down = (layer.names("mlp.dense_4h_to_h") or layer.names("mlp.down_proj"))[0]
    layer.matrix(down)[list(cut.neurons)] = 0
    inner = [i for i in range(layer.matrix(down).shape[0]) if i not in cut.neurons]
    layer.put(pruned, down, layer.matrix(down)[inner])
    ups = [
        name for stem in ("mlp.dense_h_to_4h", "mlp.gate_proj", "mlp.up_proj") for name in layer.names(stem)
    ]
    modules = {name.partition("#")[0] for name in ups}
    width = len(inner) + len(cut.neurons)
    for module in modules:  # a module with gate and values holds them side by side
        columns = [start + i for start in range(0, layer.matrix(module).shape[1], width) for i in inner]
        layer.put(pruned, module, layer.matrix(module)[:, columns], layer.bias(module)[columns])
    places = _columns(kept, size), _columns(used, size)
    smaller = copy.deepcopy(hf)
    smaller.num_attention_heads, smaller.hidden_size = len(kept), len(kept) * size
    for key in _KV_KEYS:
        if hasattr(hf, key):
            setattr(smaller, key, len(used))
    names = layer.names("attention.query_key_value")
    weights, biases = (
        _cut_qkv(case, hf, smaller, [of(name) for name in names], (heads, kv_heads, size), places)
        for of in (layer.matrix, lambda name: layer.bias(name)[None])
    )
    for name, weight, bias in zip(names, weights, biases):
        layer.put(pruned, name, weight, bias[0])
    attention = dense.rpartition(".")[0]
    for kind, chosen in (("q", kept), ("k", used)):  # norms of single heads, as StableLM's, are renumbered
        norms = f"{attention}.{kind}_layernorm.norms."
        pruned.gone.update(name for name in layer.state if name.startswith(norms))
        for place, head in enumerate(chosen):
            if f"{norms}{head}.weight" in layer.state:
                pruned.state[f"{norms}{place}.weight"] = layer.state[f"{norms}{head}.weight"].clone()
    pruned.kept_heads.append(kept)
    pruned.kv_heads.append(len(used))
    pruned.inner.append(len(inner))


def _columns(heads, size: int) -> list[int]:
    return [head * size + i for head in heads for i in range(size)]


def _cut_qkv(case, hf, smaller, stored, sizes, places) -> tuple[np.ndarray, ...]:
    """Return transformers' query_key_value (in, out), reduced to the columns `places` of q, and of k and
    v."""
    heads, kv_heads, size = sizes
    ends = [heads * size, (heads + kv_heads) * size]
    numbers = np.split(np.arange((heads + 2 * kv_heads) * size)[None], ends, axis=1)
    order = np.concatenate(_layout(case, hf, heads, size, *numbers), axis=1)[0]
    joined = np.empty_like(whole := np.concatenate(stored, axis=1))
    joined[:, order] = whole
    q, k, v = np.split(joined, ends, axis=1)
    count = smaller.num_attention_heads
    return _layout(case, smaller, count, size, q[:, places[0]], k[:, places[1]], v[:, places[1]])


def _layout(case, hf, heads: int, size: int, q, k, v) -> tuple[np.ndarray, ...]:
    """Join q (in, H * D) and k, v (in, K * D) in transformers' order."""
    if case.heads == "by head":
        by_head = np.concatenate([part.reshape(len(q), heads, 1, size) for part in (q, k, v)], axis=2)
        return (by_head.reshape(len(q), -1),)
    if case.heads == "joined":
        return (np.concatenate([q, k, v], axis=1),)
    return (q, k, v) if case.heads == "apart" else case.heads(hf, q, k, v)
