"""Prompt learning in a request: its tables and tasks, and where virtual tokens stand among its ids.

FasterTransformer's four inputs, and TensorRT-LLM's table of virtual ids. Values that FasterTransformer leaves
unchecked are checked here; an error names the field, what was found and what was wanted.
"""

from __future__ import annotations

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.service.learned_prompts import RowPrompt, own_table, place, task_prompt
from tridecode.backend.wire.messages import Limits
from tridecode.backend.wire.prompt_learning import NO_PROMPT, P_TUNING, TYPES

_TASKS = "prompt_learning_task_name_ids"
_EMBEDDING, _LENGTHS, _TYPE = "request_prompt_embedding", "request_prompt_lengths", "request_prompt_type"


# ---------------------------------------------------------------- FasterTransformer


def read_row_prompts(inputs: Inputs, batch: int, limits: Limits) -> list[RowPrompt | None]:
    """Return the learned prompt of each row, or None. The request's own tables take precedence over tasks."""
    names = (_EMBEDDING, _LENGTHS, _TYPE)
    sent = [name for name in names if name in inputs]
    if len(sent) == len(names):
        return _request_tables(inputs, batch, limits)
    if sent:
        missing = next(name for name in names if name not in inputs)
        raise RequestError(f"{missing} is missing; {' and '.join(sent)} was sent; wanted all three or none")
    if _TASKS in inputs:
        return [
            task_prompt(number, f"{_TASKS} of row {row} is {number}", limits)
            for row, number in enumerate(inputs.rows(_TASKS, batch))
        ]
    return [None] * batch


def _request_tables(inputs: Inputs, batch: int, limits: Limits) -> list[RowPrompt | None]:
    table = _batched(inputs.arrays[_EMBEDDING], _EMBEDDING, batch)
    lengths, kinds = inputs.rows(_LENGTHS, batch), inputs.rows(_TYPE, batch)
    start_id = limits.prompts.start_id or limits.vocab_size
    found: list[RowPrompt | None] = []
    for row, (length, kind) in enumerate(zip(lengths, kinds)):
        if kind not in TYPES:
            raise RequestError(
                f"{_TYPE} of row {row} is {kind}; wanted 0 (none), 1 (soft prompt), 2 (prefix prompt) or 3 "
                "(p-tuning)"
            )
        if not 0 <= length <= table.shape[1]:
            raise RequestError(
                f"{_LENGTHS} of row {row} is {length}; {_EMBEDDING} has {table.shape[1]} positions"
            )
        if kind == NO_PROMPT or length == 0:
            found.append(None)
            continue
        learned = own_table(table[row, :length], kind, limits, f"{_EMBEDDING} of row {row}")
        found.append(RowPrompt(learned, kind, length, start_id))
    return found


# ---------------------------------------------------------------- TensorRT-LLM


def read_virtual_tables(inputs: Inputs, batch: int, limits: Limits) -> list[RowPrompt | None]:
    """Return the prompt_embedding_table of each row, or None. The id vocab_size + i stands for its row i."""
    name, size_name = "prompt_embedding_table", "prompt_vocab_size"
    sizes = inputs.rows(size_name, batch)
    if name not in inputs:
        wrong = [size for size in sizes if size]
        if wrong:
            raise RequestError(f"{size_name} is {wrong[0]}, but {name} was not sent; wanted both or none")
        return [None] * batch
    table = _batched(inputs.arrays[name], name, batch)
    found: list[RowPrompt | None] = []
    for row, size in enumerate(sizes):
        rows = table.shape[1] if size is None else size
        if not 0 < rows <= table.shape[1]:
            raise RequestError(
                f"{size_name} of row {row} is {rows}; wanted 1 to {table.shape[1]}, the rows of {name}"
            )
        learned = own_table(table[row, :rows], P_TUNING, limits, f"{name} of row {row}")
        found.append(RowPrompt(learned, P_TUNING, rows, limits.vocab_size))
    return found


# ---------------------------------------------------------------- both


def _batched(table: np.ndarray, name: str, batch: int) -> np.ndarray:
    """Return (batch, P, n), also from (P, n) or (1, P, n), which apply to every row."""
    if table.ndim == 2:
        table = table[None]
    if table.ndim != 3 or table.shape[0] not in (1, batch) or table.dtype.kind != "f":
        raise RequestError(f"{name} has shape {list(table.shape)}; wanted [{batch}, positions, values]")
    return np.broadcast_to(table, (batch, *table.shape[1:]))


def place_rows(
    ids: np.ndarray,
    lengths: list[int],
    start_ids: list[int],
    prompts: list[RowPrompt | None],
    limits: Limits,
) -> tuple[np.ndarray, list[int], list[np.ndarray | None]]:
    """Apply `place` to the rows of input_ids (B, W).

    Returns the ids without virtual tokens, the lengths of the rows, and the engine's ids of each row that has
    a learned prompt. With p-tuning the width becomes that of the longest row, as in FasterTransformer's
    output.
    """
    placed: list[np.ndarray | None] = [None] * len(lengths)
    ids, lengths = ids.copy(), list(lengths)
    for row, prompt in enumerate(prompts):
        if prompt is not None:
            sent = ids[row, : lengths[row]]
            seen, placed[row] = place(sent, prompt, start_ids[row], limits, f"row {row} of input_ids")
            ids[row, : len(seen)], lengths[row] = seen, len(seen)
    if any(prompt is not None and prompt.kind == P_TUNING for prompt in prompts):
        ids = ids[:, : max(lengths)]
    return ids, lengths, placed
