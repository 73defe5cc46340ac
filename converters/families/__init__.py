"""Checkpoint families. A family is a module of this package that defines `FAMILY`; there is no list of them.

docs/design/adding_a_family.md explains the parts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch.nn import Module
from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.gguf.rules import GgufRules
from tridecode.converters.rules import Rule
from tridecode.converters.sources import Checkpoint


@dataclass(frozen=True)
class CheckpointFamily:
    """The conversion of one family's checkpoints to weight directories.

    model_types: transformers' names. embedding, head: names of these tensors. model_config: (transformers'
    config, **common) to ModelConfig; common: model_name, start_id, end_id, weight_dtype, tied_head. rules:
    (number of heads) to those of every tensor. takes_head_size: rules also takes the head size, which cannot
    be inferred from a pruned layer's tensors. ignored: patterns of buffers to skip. renamed: names in other
    versions -> transformers' current names. head_rules: rules of tensors whose number depends on the config.
    """

    model_types: tuple[str, ...]
    embedding: str
    model_config: Callable[..., ModelConfig]
    rules: Callable[..., list[Rule]]
    head: str = "lm_head.weight"
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    gguf: GgufRules | None = None
    head_rules: Callable[[ModelConfig], list[Rule]] | None = None
    config_class: type[PreTrainedConfig] | None = None
    reference: Callable[[Checkpoint, torch.dtype], Module] | None = None
    takes_head_size: bool = False

    @property
    def prefix(self) -> str:
        """The prefix of a full model's tensors, which the bare model's lack."""
        return self.embedding.partition(".")[0] + "."

    def rules_of(self, config: ModelConfig) -> list[Rule]:
        """Return the rules of all tensors if every layer has the sizes of `config`."""
        sizes = (config.num_heads, config.head_size) if self.takes_head_size else (config.num_heads,)
        return self.rules(*sizes) + (self.head_rules(config) if self.head_rules is not None else [])

    @property
    def source_file(self) -> str:
        """Path of the rules' source file, for errors."""
        return f"converters/families/{self.rules.__module__.rpartition('.')[2]}.py"


@cache
def families() -> dict[str, CheckpointFamily]:
    """The family of each model type."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {model_type: family for family in found for model_type in family.model_types}


def family_of(model_type: object, where: Path) -> CheckpointFamily:
    """Raises UnsupportedError for an unknown model type; where: the file that names it."""
    if model_type not in families():
        raise UnsupportedError(
            f"{where} has model_type {model_type!r}; this version converts {', '.join(families())}"
        )
    return families()[str(model_type)]


def gguf_family(architecture: object, where: Path) -> CheckpointFamily:
    """Raises UnsupportedError for an unknown architecture; where: the file."""
    known = {family.gguf.architecture: family for family in families().values() if family.gguf}
    if architecture not in known:
        raise UnsupportedError(
            f"{where} has the GGUF architecture {architecture!r}; this version reads {', '.join(known)}"
        )
    return known[str(architecture)]
