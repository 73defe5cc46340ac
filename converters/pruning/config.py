"""Per-layer settings of a config.json: lists of sizes, and the heads that were removed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tridecode.backend.base.checkpoint_files import read_json
from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.configuration.model_config import ModelConfig

#: field of LayerSizes -> keys of transformers' configs that may hold a list, alone or with _per_layer
_LIST_KEYS = {
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "mlp_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
}
_SUFFIX = "_per_layer"
PRUNED_HEADS = "pruned_heads"


@dataclass(frozen=True)
class Declared:
    """Per-layer settings of a config.json.

    sizes: field of LayerSizes to (key, a size for each layer). pruned_heads: the heads that a layer has lost.
    """

    where: Path
    sizes: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    pruned_heads: dict[int, tuple[int, ...]] = field(default_factory=dict)


def uniform_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with each list of sizes replaced by its largest number, as required by transformers'
    classes; `raw` itself if it has no lists.
    """
    found = {key: max(raw[key]) for keys in _LIST_KEYS.values() for key in keys if _is_sizes(raw.get(key))}
    return {**raw, **found} if found else raw


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_integer(size) for size in value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_declared(path: Path, config: ModelConfig) -> Declared:
    """Read the per-layer settings of the config.json in a checkpoint's directory; empty if `path` has
    none.
    """
    where = path / "config.json"
    return declared_sizes(read_json(where), where, config) if where.is_file() else Declared(path)


def declared_sizes(raw: dict[str, Any], where: Path, config: ModelConfig) -> Declared:
    """Return the lists and pruned heads of config.json. Raises CheckpointError for malformed ones."""
    declared = Declared(where)
    for name, keys in _LIST_KEYS.items():
        for key in (spelling for known in keys for spelling in (known, known + _SUFFIX)):
            value = raw.get(key)
            if not isinstance(value, list):
                continue
            if not _is_sizes(value) or len(value) != config.num_layers or min(value) < 0:
                wanted = f"{config.num_layers} sizes, one for each layer"
                raise CheckpointError(f"{where} has {key} = {str(value)[:80]}; wanted {wanted}")
            declared.sizes[name] = (key, value)
    for layer, heads in _pruned_heads(raw.get(PRUNED_HEADS), where).items():
        if layer >= config.num_layers or any(head >= config.num_heads for head in heads):
            found = f"{PRUNED_HEADS} of layer {layer} {str(list(heads))[:80]}"
            wanted = f"layers below {config.num_layers} and heads below {config.num_heads}"
            raise CheckpointError(f"{where} has {found}; wanted {wanted}")
        declared.pruned_heads[layer] = heads
    return declared


def _pruned_heads(value: Any, where: Path) -> dict[int, tuple[int, ...]]:
    if value is None:
        return {}
    found: dict[int, tuple[int, ...]] = {}
    fine = isinstance(value, dict)
    for layer, heads in value.items() if fine else ():
        fine = fine and str(layer).isascii() and str(layer).isdigit() and isinstance(heads, list)
        fine = fine and all(_is_integer(head) and head >= 0 for head in heads)
        if fine and heads:
            found[int(layer)] = tuple(sorted(set(heads)))
    if not fine:
        raise CheckpointError(
            f'{where} has {PRUNED_HEADS} = {str(value)[:80]}; wanted {{"layer": [head, ...], ...}}'
        )
    return found
