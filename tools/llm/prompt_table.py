"""Tables of prompt learning for `LLM` (docs/guides/prompt_learning.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.service.learned_prompts import RowPrompt, own_table, task_prompt
from tridecode.backend.wire.messages import Limits
from tridecode.backend.wire.prompt_learning import P_TUNING, PREFIX_PROMPT, SOFT_PROMPT

_KINDS = {"soft": SOFT_PROMPT, "prefix": PREFIX_PROMPT, "p-tuning": P_TUNING}


@dataclass(frozen=True)
class PromptTable:
    """Trained vectors of one prompt.

    values: (positions, hidden_size), or (positions, layers * 2 * kv heads * head size) for a prefix; an array
    of floats, or what numpy makes one of. kind: "soft": embeddings before the prompt; "prefix": keys and
    values in the cache before it; "p-tuning": embeddings instead of the ids from the vocabulary's size on,
    before a prompt that has no such id.
    """

    values: Any
    kind: str = "soft"


def row_prompt(table: PromptTable | str, limits: Limits) -> RowPrompt:
    """Return the engine's form of a table, or of the task with that name. Raises RequestError."""
    if isinstance(table, str):
        names = [task.name for task in limits.prompts.tasks]
        if names and table not in names:
            raise RequestError(f"prompt_table is {table!r}; wanted one of the tasks {', '.join(names[:20])}")
        return task_prompt(names.index(table) if names else 0, f"prompt_table is {table!r}", limits)
    if table.kind not in _KINDS:
        raise RequestError(f"kind of a prompt table is {table.kind!r}; wanted {', '.join(_KINDS)}")
    values = np.asarray(table.values)
    if values.ndim != 2 or values.dtype.kind != "f" or not len(values):
        raise RequestError(
            f"a prompt table has shape {list(values.shape)} and type {values.dtype}; wanted floats of shape "
            "[positions, values]"
        )
    kind = _KINDS[table.kind]
    learned = own_table(values, kind, limits, "a prompt table")
    return RowPrompt(learned, kind, len(values), limits.vocab_size)
