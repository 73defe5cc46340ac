"""Tables of prompt learning in a weight directory, under FasterTransformer's names. The engine does not read
them yet.

A task has a section [task_<i>] of config.ini and a file model.prompt_table.<task>.weight.bin, (length, C) in
the dtype of the weights: FasterTransformer's nemo_ckpt_convert.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor

from tridecode.backend.config import ModelConfig
from tridecode.backend.errors import CheckpointError
from tridecode.backend.weights import TORCH_DTYPES

_P_TUNING = 3  # prompt_learning_type: tables of embeddings, not of keys and values
_TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+ -]{0,99}")


@dataclass(frozen=True)
class PromptTable:
    """The virtual tokens of one task. shape: (prompt length, C) of what `read` gives."""

    task: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def check_prompts(tables: Sequence[PromptTable], config: ModelConfig) -> None:
    """CheckpointError for a name that is no file name, for one that two tables have, for another width."""
    for table in tables:
        if not _TASK_NAME.fullmatch(table.task):
            raise CheckpointError(
                f"a prompt table's task is {table.task[:80]!r}; wanted letters, digits, _ + -"
            )
        if len(table.shape) != 2 or table.shape[1] != config.hidden_size:
            wanted = f"(length, {config.hidden_size})"
            raise CheckpointError(
                f"the prompt table of {table.task} is {table.shape}; the model wants {wanted}"
            )
        if sum(other.task == table.task for other in tables) > 1:
            raise CheckpointError(f"there are two prompt tables of the task {table.task}")


def prompt_keys(tables: Sequence[PromptTable], config: ModelConfig) -> str:
    """What config.ini has of them: keys of the model's section, then the tasks' sections.

    Virtual tokens get the ids behind the vocabulary.
    """
    if not tables:
        return ""
    keys = f"num_tasks = {len(tables)}\nprompt_learning_start_id = {config.vocab_size}\n"
    keys += f"prompt_learning_type = {_P_TUNING}\n"
    for number, table in enumerate(tables):
        keys += f"[task_{number}]\ntask_name = {table.task}\nprompt_length = {table.shape[0]}\n"
    return keys


def write_prompts(directory: Path, tables: Sequence[PromptTable], config: ModelConfig) -> None:
    """Write the tables. CheckpointError for values that are not finite."""
    for table in tables:
        values = table.read().to(TORCH_DTYPES[config.weight_dtype]).contiguous()
        if not torch.isfinite(values).all():
            raise CheckpointError(f"the prompt table of {table.task} holds values that are not finite")
        path = directory / f"model.prompt_table.{table.task}.weight.bin"
        path.write_bytes(values.view(torch.uint8).flatten().numpy().data)
