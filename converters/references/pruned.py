"""transformers' model of a pruned checkpoint: the unpruned network, with zeros where heads and columns were.

It computes what the pruned network computes: a head whose columns of the output projection are 0 adds
nothing, as does a column of the MLP whose output weights are 0. transformers has no class for
layers of other sizes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import family
from tridecode.backend.weights.layout import WeightSpec
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.pruning.sizes import rules_of_layers
from tridecode.converters.rules import Rule

Read = Callable[[str], Tensor]
Shapes = Mapping[str, tuple[int, ...]]
#: (positions in the unpruned tensor, positions in the pruned one) along an axis
Places = tuple[Tensor, Tensor]


def model_of(
    hf: PreTrainedConfig, tensors: Callable[[Shapes], Iterator[tuple[str, Tensor]]], dtype: torch.dtype
) -> Module:
    """transformers' model of `hf`, in evaluation mode, filled with tensors one at a time.

    tensors: (the shapes that transformers wants, by its full names) to names and tensors; names that it does
    not have are left out. Raises CheckpointError where a tensor is missing or has another shape.
    """
    model = AutoModelForCausalLM.from_config(hf, dtype=dtype, trust_remote_code=False).eval()
    held = model.state_dict()
    missing = {name for name in held if not (hf.tie_word_embeddings and name == "lm_head.weight")}
    for name, tensor in tensors({name: tuple(tensor.shape) for name, tensor in held.items()}):
        if name not in held:
            continue
        if tensor.shape != held[name].shape:
            shapes = f"{tuple(tensor.shape)}; wanted {tuple(held[name].shape)}"
            raise CheckpointError(f"transformers' model cannot take {name} {shapes}")
        held[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise CheckpointError(f"transformers' model wants {sorted(missing)}, which are missing")
    return model


def unpruned_tensors(
    config: ModelConfig, source: CheckpointFamily, names: Iterable[str], read: Read, shapes: Shapes
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the unpruned network, by transformers' full names.

    names: those of the pruned checkpoint's tensors; read: returns one. shapes: those of the unpruned network.
    The family's rules, applied to element indices, determine where rows and columns belong.
    """
    whole = replace(config, layer_sizes=())
    after = {spec.name: spec for spec in family(config.family).weight_specs(config)}
    whole_rules = {rule.target: rule for rule in _each_layer(source.rules_of(whole), config)}
    rules = {rule.target: rule for rule in _each_layer(rules_of_layers(source, config), config)}
    parts_of = Counter(name for rule in whole_rules.values() for name in rule.sources)
    replaced: set[str] = set()
    open_parts: dict[str, Tensor] = {}  # tensors from which several of ours are made
    for spec in family(config.family).weight_specs(whole):
        if spec.shape == after[spec.name].shape or spec.name not in rules:
            continue
        values = rules[spec.name].transform(*map(read, rules[spec.name].sources))
        rule = whole_rules[spec.name]
        places = _places(spec, after[spec.name], config)
        parts = _scatter(rule, [shapes[part] for part in rule.sources], spec.axis or 0, places, values)
        replaced.update(rule.sources)
        for name, part in zip(rule.sources, parts):
            parts_of[name] -= 1
            whole_part = part + open_parts.pop(name) if name in open_parts else part
            if parts_of[name]:
                open_parts[name] = whole_part
            else:
                yield name, whole_part
    for name in names:
        if name not in replaced:
            yield name, read(name)


def _each_layer(rules: list[Rule], config: ModelConfig) -> Iterator[Rule]:
    for rule in rules:
        yield from map(rule.of_layer, range(config.num_layers) if "{i}" in rule.target else (0,))


def _scatter(
    rule: Rule, shapes: list[tuple[int, ...]], axis: int, places: Places, values: Tensor
) -> list[Tensor]:
    """The source tensors from which `rule` makes a tensor with `values` at `places`, and zeros elsewhere."""
    sizes = [math.prod(shape) for shape in shapes]
    numbers = torch.arange(sum(sizes)).split(sizes)  # where each element of the made tensor comes from
    made = rule.transform(*(part.reshape(shape) for part, shape in zip(numbers, shapes)))
    flat = torch.zeros(sum(sizes), dtype=values.dtype)
    destination, origin = places
    flat[made.index_select(axis, destination).flatten()] = values.index_select(axis, origin).flatten()
    return [part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes)]


def _places(whole: WeightSpec, pruned: WeightSpec, config: ModelConfig) -> Places:
    """Return the places of a pruned tensor's rows or columns in the unpruned one."""
    assert whole.axis is not None and whole.layer is not None
    if ".attention." not in whole.name:
        inner = torch.arange(pruned.shape[whole.axis])
        return inner, inner
    queries, keys = _heads(config, whole.layer)
    if len(whole.parts) == 1:  # attention.dense, or a vector for each head, as of its norm
        heads = queries if whole.heads == (config.num_heads,) else keys
        return _columns(heads, whole.parts[0] // whole.heads[0])
    sections = [_columns(heads, config.head_size) for heads in (queries, keys, keys)]
    starts = [(sum(whole.parts[:i]), sum(pruned.parts[:i])) for i in range(3)]
    destination = torch.cat([section[0] + start[0] for section, start in zip(sections, starts)])
    return destination, torch.cat([section[1] + start[1] for section, start in zip(sections, starts)])


def _columns(heads: list[tuple[int, int]], size: int) -> Places:
    within = torch.arange(size)
    pairs = torch.tensor(heads)
    return (pairs[:, :1] * size + within).flatten(), (pairs[:, 1:] * size + within).flatten()


def _heads(config: ModelConfig, layer: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(head of the unpruned layer, head of the pruned one) of the query heads, and of the key/value heads.

    If it is unknown which heads are left, each is placed in the group of its key/value head; a
    key/value head of more query heads than before appears several times.
    """
    sizes, group = config.layer_sizes[layer], config.num_heads // config.num_kv_heads
    if sizes.kept_heads:
        used = sorted({head // group for head in sizes.kept_heads})
        return list(zip(sizes.kept_heads, range(sizes.num_heads))), list(zip(used, range(len(used))))
    mine = sizes.num_heads // sizes.num_kv_heads
    copies = -(-mine // group)
    if sizes.num_kv_heads * copies > config.num_kv_heads:
        found = f"{sizes.num_heads} heads of {sizes.num_kv_heads} key/value heads in layer {layer}"
        raise CheckpointError(f"{found} have no place among {config.num_heads} of {config.num_kv_heads}")
    kv_heads = range(sizes.num_kv_heads)
    queries = [(kv * copies * group + i, kv * mine + i) for kv in kv_heads for i in range(mine)]
    return queries, [(kv * copies + i, kv) for kv in kv_heads for i in range(copies)]
