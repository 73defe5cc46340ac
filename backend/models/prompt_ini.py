"""Prompt learning in config.ini: keys of the model's section and the sections [task_0], ... No torch.

Source: FasterTransformer's ParallelGptTritonModel.cc; `prompt_learning_type` of a task is ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models.config_ini import IniSection, read_ini
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.wire.prompt_learning import (
    NO_PROMPT,
    PREFIX_PROMPT,
    TYPES,
    PromptTask,
    default_start_id,
)

#: a task's name is part of a file's name
TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+ -]{0,99}")
MAX_TASKS = 4096
MAX_PROMPT_LENGTH = 1 << 20


@dataclass(frozen=True)
class PromptSection:
    """kind: prompt_learning_type; start_id: prompt_learning_start_id; tasks: by number."""

    kind: int
    start_id: int
    tasks: list[PromptTask]


def read_prompt_section(directory: Path, model: ModelConfig) -> PromptSection:
    """Read the prompt-learning sections of a directory's config.ini. Raises ConfigError naming file, section
    and key.
    """
    sections = read_ini(Path(directory) / "config.ini")
    section = next((s for s in sections.values() if "vocab_size" in s.items), None)
    if section is None:
        return PromptSection(NO_PROMPT, model.vocab_size, [])
    kind = _type(section, NO_PROMPT)
    count = section.integer("num_tasks", 0, minimum=0, maximum=MAX_TASKS)
    start = section.integer(
        "prompt_learning_start_id", default_start_id(model.vocab_size, model.end_id), minimum=0
    )
    tasks = [_task(section, sections.get(f"task_{number}"), number, kind) for number in range(count)]
    for number, task in enumerate(tasks):
        if any(task.name == other.name for other in tasks[:number]):
            raise ConfigError(
                f"{section.path}: [task_{number}] has the task_name {task.name!r} of another task"
            )
    return PromptSection(kind, start, tasks)


def _task(model: IniSection, section: IniSection | None, number: int, kind: int) -> PromptTask:
    if section is None:
        raise ConfigError(
            f"{model.path}: [{model.name}] num_tasks names a section [task_{number}], which is missing"
        )
    name = section.text("task_name").strip()
    if not TASK_NAME.fullmatch(name):
        found = f"[{section.name}] task_name = {name[:80]!r}"
        raise ConfigError(f"{model.path}: {found}; wanted letters, digits, blanks and _ . + -")
    length = section.integer("prompt_length", 0, minimum=0, maximum=MAX_PROMPT_LENGTH)
    return PromptTask(name, length, _type(section, kind))


def _type(section: IniSection, default: int) -> int:
    kind = section.integer("prompt_learning_type", default)
    if kind not in TYPES:
        raise ConfigError(
            f"{section.path}: [{section.name}] prompt_learning_type = {kind}; wanted 0 (none), 1 (soft "
            "prompt), 2 (prefix prompt) or 3 (p-tuning)"
        )
    return kind


def prefix_spec(name: str, model: ModelConfig, length: int) -> WeightSpec:
    """Return the spec of FasterTransformer's prefix file: (layers, 2 (keys and values), K, length, D), heads
    split over ranks.
    """
    shape = (model.num_layers, 2, model.num_kv_heads, length, model.head_size)
    return WeightSpec(name, shape, axis=2, heads=(model.num_kv_heads,))


def task_spec(task: PromptTask, model: ModelConfig) -> WeightSpec:
    """Return the spec of the file or files of a task's table."""
    if task.kind == PREFIX_PROMPT:
        return prefix_spec(f"model.prefix_prompt.{task.name}.weight", model, task.length)
    return WeightSpec(f"model.prompt_table.{task.name}.weight", (task.length, model.hidden_size))
