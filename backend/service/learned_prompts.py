"""Learned prompts of a request's rows, and the positions of their virtual tokens among its ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.wire.messages import Limits
from tridecode.backend.wire.prompt_learning import MAX_TABLE_BYTES, P_TUNING, PREFIX_PROMPT, LearnedPrompt
from tridecode.backend.wire.prompt_tables import not_finite, virtual_ids


@dataclass(frozen=True)
class RowPrompt:
    """The learned prompt of one row.

    kind: one of TYPES. rows: number of rows of its table. start_id: with P_TUNING, the client's id of row 0.
    """

    learned: LearnedPrompt
    kind: int
    rows: int
    start_id: int


def place(
    ids: np.ndarray, prompt: RowPrompt, start_token: int, limits: Limits, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids that the client sees, ids of the engine), int64, for a row's ids (n,).

    P_TUNING: ids from start_id on are virtual; if a row has none, the whole table precedes it, as with the
    other types. start_token: for a row without ids. Raises RequestError for an id beyond the table.
    """
    if prompt.kind == P_TUNING and (virtual := ids >= prompt.start_id).any():
        rows = ids - prompt.start_id
        wrong = ids[virtual & (rows >= prompt.rows)]
        if wrong.size:
            first, last = prompt.start_id, prompt.start_id + prompt.rows - 1
            raise RequestError(
                f"{where} has the virtual token id {wrong[0]}; its prompt table has {prompt.rows} rows, the "
                f"ids {first} to {last}"
            )
        return ids[~virtual], np.where(virtual, limits.vocab_size + rows, ids)
    own = ids if len(ids) else np.array([start_token], np.int64)
    return ids, np.concatenate([virtual_ids(limits.vocab_size, prompt.rows), own])


def task_prompt(number: int, found: str, limits: Limits) -> RowPrompt:
    """Return the learned prompt of a task of the model.

    found: the beginning of the error, such as "prompt_learning_task_name_ids of row 0 is 7". Raises
    RequestError for a task that does not exist or cannot be served.
    """
    prompts = limits.prompts
    if not prompts.tasks:
        raise RequestError(f"{found}; wanted none: this model has no tasks (num_tasks in config.ini)")
    if not 0 <= number < len(prompts.tasks):
        names = ", ".join(task.name for task in prompts.tasks[:20])
        raise RequestError(f"{found}; wanted 0 to {len(prompts.tasks) - 1}, the tasks {names}")
    task = prompts.tasks[number]
    if task.fault:
        raise RequestError(f"{found}; the task {task.name} cannot be served: {task.fault}")
    return RowPrompt(
        LearnedPrompt(task=number), task.kind, task.length, prompts.start_id or limits.vocab_size
    )


def own_table(table: np.ndarray, kind: int, limits: Limits, where: str) -> LearnedPrompt:
    """Return the learned prompt of a request's own table.

    table: (rows, n) floats; n is the hidden size, or the prefix size for a kind of PREFIX_PROMPT. where: its
    name, for errors. Raises RequestError for another width, for too many bytes and for values that are not
    finite.
    """
    is_prefix = kind == PREFIX_PROMPT
    wanted = limits.prompts.prefix_size if is_prefix else limits.hidden_size
    if is_prefix and not wanted:
        raise RequestError(f"{where} is a prefix; the layers of this pruned model have different heads")
    if table.shape[1] != wanted:
        meaning = "layers * 2 * kv heads * head size" if is_prefix else "the hidden size"
        raise RequestError(f"{where} has {table.shape[1]:,} values a position; wanted {wanted:,}, {meaning}")
    if table.dtype != np.float16:
        with np.errstate(over="ignore"):
            table = table.astype(np.float32)
    if table.nbytes > MAX_TABLE_BYTES:
        raise RequestError(f"{where} has {table.nbytes:,} bytes; this model accepts {MAX_TABLE_BYTES:,}")
    wrong = not_finite(table, limits.prompts.largest)
    if wrong is not None:
        raise RequestError(
            f"{where} has the value {table[wrong]} at {list(wrong)}; wanted finite numbers up to "
            f"{limits.prompts.largest:g} (data_type in config.pbtxt)"
        )
    dtype = "fp16" if table.dtype == np.float16 else "fp32"
    little = table.astype(table.dtype.newbyteorder("<"), copy=False)
    return LearnedPrompt(is_prefix=is_prefix, rows=len(table), dtype=dtype, values=little.tobytes())
