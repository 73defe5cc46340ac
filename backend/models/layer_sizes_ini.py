"""The keys of config.ini with the sizes of a pruned model's layers (docs/guides/pruning.md). No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.model_config import LayerSizes, ModelConfig
from tridecode.backend.models.config_ini import IniSection

#: field of LayerSizes -> key; without the key, every layer has the model's size
_KEYS = {
    "num_heads": "head_num_per_layer",
    "num_kv_heads": "kv_head_num_per_layer",
    "mlp_size": "inter_size_per_layer",
}
_KEPT_HEADS = "kept_heads_per_layer"
_NONE = "-"  # value of a layer whose kept heads are unknown, or that has kept all

_Config = TypeVar("_Config", bound=ModelConfig)


def read_layer_sizes(section: IniSection, config: _Config) -> _Config:
    """Return `config` with the sizes of its layers, if the section has any of the keys.

    Raises ConfigError that names file, key, found and wanted, for lists of the wrong length, sizes beyond the
    unpruned model's, and heads that are not a multiple of the key/value heads.
    """
    lists = {field: _sizes(section, key, config, field) for field, key in _KEYS.items()}
    kept = _kept_heads(section, config)
    if not kept and not any(lists.values()):
        return config
    whole = {field: [getattr(config, field)] * config.num_layers for field in _KEYS}
    if not lists["num_kv_heads"] and config.num_kv_heads == config.num_heads:
        lists["num_kv_heads"] = lists["num_heads"]  # a key/value head for each query head
    columns = {field: lists[field] or whole[field] for field in _KEYS}
    layers = tuple(
        LayerSizes(columns["num_heads"][i], columns["num_kv_heads"][i], columns["mlp_size"][i], heads)
        for i, heads in enumerate(kept or [()] * config.num_layers)
    )
    for layer, sizes in enumerate(layers):
        _check(section, layer, sizes)
    return replace(config, layer_sizes=layers)


def layer_size_keys(config: ModelConfig) -> dict[str, object]:
    """The keys that read_layer_sizes reads; none for a model that is not pruned."""
    layers = config.layer_sizes
    if not layers:
        return {}
    keys: dict[str, object] = {
        key: " ".join(str(getattr(sizes, field)) for sizes in layers) for field, key in _KEYS.items()
    }
    if any(sizes.kept_heads for sizes in layers):
        keys[_KEPT_HEADS] = ", ".join(" ".join(map(str, sizes.kept_heads)) or _NONE for sizes in layers)
    return keys


def _sizes(section: IniSection, key: str, config: ModelConfig, field: str) -> list[int]:
    """The numbers of a list; [] if the section has no such key."""
    most = getattr(config, field)
    text = section.text(key, "")
    if not text.strip():
        return []
    sizes = _numbers(section, key, text)
    _demand(section, key, f"{len(sizes)} numbers", len(sizes) == config.num_layers, _one_each(config))
    for layer, size in enumerate(sizes):
        found = f"{size} in layer {layer}"
        _demand(section, key, found, 1 <= size <= most, f"1 to {most}, the size of the unpruned model")
    return sizes


def _kept_heads(section: IniSection, config: ModelConfig) -> list[tuple[int, ...]]:
    text = section.text(_KEPT_HEADS, "")
    if not text.strip():
        return []
    parts = [part.strip() for part in text.split(",")]
    _demand(section, _KEPT_HEADS, f"{len(parts)} lists", len(parts) == config.num_layers, _one_each(config))
    kept = [() if part == _NONE else tuple(_numbers(section, _KEPT_HEADS, part)) for part in parts]
    for layer, heads in enumerate(kept):
        found = f"{' '.join(map(str, heads))[:80]} in layer {layer}"
        ascending = all(low < high for low, high in zip(heads, heads[1:]))
        wanted = f"different heads of 0 to {config.num_heads - 1} in ascending order, or {_NONE}"
        _demand(section, _KEPT_HEADS, found, ascending and set(heads) <= set(range(config.num_heads)), wanted)
    return kept


def _numbers(section: IniSection, key: str, text: str) -> list[int]:
    words = text.split()
    _demand(section, key, repr(text[:80]), bool(words) and all(map(_is_number, words)), "whole numbers")
    return [int(word) for word in words]


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 10


def _check(section: IniSection, layer: int, sizes: LayerSizes) -> None:
    found = f"{sizes.num_heads} in layer {layer}, with {sizes.num_kv_heads} key/value heads"
    _demand(
        section, _KEYS["num_heads"], found, sizes.num_heads % sizes.num_kv_heads == 0, "a multiple of them"
    )
    if sizes.kept_heads:
        found, wanted = (
            f"{len(sizes.kept_heads)} heads in layer {layer}",
            f"the {sizes.num_heads} of head_num",
        )
        _demand(section, _KEPT_HEADS, found, len(sizes.kept_heads) == sizes.num_heads, wanted)


def _one_each(config: ModelConfig) -> str:
    return f"one for each of num_layer = {config.num_layers} layers"


def _demand(section: IniSection, key: str, found: str, fine: bool, wanted: str) -> None:
    if not fine:
        raise ConfigError(f"{section.path}: [{section.name}] {key} has {found}; wanted {wanted}")
