"""The trained drafter of a repository, heads or a GLIDE layer, in a folder of the engine's model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.weights.draft_files import GLIDE, INFO_FILE, TENSORS_FILE, open_trained

_NAMES = {GLIDE: "GLIDE layer"}


@dataclass(frozen=True)
class TrainedFiles:
    """A drafter that fits the target. folder: what `train-draft` wrote."""

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
        """A trained drafter has the target's own vocabulary."""


def plan_trained(
    source: str | Path, kind: str, target: ModelConfig, stages: int, console: Console
) -> TrainedFiles:
    """Open a drafter of this kind. stages: pipeline_para_size. The engine compares the checkpoints when it
    starts.

    Raises ConfigError or WeightFileError for what cannot draft for `target`.
    """
    name = _NAMES.get(kind, "one-pass heads")
    if stages > 1:
        raise ConfigError(
            f"--draft {source}: speculation = {kind} does not work with --pp {stages}; wanted 1"
        )
    if kind == GLIDE and target.long_prompt_tokens:
        raise ConfigError(
            f"--draft {source}: the model rotates long prompts with other factors (longrope), and then there "
            "are no drafts"
        )
    info = open_trained(Path(source), target, kind).info
    console.print(f"{name} {source}: {info.depth} drafts", markup=False)
    return TrainedFiles(Path(source))
