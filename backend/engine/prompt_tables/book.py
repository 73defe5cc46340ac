"""Tracks the prompt-learning tables of requests, and what each step needs of them. Host only: no torch.

A task's table is on every rank from the start, under the task's number. A table that a request sends gets a
new number, is sent to the ranks once, with the first plan that admits its sequence, and is freed when the
sequence's group has ended. A preempted sequence is recomputed from the same table.

In the known tokens of a sequence the id vocab_size + i stands for row i (backend/wire/prompt_learning.py).
Embeddings take the place of the word embedding; a prefix is copied into the cache at admission, and the
computation starts after it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from tridecode.backend.base.errors import CapacityError, RequestError
from tridecode.backend.engine.prompt_tables.held_prompt import HeldPrompt
from tridecode.backend.engine.prompt_tables.plan import PrefixCopy, StepPrompts, TableUpload, VirtualTokens
from tridecode.backend.engine.schedule.sequence import Sequence, SequenceGroup
from tridecode.backend.wire.messages import Submit
from tridecode.backend.wire.prompt_learning import MAX_TABLE_BYTES, PREFIX_PROMPT, LearnedPrompt, PromptLimits
from tridecode.backend.wire.prompt_tables import TABLE_DTYPES, not_finite

#: bytes of the tables that one plan carries; a single table may be larger
_STEP_BYTES = MAX_TABLE_BYTES


class PromptBook:
    """Used by the loop's thread. max_bytes: limit for the tables of all open requests."""

    def __init__(
        self, limits: PromptLimits | None = None, hidden: int = 0, vocab: int = 0, max_bytes: int = 0
    ):
        self.limits, self._hidden, self._vocab = limits or PromptLimits(), hidden, vocab
        self._max_bytes = max_bytes
        self._open_bytes = 0
        self._next = len(self.limits.tasks)
        self._step = StepPrompts()
        self._step_bytes = 0
        self._has_news = False  # whether the next plan must carry something, virtual tokens aside

    # ------------------------------------------------------------ a request

    def check(self, prompt: np.ndarray, wanted: LearnedPrompt | None) -> int:
        """Return the rows of the prompt's table; 0 without one.

        Raises RequestError if it cannot be served.
        """
        if wanted is None:
            return 0
        if wanted.task >= 0:
            rows, is_prefix = self._task(wanted.task)
        else:
            rows, is_prefix = self._table(wanted), wanted.is_prefix
        if is_prefix:
            head = prompt[:rows]
            if len(prompt) <= rows or (head != np.arange(self._vocab, self._vocab + rows)).any():
                raise RequestError(
                    f"the prompt does not begin with the {rows} positions of its prefix, or has no token "
                    "after them"
                )
            if len(prompt) > rows and (prompt[rows:] >= self._vocab).any():
                raise RequestError("the prompt has a prefix position after other tokens")
        return rows

    def _task(self, number: int) -> tuple[int, bool]:
        tasks = self.limits.tasks
        if number >= len(tasks):
            raise RequestError(
                f"the prompt's task is {number}; this model has {len(tasks)} tasks (config.ini)"
            )
        task = tasks[number]
        if task.fault:
            raise RequestError(f"the prompt's task {number} ({task.name}) cannot be served: {task.fault}")
        return task.length, task.kind == PREFIX_PROMPT

    def _table(self, wanted: LearnedPrompt) -> int:
        width = self.limits.prefix_size if wanted.is_prefix else self._hidden
        item = TABLE_DTYPES.get(wanted.dtype)
        if not width or item is None:
            raise RequestError(f"this model takes no prompt table of {wanted.dtype[:20]}")
        size = len(wanted.values)
        if not 0 < size <= MAX_TABLE_BYTES or size != wanted.rows * width * item.itemsize:
            raise RequestError(
                f"the prompt table has {size:,} bytes; wanted {wanted.rows} rows of {width:,} values of "
                f"{wanted.dtype}, {MAX_TABLE_BYTES:,} bytes at most"
            )
        values = np.frombuffer(wanted.values, item).reshape(wanted.rows, width)
        wrong = not_finite(values, self.limits.largest)
        if wrong is not None:
            raise RequestError(
                f"the prompt table has the value {values[wrong]} in row {wrong[0]}; wanted finite numbers "
                f"up to {self.limits.largest:g}"
            )
        return wanted.rows

    def check_room(self, size: int, resumed: bool = False) -> None:
        """Raise CapacityError if `size` more bytes of tables do not fit now, RequestError if they never fit.

        resumed: an engine that is gone had accepted them, so twice the limit applies.
        """
        where = f"{self._max_bytes:,} (prompt_table_bytes in config.pbtxt)"
        if size > self._max_bytes:
            raise RequestError(f"the request has {size:,} bytes of prompt tables; this model accepts {where}")
        if self._open_bytes + size > self._max_bytes * (2 if resumed else 1):
            raise CapacityError(
                f"open requests have {self._open_bytes:,} bytes of prompt tables and this one has {size:,} "
                f"more; this model holds {where}; try again later"
            )

    def hold(self, group: SequenceGroup, wanted: LearnedPrompt | None) -> None:
        """Register a group before its sequences are planned; `release` ends this."""
        if wanted is None:
            return
        if wanted.task >= 0:
            rows, is_prefix = self._task(wanted.task)
            group.learned = HeldPrompt(wanted.task, is_prefix, rows, self._vocab)
            return
        size = len(wanted.values)
        self._open_bytes += size
        group.learned = HeldPrompt(
            self._next,
            wanted.is_prefix,
            wanted.rows,
            self._vocab,
            wanted.dtype,
            wanted.values,
            size,
            sent=False,
        )
        self._next += 1

    def release(self, group: SequenceGroup) -> None:
        """The group has ended."""
        held = group.learned
        if held is None or not held.size:
            return
        self._open_bytes -= held.size
        if held.sent:
            self._step.dropped.append(held.number)
            self._has_news = True
        held.values = b""

    # ------------------------------------------------------------ a plan

    def fits(self, group: SequenceGroup) -> bool:
        """Return whether this step has room for the group's table, if it must still be sent."""
        held = group.learned
        if held is None or held.sent or not self._step_bytes:
            return True
        return self._step_bytes + held.size <= _STEP_BYTES

    def admit(self, sequence: Sequence, block_tokens: int, cached: int) -> int:
        """Note that the sequence has its slot, its blocks and `cached` tokens in them.

        Returns the number of tokens including its prefix, which the step copies into the cache if it is
        missing.
        """
        held = sequence.group.learned
        if held is None:
            return cached
        if not held.sent:
            upload = TableUpload(held.number, held.is_prefix, held.rows, held.dtype, held.values)
            self._step.uploads.append(upload)
            self._step_bytes += held.size
            held.sent, held.values = True, b""
            self._has_news = True
        if not held.is_prefix or cached >= held.rows:
            return cached
        blocks = sequence.blocks[: -(-held.rows // block_tokens)]
        self._step.prefixes.append(PrefixCopy(held.number, list(blocks)))
        self._has_news = True
        return held.rows

    def take(
        self,
        chunks: Items[tuple[Sequence, int, int]],
        token_ids: np.ndarray,
        starts: np.ndarray,
        cleared: list[int],
        copies: list[tuple[int, int]],
    ) -> StepPrompts | None:
        """Return the prompt-learning part of the plan, or None; virtual tokens become id 0 in token_ids.

        chunks: (sequence, first, count); starts: (chunks + 1,) int32, the start of each in token_ids (T,).
        cleared: blocks that the plan sets to zero. copies: the plan's copies of blocks, whose sources must
        stay unchanged.
        """
        self._step.cleared = cleared
        for (sequence, _, _), start, stop in zip(chunks, starts, starts[1:]):
            if sequence.group.learned is None:
                continue
            ids = token_ids[start:stop]
            found = np.flatnonzero(ids >= self._vocab)
            if found.size:
                number, rows = sequence.group.learned.number, ids[found] - self._vocab
                self._step.virtual.append(VirtualTokens.of(number, found + start, rows))
                ids[found] = 0
        if not (self._has_news or self._step.virtual or cleared):
            return None
        step, self._step, self._step_bytes, self._has_news = self._step, StepPrompts(), 0, False
        if copies and step.cleared:
            sources = {source for source, _ in copies}
            step.cleared = [block for block in step.cleared if block not in sources]
        return step


def refuse_in_session(submit: Submit) -> None:
    """Raise RequestError for a table in a round of a session, whose tokens outlive the request and its
    table.
    """
    if any(sequence.learned is not None for sequence in submit.sequences):
        raise RequestError("the prompt has virtual tokens and is a round of a session; wanted one of them")


def vocabulary_tokens(sequence: Sequence) -> np.ndarray:
    """(n,) int32: the known tokens that have an id, for penalties and bad words."""
    known, held = sequence.known_tokens(), sequence.group.learned
    return known if held is None else known[known < held.vocab_size]


def ordinary_runs(sequence: Sequence, ids: np.ndarray) -> list[tuple[int, int]]:
    """Return (start, stop) of the runs of ids (n,) without virtual tokens, which have no log probability and
    whose logits are not returned.
    """
    held = sequence.group.learned
    if held is None:
        return [(0, len(ids))]
    ordinary = np.concatenate([[False], ids < held.vocab_size, [False]])
    edges = np.flatnonzero(ordinary[1:] != ordinary[:-1])
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
