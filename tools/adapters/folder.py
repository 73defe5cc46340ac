"""The folder of LoRA adapters of a repository: listing, adding and removing.

The engine watches the folder itself. An adapter appears and disappears with one rename, so the engine never
sees half of one.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.configuration.engine_config import EngineConfig, read_engine_config
from tridecode.backend.configuration.engine_config_file import checkpoint_dir, read_engine_parameters
from tridecode.backend.weights.lora import (
    CONFIG_FILE,
    TENSOR_FILE,
    LoraTargets,
    check_name,
    read_targets,
    unmatched_note,
)
from tridecode.backend.weights.lora_tensors import read_lora
from tridecode.converters.adapters import open_adapter
from tridecode.model_repo_templates.repository import ENGINE_MODEL


@dataclass(frozen=True)
class FoundAdapter:
    """An adapter in the folder. fault: why it cannot be served, or "". note: what its user should know."""

    name: str
    ranks: str = ""
    num_matrices: int = 0
    num_bytes: int = 0
    fault: str = ""
    note: str = ""

    def __str__(self) -> str:
        if self.fault:
            return f"{self.name}: {self.fault}"
        sizes = f"rank {self.ranks}, {self.num_matrices} matrices, {self.num_bytes:,} bytes"
        return f"{self.name}: {sizes}{f'; {self.note}' if self.note else ''}"


@dataclass(frozen=True)
class AdapterFolder:
    """The folder named by a repository's config.pbtxt, and the limits of its adapters."""

    path: Path
    targets: LoraTargets
    config: EngineConfig


def adapter_folder(repository: Path) -> AdapterFolder:
    """Raises ConfigError for a repository that serves no adapters, CheckpointError for one without
    lora_targets.json.
    """
    engine = Path(repository) / ENGINE_MODEL
    where = engine / "config.pbtxt"
    config = read_engine_config(read_engine_parameters(str(engine)), str(where))
    if config.lora_path == "none":
        raise ConfigError(f"{where}: parameter lora_path is none; wanted a folder, e.g. adapters")
    return AdapterFolder(engine / config.lora_path, read_targets(Path(checkpoint_dir(str(engine)))), config)


def read_adapters(repository: Path) -> list[FoundAdapter]:
    """Every adapter of the folder, read as the engine reads it, by name."""
    folder = adapter_folder(repository)
    if not folder.path.is_dir():
        return []
    names = sorted(entry.name for entry in os.scandir(folder.path) if entry.is_dir())
    return [_read(folder, name) for name in names if not name.startswith(".")]


def _read(folder: AdapterFolder, name: str) -> FoundAdapter:
    try:
        check_name(name)
        lora = read_lora(folder.path / name, folder.targets, folder.config.max_lora_rank)
        config, _, pairs = open_adapter(folder.path / name)
    except TridecodeError as error:
        return FoundAdapter(name, fault=str(error))
    ranks = sorted({pair.rank for pair in pairs.values()})
    shown = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    size = (folder.path / name / TENSOR_FILE).stat().st_size
    return FoundAdapter(name, shown, len(lora.pairs), size, note=unmatched_note(config.check_modules(pairs)))


def add_adapter(repository: Path, name: str, source: Path, overwrite: bool = False) -> FoundAdapter:
    """Copy an adapter into the folder, its tensors as safetensors, after reading it as the engine does.

    Raises ConfigError if the name is taken, and whatever reading raises; nothing remains then.
    """
    check_name(name)
    folder = adapter_folder(repository)
    target = folder.path / name
    if os.path.lexists(target) and not overwrite:
        raise ConfigError(f"{target} exists; choose another name, or add --overwrite")
    _, tensors, pairs = open_adapter(source)
    staging = folder.path / f".{name}.adding-{os.getpid()}"
    staging.mkdir(parents=True)
    try:
        names = sorted(name for pair in pairs.values() for name in (pair.a, pair.b))
        save_file({name: tensors.read(name).contiguous() for name in names}, staging / TENSOR_FILE)
        shutil.copyfile(Path(source) / CONFIG_FILE, staging / CONFIG_FILE)
        read_lora(staging, folder.targets, folder.config.max_lora_rank)
        _replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return _read(folder, name)


def _replace(staging: Path, target: Path) -> None:
    """Replace a folder: move the old one away, then rename the new one."""
    if not os.path.lexists(target):
        staging.rename(target)
        return
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    target.rename(old)
    try:
        staging.rename(target)
    except OSError:
        old.rename(target)
        raise
    _delete(old)


def remove_adapter(repository: Path, name: str) -> None:
    """Raises ConfigError if there is no such adapter."""
    check_name(name)
    folder = adapter_folder(repository)
    target = folder.path / name
    if not os.path.lexists(target):
        raise ConfigError(f"{folder.path} has no adapter {name}")
    old = target.parent / f".{name}.old-{os.getpid()}"
    target.rename(old)
    _delete(old)


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
