"""Source checkpoints: the interface between a reader of one format (a module of this package) and the
conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedConfig

from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.prompts import PromptTable
from tridecode.converters.rules import Conversion


class TensorSource(Protocol):
    """Tensors by transformers' names; `shapes` is known before any is read."""

    shapes: dict[str, tuple[int, ...]]

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> Tensor: ...


@dataclass
class Checkpoint:
    """A source model.

    path: the directory or file that was opened. config: transformers' config of the model. tensors: by
    transformers' names. bos_id, eos_ids: its special tokens. reference: (dtype of the weights) to an
    independent model in evaluation mode on the CPU; None: there is none to compare with. tokenizer_dir: the
    folder of its tokenizer, even if it has none; None: a .gguf, which contains it. notes: sentences for the
    user about the source. plan: (dtype or None, model_name or None) to the config and the conversions of a
    source that is not converted by a family's rules. adapter: the folder of the LoRA adapter that is merged
    into `tensors` and the reference. fills_reference: transformers cannot load the files directly; its model
        is created from the config and filled with `tensors`. reference_tensors: the reader of the reference's
        tensors, if that may not be transformers.
    """

    path: Path
    config: PreTrainedConfig
    tensors: TensorSource
    bos_id: int | None
    eos_ids: list[int]
    gguf_fields: Mapping[str, Any] = field(default_factory=dict)  # metadata of a .gguf
    reference: Callable[[torch.dtype], Module] | None = field(default=None, repr=False)
    tokenizer_dir: Path | None = None
    notes: list[str] = field(default_factory=list)
    prompts: list[PromptTable] = field(default_factory=list)  # of prompt learning
    prompt_start_id: int | None = None  # prompt_learning_start_id of the source; None: it has none
    keep: object = field(default=None, repr=False)  # objects that must live as long as the tensors
    plan: Callable[[str | None, str | None], tuple[ModelConfig, list[Conversion]]] | None = field(
        default=None, repr=False
    )
    adapter: Path | None = None
    fills_reference: bool = False
    reference_tensors: str = ""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    @property
    def name(self) -> str:
        """A short name for people: of the folder or file."""
        return self.path.stem if self.path.is_file() else self.path.resolve().name

    @property
    def has_reference(self) -> bool:
        """Return whether an independent model exists to compare with."""
        return self.reference is not None

    def reference_model(self, dtype: torch.dtype) -> Module:
        """Return an independent model of this checkpoint. Raises CheckpointError if there is none."""
        if self.reference is None:
            raise CheckpointError(f"{self.path}: transformers has no class for {self.config.model_type}")
        return self.reference(dtype)
