"""Conversions are tables of rules: this module defines a rule, and checks a table against a checkpoint.

Names and shapes are checked before a byte is written: exactly one rule makes each target tensor, and each
source tensor is used, or ignored by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.weights.layout import WeightSpec


def same(tensor: Tensor) -> Tensor:
    return tensor


def transpose(weight: Tensor) -> Tensor:
    """Transpose the weight of torch's Linear, (out, in) -> (in, out)."""
    return weight.t()


def join_transposed(*weights: Tensor) -> Tensor:
    """Join the weights of Linears with the same input: (out, in) each -> (in, sum of outs)."""
    return torch.cat([weight.t() for weight in weights], dim=1)


def join(*biases: Tensor) -> Tensor:
    return torch.cat(biases)


def split_heads(num_heads: int, tensor: Tensor) -> Tensor:
    """Reorder rows (heads, 3, head size) -> (3, heads, head size): all queries, all keys, all values."""
    by_head = tensor.reshape(num_heads, 3, -1, *tensor.shape[1:])  # (H, 3, D, ...)
    return by_head.transpose(0, 1).reshape(tensor.shape)


def split_heads_transposed(num_heads: int, weight: Tensor) -> Tensor:
    """Apply split_heads and transpose: (H * 3 * D, C) -> (C, 3 * H * D)."""
    return transpose(split_heads(num_heads, weight))


def join_heads(num_heads: int, tensor: Tensor) -> Tensor:
    """The inverse of split_heads."""
    apart = tensor.reshape(3, num_heads, -1, *tensor.shape[1:])  # (3, H, D, ...)
    return apart.transpose(0, 1).reshape(tensor.shape)


def split_groups(num_heads: int, head_size: int, tensor: Tensor) -> Tensor:
    """Reorder rows stored by kv head (queries of its group, key, value) -> all queries, all keys, all values.

    tensor: ((H + 2K) * D, ...); K follows from the number of rows.
    """
    kv_heads = (tensor.shape[0] // head_size - num_heads) // 2
    groups = tensor.reshape(kv_heads, num_heads // kv_heads + 2, head_size, *tensor.shape[1:])
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return torch.cat([part.flatten(0, 2) for part in parts])


def split_groups_transposed(num_heads: int, head_size: int | None, weight: Tensor) -> Tensor:
    """Apply split_groups and transpose: ((H + 2K) * D, C) -> (C, (H + 2K) * D). head_size: D; None: C / H."""
    return transpose(split_groups(num_heads, head_size or weight.shape[1] // num_heads, weight))


def split_group_bias(num_heads: int, head_size: int | None, bias: Tensor, weight: Tensor) -> Tensor:
    """Split the bias of split_groups_transposed's weight, which determines the head size if it is None."""
    return split_groups(num_heads, head_size or weight.shape[1] // num_heads, bias)


@dataclass(frozen=True)
class Rule:
    """Makes tensor `target` of a weight directory as transform(tensors of `source`). {i}: every layer."""

    source: str | tuple[str, ...]
    target: str
    transform: Callable[..., Tensor] = same

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source

    def of_layer(self, layer: int) -> Rule:
        def fill(pattern: str) -> str:
            return pattern.replace("{i}", str(layer))

        return Rule(tuple(fill(name) for name in self.sources), fill(self.target), self.transform)


def module_rules(
    source: str | tuple[str, ...],
    target: str,
    weight: Callable[..., Tensor] = same,
    bias: Callable[..., Tensor] = same,
) -> list[Rule]:
    """Return the rules that make `<target>.weight` and `<target>.bias` from the modules `source`."""
    sources = (source,) if isinstance(source, str) else source
    return [
        Rule(tuple(f"{name}.{kind}" for name in sources), f"{target}.{kind}", transform)
        for kind, transform in (("weight", weight), ("bias", bias))
    ]


@dataclass(frozen=True)
class Conversion:
    """One tensor to write: its spec and how to make it."""

    spec: WeightSpec
    sources: tuple[str, ...]
    transform: Callable[..., Tensor]

    def make(self, read: Callable[[str], Tensor]) -> Tensor:
        return self.transform(*(read(name) for name in self.sources))


def expand(patterns: Iterable[str], num_layers: int) -> set[str]:
    return {pattern.replace("{i}", str(layer)) for pattern in patterns for layer in range(num_layers)}


def plan_conversions(
    rules: Iterable[Rule],
    specs: Iterable[WeightSpec],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: set[str],
    num_layers: int,
    where: str,
) -> list[Conversion]:
    """Return a Conversion for each spec. shapes: those of the source's tensors; ignored: names to leave out.

    A rule without a spec is skipped (a bias that the config switches off). where: the file with the rules.
    Raises CheckpointError naming the tensor, its shape and the rules if the two sides do not match.
    """
    per_layer = [
        rule.of_layer(i) for rule in rules for i in (range(num_layers) if "{i}" in rule.target else (0,))
    ]
    by_target = {rule.target: rule for rule in per_layer}
    conversions, used = [], set(ignored)
    for spec in specs:
        rule = by_target.get(spec.name)
        if rule is None:
            raise CheckpointError(f"no rule makes {spec.name} {spec.shape}; see {where}")
        for name in rule.sources:
            if name not in shapes:
                raise CheckpointError(
                    f"the checkpoint has no {name}; {spec.name} {spec.shape} needs it; see {where}"
                )
        _check_shape(rule, spec, shapes, where)
        conversions.append(Conversion(spec, rule.sources, rule.transform))
        used.update(rule.sources)
    for name, shape in shapes.items():
        if name not in used:
            raise CheckpointError(
                f"the checkpoint holds {name} {tuple(shape)}, which the network of its model_type and config "
                f"does not have: it is of another model, or its config lacks a setting ({where} lists all)"
            )
    return conversions


def _check_shape(rule: Rule, spec: WeightSpec, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    found = ", ".join(f"{name} {tuple(shapes[name])}" for name in rule.sources)
    try:
        made = tuple(
            rule.transform(*(torch.empty(shapes[name], device="meta") for name in rule.sources)).shape
        )
    except RuntimeError as error:
        raise CheckpointError(
            f"{found} cannot make {spec.name} {spec.shape} ({error}); see {where}"
        ) from None
    if made != spec.shape:
        raise CheckpointError(f"{found} makes {spec.name} {made}; the config wants {spec.shape}; see {where}")
