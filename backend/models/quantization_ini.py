"""The keys of config.ini that describe the quantisation of a directory (docs/guides/quantization.md).

No torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models.config_ini import IniSection
from tridecode.backend.weights.quantization import ACTIVATIONS, BLOCK, FILE_DTYPES, Quantization

_FORMATS = {"none": "", **{name: name for name in FILE_DTYPES}}
_ACTIVATIONS = {"none": "", **{name: name for name in ACTIVATIONS}}
_Config = TypeVar("_Config", bound=ModelConfig)


def read_quantization(section: IniSection, config: _Config) -> _Config:
    """Return `config` with its quantization, if the section has weight_quantization.

    Raises UnsupportedError for an unknown format, ConfigError for inconsistent keys.
    """
    weights = section.choice("weight_quantization", "none", _FORMATS)
    found = Quantization(
        weights=weights,
        group=section.integer("quantization_group", 0, minimum=0, maximum=1 << 20),
        block_rows=section.integer("quantization_block_rows", 1, minimum=1),
        zeros=section.flag("quantization_zeros", False),
        act_order=section.flag("quantization_act_order", False),
        activations=section.choice("activation_quantization", "none", _ACTIVATIONS),
    )
    if not weights:
        return config
    for key, fine, wanted in (
        ("quantization_block_rows", found.block_rows in (1, BLOCK), f"1 or {BLOCK}"),
        (
            "quantization_block_rows",
            found.block_rows == 1 or (weights, found.group, found.act_order) == ("fp8", BLOCK, False),
            f"1, or fp8 with quantization_group = {BLOCK}",
        ),
        ("quantization_zeros", weights == "int4" or not found.zeros, "false, or int4"),
        ("quantization_act_order", found.group > 0 or not found.act_order, "false, or a quantization_group"),
        (
            "activation_quantization",
            found.activations in ("", weights),
            f"none or {weights}, the format of the weights",
        ),
    ):
        if not fine:
            value = section.text(key, "")
            raise ConfigError(
                f"{section.path}: [{section.name}] {key} = {value} with weight_quantization = {weights}; "
                f"wanted {wanted}"
            )
    return replace(config, quantization=found)


def quantization_keys(config: ModelConfig) -> dict[str, object]:
    """The keys that read_quantization reads; none for a model that is not quantised."""
    found = config.quantization
    if found is None:
        return {}
    return {
        "weight_quantization": found.weights,
        "quantization_group": found.group,
        "quantization_block_rows": found.block_rows,
        "quantization_zeros": found.zeros,
        "quantization_act_order": found.act_order,
        "activation_quantization": found.activations or "none",
    }
