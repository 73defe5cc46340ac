"""Model families. A family is a module of this package that defines `FAMILY`; there is no list of them.

Families import torch, so they are loaded on first use; the package itself does not import torch.
docs/design/adding_a_family.md explains the parts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tridecode.backend.base.errors import ConfigError, UnsupportedError
from tridecode.backend.configuration.model_config import MAX_POSITIONS, ModelConfig
from tridecode.backend.models.config_ini import IniSection, common_keys, parse_ini, read_ini
from tridecode.backend.models.ini_checks import refuse_misspelt, refuse_unread
from tridecode.backend.models.layer_sizes_ini import layer_size_keys, read_layer_sizes
from tridecode.backend.models.quantization_ini import quantization_keys, read_quantization
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.quantization import stored_specs

if TYPE_CHECKING:
    from tridecode.backend.models.context import Ranks
    from tridecode.backend.models.decoder import Decoder
    from tridecode.backend.models.weights import Weights


@dataclass(frozen=True)
class Family:
    """A family's interface to the converter, the weight reader and the engine.

    name: ModelConfig.family. title: for messages; distinguishes families that share a section. read:
    (section, tied_head) to ModelConfig. keys: those that `read` reads besides common_keys. weight_specs:
    every tensor of the model; file_specs lists the files. model: (config, weights, ranks, positions) to the
    decoder of one rank. section: name in config.ini, in lower case; default: `name`. model_type: the
    parameter of config.pbtxt, in FasterTransformer's spelling; default: the title. recognises: whether a
    section of this name is the family's. has_slopes: whether the family uses ALiBi slopes, one per head;
    default: if the config has no rotary positions and weight_specs no table of positions.
    """

    name: str
    title: str
    read: Callable[[IniSection, bool], ModelConfig]
    keys: Callable[[Any], dict[str, object]]  # Any: what `read` returns
    weight_specs: Callable[[Any], list[WeightSpec]]
    model: Callable[[Any, Weights, Ranks, int], Decoder]
    section: str = ""
    model_type: str = ""
    recognises: Callable[[IniSection], bool] = lambda section: True
    has_slopes: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "section", self.section or self.name)
        object.__setattr__(self, "model_type", self.model_type or self.title)

    def depends_on_heads(self, config: ModelConfig) -> bool:
        """Return whether a pruned layer must know which heads it has kept."""
        if self.has_slopes is not None:
            return self.has_slopes(config)
        return config.rope is None and not self.has_position_table(config)

    def has_position_table(self, config: ModelConfig) -> bool:
        """Return whether positions are a learned table of finite length; others are computed at any
        length.
        """
        return any(spec.name == "model.wpe" for spec in self.weight_specs(config))


@cache
def families() -> dict[str, Family]:
    """Every family of this package, by name."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {module.FAMILY.name: module.FAMILY for module in modules if hasattr(module, "FAMILY")}


def family(name: str) -> Family:
    """The family of ModelConfig.family. Raises UnsupportedError for an unknown name."""
    if name not in families():
        raise UnsupportedError(f"there is no model family {name!r}; this version has {', '.join(families())}")
    return families()[name]


def check_context(config: ModelConfig, tokens: int) -> None:
    """Raise ConfigError if the model cannot compute sequences of `tokens` (max_sequence_tokens)."""
    found = f"parameter max_sequence_tokens is {tokens}"
    if tokens > config.max_positions and family(config.family).has_position_table(config):
        raise ConfigError(
            f"{found}; the positions of {config.model_name} are a learned table, model.wpe, of "
            f"{config.max_positions} rows (max_pos_seq_len in config.ini): wanted at most that"
        )
    if tokens > MAX_POSITIONS:
        raise ConfigError(
            f"{found}; wanted at most {MAX_POSITIONS}, the largest number of consecutive integers in float32"
        )


def read_model_config(path: Path, tied_head: bool | None = None) -> ModelConfig:
    """Read `config.ini` (a file or the directory that holds it).

    tied_head: whether the head is the word embedding; None: if the directory has no model.lm_head.weight.bin.
    Raises ConfigError naming the file, the key, what was found and what was wanted; UnsupportedError for a
    known setting that this version does not support.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.ini"
    if tied_head is None:
        tied_head = not (path.parent / "model.lm_head.weight.bin").exists()
    return _model_config(read_ini(path), path, tied_head)


def check_config(config: ModelConfig) -> None:
    """Raise ConfigError or UnsupportedError, as read_model_config does, for values that it would refuse."""
    path = Path("config.ini")
    _model_config(parse_ini(model_config_ini(config, 1), path), path, config.tied_head)


def _model_config(sections: dict[str, IniSection], path: Path, tied_head: bool) -> ModelConfig:
    models = sorted({family.section for family in families().values()} & set(sections))
    if len(models) > 1:
        found = " and ".join(f"[{name}]" for name in models)
        raise ConfigError(f"{path} has the sections {found}; wanted one, that of the model")
    candidates = [family for family in families().values() if family.section in sections]
    for candidate in candidates:
        section = sections[candidate.section]
        if candidate.recognises(section):
            refuse_misspelt(section)
            config = read_layer_sizes(section, candidate.read(section, tied_head))
            config = read_quantization(section, config)
            refuse_unread(section, candidate.title)
            return config
    if candidates:
        found, titles = candidates[0].section, " and ".join(candidate.title for candidate in candidates)
        raise UnsupportedError(
            f"{path}: [{found}] has the flags of another network; this version runs {titles}"
        )
    found = ", ".join(f"[{section.name}]" for section in sections.values()) or "none"
    wanted = " or ".join(f"[{name}]" for name in sorted({family.section for family in families().values()}))
    raise ConfigError(f"{path}: sections found: {found}; wanted {wanted}")


def model_config_ini(config: ModelConfig, tensor_para_size: int) -> str:
    """Return the text of config.ini for `config`; read_model_config reads it back as `config`."""
    kind = family(config.family)
    keys = {
        **common_keys(config, tensor_para_size),
        **kind.keys(config),
        **layer_size_keys(config),
        **quantization_keys(config),
    }
    return f"[{kind.section}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())


def file_specs(config: ModelConfig) -> list[WeightSpec]:
    """Return every file of a directory of this model: its tensors, and the parts of quantised ones."""
    return stored_specs(family(config.family).weight_specs(config), config.quantization)
