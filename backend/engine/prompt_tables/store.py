"""The prompt-learning tables of one rank: tasks' tables, read at the start, and requests' tables.

Embeddings are stored on the ranks of the first pipeline stage, which embed the tokens; a prefix's keys and
values on the ranks that have their layers and heads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.base.errors import WeightFileError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.prompt_tables.plan import PrefixCopy, StepPrompts, TableUpload, VirtualTokens
from tridecode.backend.engine.ranks.parallel import ProcessRanks, SingleRank
from tridecode.backend.models.prompt_ini import PromptSection, prefix_spec, task_spec
from tridecode.backend.weights.layout import stage_layers
from tridecode.backend.weights.reader import WeightReader
from tridecode.backend.wire.prompt_learning import PREFIX_PROMPT, PromptLimits, PromptTask
from tridecode.backend.wire.prompt_tables import TABLE_DTYPES
from tridecode.kernels.formats.kv_rounding import rounded
from tridecode.kernels.operands import CacheLayer
from tridecode.kernels.ops import Ops

log = logging.getLogger("tridecode.engine")


@dataclass(frozen=True)
class PromptPlace:
    """This rank's share of a table. scale: the model's factor of its embeddings; a row of a table already
    contains it, as transformers' inputs_embeds do.
    """

    model: ModelConfig
    ranks: SingleRank | ProcessRanks
    dtype: torch.dtype
    device: torch.device
    scale: float = 1.0

    def embeddings(self, rows: Tensor) -> Tensor | None:
        """rows: (n, C) on the CPU -> the same on the device; None on a rank that embeds nothing."""
        if self.ranks.stage:
            return None
        return _on_device((rows.float() / self.scale).to(self.dtype), self.device)

    def prefix(self, rows: Tensor) -> Tensor:
        """rows: (n, layers, 2, K, D) of the whole model -> (n, L, 2, k, D) of this rank's L layers and k
        heads.
        """
        size, rank = self.ranks.tensor_size, self.ranks.tensor_rank
        start, stop = prefix_spec("prefix", self.model, len(rows)).slices(rank, size)[0]
        mine = stage_layers(self.model.num_layers, self.ranks.stage, self.ranks.num_stages)
        cut = rows[:, mine.start : mine.stop, :, start:stop]
        return _on_device(cut.to(self.dtype).contiguous(), self.device)


def prompt_limits(
    section: PromptSection, model: ModelConfig, dtype: torch.dtype, directory: Path | None
) -> PromptLimits:
    """Return the prompt-learning limits of this engine. directory: folder of the tables; None: the engine has
    no files. A task without a table stays listed, with its fault: FasterTransformer's samples declare such
    tasks, and task numbers must not change.
    """
    tasks = [
        PromptTask(task.name, task.length, task.kind, _fault(task, model, directory))
        for task in section.tasks
    ]
    row = 0 if model.layer_sizes else model.num_layers * 2 * model.num_kv_heads * model.head_size
    return PromptLimits(section.kind, section.start_id, tasks, row, float(torch.finfo(dtype).max))


def _fault(task: PromptTask, model: ModelConfig, directory: Path | None) -> str:
    if not task.kind:
        return "its prompt_learning_type is 0 (config.ini)"
    if not task.length:
        return "its prompt_length is 0 (config.ini)"
    if directory is None:
        return "this engine runs random weights"
    if task.kind == PREFIX_PROMPT and model.layer_sizes:
        return "the layers of this pruned model differ in heads, which a prefix cannot"
    file = task_spec(task, model).file_name(0)
    return "" if (directory / file).exists() else f"{file} is missing"


def load_tasks(reader: WeightReader, limits: PromptLimits, place: PromptPlace) -> PromptStore:
    """Return the tables of all tasks. Raises WeightFileError for a missing or damaged file."""
    store = PromptStore(place)
    for number, task in enumerate(limits.tasks):
        if task.fault:
            log.warning("prompt task %d (%s) is not served: %s", number, task.name, task.fault)
            continue
        spec = task_spec(task, reader.config)
        for path in reader.files(spec):
            problem = reader.problem(path, spec)
            if problem:
                raise WeightFileError(problem)
        table = reader.read(spec).float()
        if not torch.isfinite(table).all() or table.abs().max() > limits.largest:
            raise WeightFileError(f"{reader.files(spec)[0]} holds values that are not finite or do not fit")
        if task.kind == PREFIX_PROMPT:
            store.put_prefix(number, table.permute(3, 0, 1, 2, 4))
        else:
            store.put_embeddings(number, table)
        log.info("prompt task %d: %s, %d positions", number, task.name, task.length)
    return store


class PromptStore:
    """The tables of this rank, by number. Used by the thread that launches steps."""

    def __init__(self, place: PromptPlace):
        self._place = place
        self._embeddings: dict[int, Tensor] = {}  # (n, C)
        self._prefixes: dict[int, Tensor] = {}  # (n, L, 2, k, D)

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of all tables."""
        return sorted({*self._embeddings, *self._prefixes})

    def put_embeddings(self, number: int, rows: Tensor) -> None:
        table = self._place.embeddings(rows)
        if table is not None:
            self._embeddings[number] = table

    def put_prefix(self, number: int, rows: Tensor) -> None:
        self._prefixes[number] = self._place.prefix(rows)

    @torch.inference_mode()
    def prepare(self, prompts: StepPrompts, caches: Sequence[CacheLayer]) -> None:
        """Prepare the step: drop tables, clear blocks, upload tables, write prefixes."""
        for number in prompts.dropped:
            self._embeddings.pop(number, None)
            self._prefixes.pop(number, None)
        if prompts.cleared:
            blocks = _on_device(torch.tensor(sorted(set(prompts.cleared))), self._place.device)
            for cache in caches:
                for tensor in cache.tensors:
                    tensor[blocks] = 0
        for upload in prompts.uploads:
            self._put(upload)
        for copy in prompts.prefixes:
            self._copy(copy, caches)

    def _put(self, upload: TableUpload) -> None:
        model = self._place.model
        values = np.frombuffer(upload.values, TABLE_DTYPES[upload.dtype]).reshape(upload.rows, -1)
        rows = torch.from_numpy(values.copy())
        if upload.is_prefix:
            shape = (upload.rows, model.num_layers, 2, model.num_kv_heads, model.head_size)
            assert values.shape[1] == math.prod(shape[1:]), upload.number
            self.put_prefix(upload.number, rows.view(shape))
        else:
            self.put_embeddings(upload.number, rows)

    def _copy(self, copy: PrefixCopy, caches: Sequence[CacheLayer]) -> None:
        """Copy the prefix into the first positions of the blocks, (N, 2, k, P, D) per layer."""
        rows, size = self._prefixes[copy.number], caches[0].block_tokens
        places = np.arange(len(rows))
        blocks = _on_device(torch.from_numpy(np.asarray(copy.blocks)[places // size]), rows.device)
        offsets = _on_device(torch.from_numpy(places % size), rows.device)
        for layer, cache in enumerate(caches):
            written: tuple[Tensor, ...] = (rows[:, layer],)
            if cache.scales is not None:
                values, scales = rounded(rows[:, layer], cache.blocks.dtype)
                written = values.view(torch.int8), scales
            for held, new in zip(cache.tensors, written):
                held[blocks, :, :, offsets] = new

    def ops(self, ops: Ops, virtual: Iterable[VirtualTokens]) -> Ops:
        """Return the operations of a step with virtual tokens."""
        if self._place.ranks.stage or not virtual:
            return ops
        found = []
        for run in virtual:
            tokens, rows = (torch.from_numpy(part.astype(np.int64)) for part in run.indices())
            table = self._embeddings[run.number]
            picked = table[_on_device(rows, table.device)]
            found.append((_on_device(tokens, table.device), picked))
        tokens, rows = (torch.cat(parts) for parts in zip(*found))
        return cast(Ops, PromptedOps(ops, tokens, rows))


class PromptedOps:
    """kernels.ops.Ops for one step with virtual tokens: `embed` replaces rows of the word embedding by rows
    of tables.

    tokens: (n,) int64, indices of the step's tokens. rows: (n, C).
    """

    def __init__(self, ops: Ops, tokens: Tensor, rows: Tensor):
        self._ops, self._tokens, self._rows = ops, tokens, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def embed(
        self,
        token_ids: Tensor,
        table: Tensor,
        *,
        positions: Tensor | None = None,
        position_table: Tensor | None = None,
        first_id: int | None = None,
        factor: float = 1.0,
        out: Tensor,
    ) -> None:
        self._ops.embed(
            token_ids,
            table,
            positions=positions,
            position_table=position_table,
            first_id=first_id,
            factor=factor,
            out=out,
        )
        if first_id:  # the rows of all ranks are summed: the first rank adds those of the virtual tokens
            out[self._tokens] = 0
            return
        rows = self._rows
        if positions is not None and position_table is not None:
            at = positions[self._tokens].long()
            rows = (rows.float() + position_table[at].float()).to(out.dtype)
        out[self._tokens] = rows if factor == 1.0 else rows * factor


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return an asynchronous copy."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
