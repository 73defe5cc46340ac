"""The one-pass heads of a repository, in a folder of the engine's model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.weights.draft_files import INFO_FILE, TENSORS_FILE, open_heads


@dataclass(frozen=True)
class HeadFiles:
    """Heads that fit the target. folder: what `train-draft` wrote."""

    folder: Path

    @property
    def total_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in (INFO_FILE, TENSORS_FILE))

    def write(self, folder: Path, tensor_para_size: int) -> None:
        """Copy the files; every tensor rank reads them whole."""
        folder.mkdir(parents=True)
        for name in (INFO_FILE, TENSORS_FILE):
            shutil.copyfile(self.folder / name, folder / name)

    def check_tokenizer(self, target: Tokenizer) -> None:
        """Do nothing: heads use the target's own vocabulary."""


def is_heads(source: str | Path) -> bool:
    """Return whether this folder has heads of `train-draft`, not a draft model."""
    return (Path(source) / TENSORS_FILE).is_file()


def plan_heads(source: str | Path, target: ModelConfig, stages: int, console: Console) -> HeadFiles:
    """Open heads. stages: pipeline_para_size. The engine compares the checkpoints at its start.

    Raises ConfigError or WeightFileError for what cannot draft for `target`.
    """
    if stages > 1:
        raise ConfigError(f"--draft {source}: heads do not work with --pp {stages}; wanted 1")
    info = open_heads(Path(source), target).info
    console.print(f"one-pass heads {source}: {info.depth} drafts", markup=False)
    return HeadFiles(Path(source))
