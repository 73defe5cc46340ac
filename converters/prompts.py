"""Tasks of prompt learning in a weight directory, under FasterTransformer's names.

A task has a section [task_<i>] of config.ini and a file model.prompt_table.<task>.weight.bin, (length, C),
or files model.prefix_prompt.<task>.weight.<rank>.bin, (layers, 2, kv heads, length, D), in the dtype of the
weights, as FasterTransformer's nemo_ckpt_convert.py and huggingface_jp_gptneox_convert.py write them. See
docs/guides/prompt_learning.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models.prompt_ini import TASK_NAME, task_spec
from tridecode.backend.weights.reader import TORCH_DTYPES
from tridecode.backend.wire.prompt_learning import P_TUNING, PREFIX_PROMPT, PromptTask, default_start_id


@dataclass(frozen=True)
class PromptTable:
    """The virtual tokens of one task.

    shape: that of `read`'s result, (length, C) or, for a prefix, (length, layers * 2 * kv heads * D), in this
    order; None: the task is declared but has no table. kind: prompt_learning_type.
    """

    task: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor] | None
    kind: int = P_TUNING


def check_prompts(tables: Sequence[PromptTable], config: ModelConfig) -> None:
    """Raise CheckpointError for an invalid file name, a duplicate name, or a width that is not the
    model's.
    """
    for table in tables:
        if not TASK_NAME.fullmatch(table.task):
            raise CheckpointError(
                f"a prompt table's task is {table.task[:80]!r}; wanted letters, digits, _ . + -"
            )
        wide = _width(table, config)
        if table.read is not None and (len(table.shape) != 2 or table.shape[1] != wide or not table.shape[0]):
            what = " (layers * 2 * kv heads * head size)" if table.kind == PREFIX_PROMPT else ""
            raise CheckpointError(
                f"the prompt table of {table.task} is {table.shape}; the model wants (length, {wide}){what}"
            )
        if sum(other.task == table.task for other in tables) > 1:
            raise CheckpointError(f"there are two prompt tables of the task {table.task}")


def _width(table: PromptTable, config: ModelConfig) -> int:
    if table.kind != PREFIX_PROMPT:
        return config.hidden_size
    if config.layer_sizes and table.read is not None:
        raise CheckpointError(
            f"the prompt table of {table.task} is a prefix; the layers of this pruned model have different "
            "heads"
        )
    return config.num_layers * 2 * config.num_kv_heads * config.head_size


def prompt_keys(tables: Sequence[PromptTable], config: ModelConfig, start_id: int | None = None) -> str:
    """Return the lines of config.ini for these tables: keys of the model's section, then the tasks' sections.

    start_id: the first virtual id; None: the one that FasterTransformer's clients use, if it is free.
    """
    if not tables:
        return ""
    first = default_start_id(config.vocab_size, config.end_id) if start_id is None else start_id
    keys = f"num_tasks = {len(tables)}\nprompt_learning_start_id = {first}\n"
    keys += f"prompt_learning_type = {tables[0].kind}\n"
    for number, table in enumerate(tables):
        keys += f"[task_{number}]\ntask_name = {table.task}\nprompt_length = {table.shape[0]}\n"
        if table.kind != tables[0].kind:
            keys += f"prompt_learning_type = {table.kind}\n"
    return keys


def write_prompts(
    directory: Path, tables: Sequence[PromptTable], config: ModelConfig, tensor_para_size: int = 1
) -> None:
    """Write the tables. CheckpointError for values that are not finite."""
    for table in tables:
        if table.read is None:
            continue
        values = table.read().to(TORCH_DTYPES[config.weight_dtype])
        if not torch.isfinite(values).all():
            raise CheckpointError(f"the prompt table of {table.task} holds values that are not finite")
        spec = task_spec(PromptTask(table.task, table.shape[0], table.kind), config)
        if table.kind == PREFIX_PROMPT:
            layers = (config.num_layers, 2, config.num_kv_heads, config.head_size)
            values = values.view(-1, *layers).permute(1, 2, 3, 0, 4)
        for rank in range(spec.num_files(tensor_para_size)):
            share = values
            if spec.axis is not None:
                [(start, stop)] = spec.slices(rank, tensor_para_size)
                share = values.narrow(spec.axis, start, stop - start)
            path = directory / spec.file_name(rank)
            path.write_bytes(share.contiguous().view(torch.uint8).flatten().numpy().data)
