"""Structured pruning: the sizes of each layer, from the shapes of its tensors and from config.json.

docs/guides/pruning.md describes the checkpoints. Shapes decide; config.json must agree with them where it
says more: `pruned_heads` ({layer: [head, ...]}, as transformers 4 writes it) or a list, one size for each
layer, in the place of a number (`num_attention_heads`, `intermediate_size`, ...).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.backend.configuration.model_config import LayerSizes, ModelConfig
from tridecode.backend.models import family
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.pruning.config import PRUNED_HEADS, Declared
from tridecode.converters.rules import Rule

Shapes = Mapping[str, tuple[int, ...]]
_Config = TypeVar("_Config", bound=ModelConfig)


def with_layer_sizes(
    config: _Config, source: CheckpointFamily, shapes: Shapes, declared: Declared
) -> _Config:
    """`config` with the sizes that the tensors of each layer have, if any layer is smaller than it says.

    shapes: of the checkpoint's tensors, by transformers' full names. Raises CheckpointError where they
    contradict config.json or do not tell the sizes, UnsupportedError for a layer that cannot be run.
    """
    widths = _Widths(config, source, shapes)
    layers = tuple(_measured(layer, config, widths, declared) for layer in range(config.num_layers))
    plain = LayerSizes(config.num_heads, config.num_kv_heads, config.mlp_size)
    if all(sizes == plain for sizes in layers):
        return config
    for layer, sizes in enumerate(layers):
        _check(layer, sizes, config, declared.where)
    return replace(config, layer_sizes=layers)


class _Widths:
    """The sizes of a layer's matrices, from their element counts, which do not depend on the order of
    rows.
    """

    def __init__(self, config: ModelConfig, source: CheckpointFamily, shapes: Shapes):
        self._hidden, self._shapes = config.hidden_size, shapes
        self._rules = {rule.target: rule for rule in source.rules_of(config)}
        self._down = {
            spec.layer: spec.name
            for spec in family(config.family).weight_specs(config)
            if ".mlp." in spec.name and spec.axis == 0 and len(spec.shape) == 2
        }

    def attention(self, layer: int, name: str) -> int | None:
        """Return the inputs of attention.dense, or the outputs of attention.query_key_value.

        None: the tensors do not determine them; the conversion reports the fault.
        """
        return self._width(f"model.layers.{layer}.attention.{name}.weight")

    def mlp(self, layer: int) -> int | None:
        return self._width(self._down.get(layer, ""))

    def _width(self, target: str) -> int | None:
        layer = re.search(r"\.layers\.(\d+)\.", target)
        rule = self._rules.get(re.sub(r"\.layers\.\d+\.", ".layers.{i}.", target))
        if rule is None or layer is None:
            return None
        shapes = [self._shapes.get(name, ()) for name in rule.of_layer(int(layer[1])).sources]
        if any(len(shape) != 2 or self._hidden not in shape for shape in shapes):
            return None
        return sum(math.prod(shape) for shape in shapes) // self._hidden


def _measured(layer: int, config: ModelConfig, widths: _Widths, declared: Declared) -> LayerSizes:
    """Return the sizes of one layer; those of config if its tensors do not determine them, or are larger."""
    size = config.head_size
    whole = LayerSizes(config.num_heads, config.num_kv_heads, config.mlp_size)
    queries, qkv, inner = (
        widths.attention(layer, "dense"), widths.attention(layer, "query_key_value"), widths.mlp(layer),
    )  # fmt: skip
    found: dict[str, int] = {"mlp_size": whole.mlp_size if inner is None or inner > whole.mlp_size else inner}
    if queries is None or queries > whole.num_heads * size or size < 1:
        return replace(whole, mlp_size=found["mlp_size"])
    if queries % size:
        raise UnsupportedError(
            f"{declared.where}: attention of layer {layer} has {queries} columns; wanted heads of {size}: "
            "smaller heads are not supported"
        )
    found["num_heads"] = found["num_kv_heads"] = queries // size
    keys = 0 if qkv is None else (qkv - queries) // 2
    if whole.num_kv_heads != whole.num_heads or "num_kv_heads" in declared.sizes:
        fits = keys > 0 and qkv == queries + 2 * keys and keys % size == 0
        found["num_kv_heads"] = min(keys // size, whole.num_kv_heads) if fits else whole.num_kv_heads
    _compare(layer, found, declared)
    return LayerSizes(**found, kept_heads=_kept(layer, found["num_heads"], config, declared))


def _compare(layer: int, found: dict[str, int], declared: Declared) -> None:
    """Raise CheckpointError if config.json states another size than the tensors have."""
    for name, (key, sizes) in declared.sizes.items():
        if sizes[layer] != found[name]:
            wanted = f"{sizes[layer]}, {key} of layer {layer} in {declared.where}"
            raise CheckpointError(
                f"the tensors of layer {layer} have {name} = {found[name]}; wanted {wanted}"
            )


def _kept(layer: int, heads: int, config: ModelConfig, declared: Declared) -> tuple[int, ...]:
    """Return the indices of the heads that a layer has kept; () if it has all, or config.json does not list
    them.
    """
    lost = set(declared.pruned_heads.get(layer, ()))
    if not lost:
        return ()
    if config.num_heads - len(lost) != heads:  # so their number is bounded by that of the tensors
        left = config.num_heads - len(lost)
        found = f"{PRUNED_HEADS} leaves layer {layer} {left} of {config.num_heads} heads"
        raise CheckpointError(f"{declared.where}: {found}; its tensors have {heads}")
    return tuple(head for head in range(config.num_heads) if head not in lost)


def _check(layer: int, sizes: LayerSizes, config: ModelConfig, where: Path) -> None:
    """UnsupportedError or CheckpointError for a layer that this version cannot run."""
    if min(sizes.num_heads, sizes.num_kv_heads, sizes.mlp_size) < 1:
        found = f"{sizes.num_heads} heads and an MLP of {sizes.mlp_size} in layer {layer}"
        raise UnsupportedError(f"{where}: {found}; this version runs layers with 1 or more of each")
    if sizes.num_heads % sizes.num_kv_heads:
        found = f"{sizes.num_heads} query heads and {sizes.num_kv_heads} key/value heads in layer {layer}"
        raise UnsupportedError(f"{where}: {found}; wanted a multiple of the key/value heads")
    if sizes.kept_heads:
        groups = Counter(head * config.num_kv_heads // config.num_heads for head in sizes.kept_heads)
        if len(groups) != sizes.num_kv_heads or len(set(groups.values())) != 1:
            found = f"the kept heads of layer {layer} have {dict(groups)} in each group of a key/value head"
            raise UnsupportedError(f"{where}: {found}; wanted equal numbers in {sizes.num_kv_heads} groups")
    elif sizes.num_heads < config.num_heads and family(config.family).depends_on_heads(config):
        raise CheckpointError(
            f"{where}: layer {layer} has {sizes.num_heads} of {config.num_heads} heads; which ones decides "
            f'their ALiBi slopes; wanted {PRUNED_HEADS}: {{"{layer}": [the heads that were removed], ...}}'
        )


def describe(config: ModelConfig) -> list[str]:
    """Describe a pruned model to the user: a sentence for each run of equal layers."""
    lines = []
    for sizes, run in groupby(range(config.num_layers), key=lambda layer: config.layer_sizes[layer]):
        layers = list(run)
        name = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        kv = f" ({sizes.num_kv_heads} of {config.num_kv_heads} key/value heads)"
        lines.append(
            f"{name}: {sizes.num_heads} of {config.num_heads} heads"
            f"{kv if config.num_kv_heads != config.num_heads else ''}, "
            f"an MLP of {sizes.mlp_size} of {config.mlp_size}"
        )
    return lines


def rules_of_layers(source: CheckpointFamily, config: ModelConfig) -> list[Rule]:
    """The rules of all tensors; those of a layer with the heads of that layer."""
    rules = source.rules_of(config)
    if not config.layer_sizes:
        return rules
    layers = range(config.num_layers)
    inside = [
        rule.of_layer(layer)
        for layer in layers
        for rule in source.rules_of(config.of_layer(layer))
        if "{i}" in rule.target
    ]
    return [rule for rule in rules if "{i}" not in rule.target] + inside
