"""Weight directories as sources: those of FasterTransformer's converters (1-gpu … 8-gpu), and our own.

docs/reference/sources.md lists the omissions and errors of FasterTransformer's converters, and how they are
handled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.base.checkpoint_files import require_file
from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import family, read_model_config
from tridecode.backend.models.config_ini import IniSection, read_ini
from tridecode.backend.models.gptneox import BIAS_SUM, GptNeoXConfig
from tridecode.backend.models.prompt_ini import read_prompt_section, task_spec
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.reader import WeightReader
from tridecode.backend.wire.prompt_learning import PREFIX_PROMPT, PromptTask
from tridecode.converters.prompts import PromptTable
from tridecode.converters.references.directory import directory_reference
from tridecode.converters.rules import Conversion, same
from tridecode.converters.sources import Checkpoint

CONFIG_FILE = "config.ini"
_MAX_CONFIG_BYTES = 1 << 20
_DEGREE = re.compile(r"\d+-gpu")
_HEAD, _EMBEDDING = "model.lm_head.weight", "model.wte"


class DirectoryTensors:
    """The tensors of a weight directory, whole, by the names of `config`'s files without rank and .bin.

    fixes: functions that make a tensor whose file does not match its name, or that has no file.
    """

    def __init__(self, reader: WeightReader, config: ModelConfig, fixes: Mapping[str, Callable[[], Tensor]]):
        self.reader, self._fixes = reader, fixes
        self.shapes = {spec.name: spec.shape for spec in family(config.family).weight_specs(config)}

    def dtype(self, name: str) -> torch.dtype:
        return self.reader.dtype

    def read(self, name: str) -> Tensor:
        fix = self._fixes.get(name)
        return fix() if fix is not None else self.reader.read(self.reader.specs[name])


def find_weight_directory(path: Path) -> Path | None:
    """`path`, or its only folder <n>-gpu, if that holds a config.ini; None if neither does.

    Raises CheckpointError if several folders do.
    """
    if (path / CONFIG_FILE).exists():
        return path
    found = sorted(
        entry.parent for entry in path.glob(f"*-gpu/{CONFIG_FILE}") if _DEGREE.fullmatch(entry.parent.name)
    )
    if len(found) > 1:
        names = ", ".join(entry.name for entry in found)
        raise CheckpointError(f"{path} holds {names}; name one of them: each is a whole checkpoint")
    return found[0] if found else None


def open_weight_directory(path: Path) -> Checkpoint:
    """A directory of config.ini and .bin files, written at any tensor-parallel degree; no tensor is read.

    Raises ConfigError or UnsupportedError for its config.ini, WeightFileError for a file that is missing or
    has another length.
    """
    require_file(path / CONFIG_FILE, _MAX_CONFIG_BYTES)
    stored = read_model_config(path, tied_head=True)  # a head that needs a fix is accepted
    if (path / f"{_HEAD}.bin").exists():
        stored = replace(stored, tied_head=False)
    if stored.quantization is not None:
        found = f"{path} is quantised ({stored.quantization.weights})"
        raise CheckpointError(f"{found}; build from the checkpoint that it was made from")
    reader = WeightReader(path, stored)
    sections = read_ini(path / CONFIG_FILE)
    section = sections[family(stored.family).section]
    tables, start_id, prompt_notes = _prompt_tables(path, stored, reader)
    notes = [*_eps_notes(section), *prompt_notes]
    config: ModelConfig = stored
    fixes: dict[str, Callable[[], Tensor]] = {}
    if isinstance(stored, GptNeoXConfig):
        config, fixes = _split_bias_sum(stored, reader)
        notes += _bias_notes(config, reader)
    if not config.tied_head and config.family == "bloom" and "residual_from_norm" not in section.items:
        fixes[_HEAD] = partial(_untransposed_head, reader)
        notes.append(
            f"{_HEAD}.bin is transposed: FasterTransformer's BLOOM converter writes it so; turned back"
        )
    tensors = DirectoryTensors(reader, config, fixes)
    if not config.tied_head and torch.equal(tensors.read(_HEAD), tensors.read(_EMBEDDING)):
        config = replace(config, tied_head=True)
        tensors = DirectoryTensors(reader, config, fixes)
    return Checkpoint(
        path,
        PreTrainedConfig(),
        tensors,
        config.start_id,
        [config.end_id, *config.more_end_ids],
        reference=directory_reference(config, tensors),
        tokenizer_dir=path,
        notes=[f"{path / CONFIG_FILE}: {note}" for note in notes],
        plan=partial(_plan, config),
        prompts=tables,
        prompt_start_id=start_id,
    )


def _plan(
    config: ModelConfig, dtype: str | None, model_name: str | None
) -> tuple[ModelConfig, list[Conversion]]:
    config = replace(
        config, weight_dtype=dtype or config.weight_dtype, model_name=model_name or config.model_name
    )
    specs = family(config.family).weight_specs(config)
    return config, [Conversion(spec, (spec.name,), same) for spec in specs]


def _untransposed_head(reader: WeightReader) -> Tensor:
    rows, columns = reader.specs[_HEAD].shape  # (V, C) of the file's length, whose content is (C, V)
    return reader.read(reader.specs[_HEAD]).reshape(columns, rows).t()


def _split_bias_sum(
    config: GptNeoXConfig, reader: WeightReader
) -> tuple[GptNeoXConfig, dict[str, Callable[[], Tensor]]]:
    """Split the sum of two biases, which is scaled by the number of ranks, into the MLP's bias and a zero
    one.
    """
    if not config.bias_sum:
        return config, {}
    fixes: dict[str, Callable[[], Tensor]] = {}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        fixes[f"{prefix}.mlp.dense_4h_to_h.bias"] = partial(reader.read, reader.specs[f"{prefix}.{BIAS_SUM}"])
        fixes[f"{prefix}.attention.dense.bias"] = partial(torch.zeros, config.hidden_size)
    return replace(config, bias_sum=False), fixes


def _bias_notes(config: ModelConfig, reader: WeightReader) -> list[str]:
    if config.residual == "parallel" or reader.stored_size == 1 or reader.manifest is not None:
        return []
    return [
        "use_gptj_residual = 0 for several ranks: FasterTransformer's Hugging Face converter divides two "
        "biases of each layer by their number by mistake, which the files do not tell; compare (--reference)"
    ]


def _eps_notes(section: IniSection) -> list[str]:
    """Return notes: FasterTransformer's constants differ from those with which most checkpoints were
    trained.
    """
    if "layernorm_eps" in section.items:
        return []
    value = {"gpt": "1e-06", "gptj": "1e-06"}.get(section.name.lower())
    if value is None:
        return []
    return [
        f"no layernorm_eps, so {value} as in FasterTransformer; "
        "if the model was trained with 1e-05, add layernorm_eps = 1e-05"
    ]


def _prompt_tables(
    path: Path, config: ModelConfig, reader: WeightReader
) -> tuple[list[PromptTable], int | None, list[str]]:
    """The tasks of prompt learning, prompt_learning_start_id, and notes. A task without a file keeps its
    number. Raises CheckpointError for a table of another length.
    """
    section, notes, tables = read_prompt_section(path, config), [], []
    if section.tasks and not any(task.kind for task in section.tasks):
        return [], None, ["prompt_learning_type is 0, so its tasks are left out"]
    known: set[str] = set()
    for task in section.tasks:
        spec = task_spec(task, config)
        files = reader.files(spec)
        if not task.length or not any(file.exists() for file in files):
            notes.append(f"the task {task.name} of prompt learning has no {spec.file_name(0)}")
            tables.append(PromptTable(task.name, (task.length, 0), None, task.kind))
            continue
        for file in files:
            if problem := reader.problem(file, spec):
                raise CheckpointError(problem)
        known.update(file.name for file in files)
        rows = prod(spec.shape) // task.length
        tables.append(
            PromptTable(task.name, (task.length, rows), partial(_read_task, reader, task, spec), task.kind)
        )
    patterns = ("model.prompt_table.*.bin", "model.prefix_prompt.*.bin")
    left = {entry.name for pattern in patterns for entry in path.glob(pattern)} - known
    if left:
        notes.append(
            f"no task of prompt learning names the files {', '.join(sorted(left))}; they are left out"
        )
    return tables, section.start_id if tables else None, notes


def _read_task(reader: WeightReader, task: PromptTask, spec: WeightSpec) -> Tensor:
    values = reader.read(spec)
    if task.kind == PREFIX_PROMPT:
        values = values.permute(3, 0, 1, 2, 4)
    return values.reshape(task.length, -1)
