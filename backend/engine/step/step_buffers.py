"""A plan on the device: one packed int32 buffer, copied in one transfer, and a Batch of views into it.

The views of a padded decode batch have fixed addresses, so that a captured CUDA graph reads the next plan
from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tridecode.backend.engine.step.plan import StepPlan
from tridecode.kernels.operands import Batch

_ALIGN = 4  # int32 words: every view is aligned to 16 bytes


class _Layout:
    """Offsets, in int32 words, of a batch's arrays in the packed buffer."""

    def __init__(self, tokens: int, rows: int, samples: int, columns: int):
        sizes = {
            "token_ids": tokens,
            "positions": tokens,
            "kv_slots": tokens,
            "context_lens": rows,
            "query_starts": rows + 1,
            "sample_tokens": samples,
            "sample_slots": samples,
            "token_slots": rows,
            "block_tables": rows * columns,
        }
        self.rows = rows
        self.views: dict[str, tuple[int, int]] = {}
        offset = 0
        for name, size in sizes.items():
            self.views[name] = (offset, offset + size)
            offset += -(-size // _ALIGN) * _ALIGN
        self.total = offset

    def arrays(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays in a host buffer."""
        found = {name: words[start:stop] for name, (start, stop) in self.views.items()}
        found["block_tables"] = found["block_tables"].reshape(self.rows, -1)
        return found


@dataclass
class _Padded:
    """The views of a padded size, made once: slicing takes as long as filling. host: of each host buffer.
    batches: by host buffer on a CPU, one on a GPU."""

    layout: _Layout
    host: list[dict[str, np.ndarray]]
    batches: dict[int, Batch] = field(default_factory=dict)


@dataclass(frozen=True)
class StepShape:
    """The padded size of a prefill step."""

    decodes: int  # decode rows of one token
    tokens: int  # of prompts
    rows: int  # of prompts


class StepBuffers:
    """The packed buffer on the device, and a ring of host buffers so that a copy in flight is not
    overwritten.
    """

    RING = 4

    def __init__(
        self, max_tokens: int, max_rows: int, max_columns: int, device: torch.device, ring: int = RING
    ):
        """ring: number of host buffers, greater than the number of plans in flight."""
        words = _Layout(max_tokens, max_rows, max_rows, max_columns).total
        self.max_columns, self.device = max_columns, device
        pinned = device.type == "cuda"
        self._host = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(ring)]
        self._device = torch.zeros(words, dtype=torch.int32, device=device) if pinned else None
        self._words = [host.numpy() for host in self._host]
        self._padded: dict[tuple[Any, ...], _Padded] = {}
        self._turn = 0
        self.latest: Batch  # the newest batch

    @property
    def words(self) -> torch.Tensor | None:
        """The buffer on a GPU, which begins with the token ids of each batch; None on a CPU."""
        return self._device

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffer on a GPU."""
        return self._host[0].nbytes

    def load(self, plan: StepPlan) -> Batch:
        """Load the plan without padding, for a step that is launched operation by operation."""
        layout = _Layout(plan.num_tokens, plan.num_rows, plan.num_samples, plan.block_tables.shape[1])
        self._fill(layout, layout.arrays(self._next_words()), plan)
        decodes = plan.num_decodes
        queries = np.diff(plan.query_starts[decodes:])
        self.latest = self._batch(
            layout,
            num_decodes=decodes,
            max_query=int(queries.max(initial=0)),
            max_context=max(int(plan.context_lens.max()), 1),
            fresh=bool((plan.context_lens[decodes:] == queries).all()),
            queries=plan.queries,
            decode_tokens=int(plan.query_starts[decodes]),
        )
        return self.latest

    def load_padded(self, plan: StepPlan, rows: int, max_context: int) -> Batch:
        """Load a plan of decode rows of one token, padded to `rows`.

        All plans of a size share the addresses.
        """
        return self._load(plan, rows, rows, rows, num_decodes=rows, max_context=max_context)

    def load_rows(self, plan: StepPlan, rows: int, queries: int, max_context: int) -> Batch:
        """Load a plan of decode rows of up to `queries` tokens that verifies, padded to rows * queries tokens
        of `rows` rows. All plans of a size share the addresses."""
        tokens = rows * queries
        return self._load(
            plan,
            tokens,
            rows,
            tokens,
            num_decodes=rows,
            max_context=max_context,
            queries=queries,
            decode_tokens=tokens,
        )

    def load_mixed(self, plan: StepPlan, shape: StepShape, max_context: int, fresh: bool = False) -> Batch:
        """Load a plan with prompts, padded to `shape`, into which it must fit. All plans of a shape share
        their addresses.

        Decode rows have one token. Every row has one sample, or none if its prompt is not complete.
        fresh: whether the prompts of all plans of the shape have no cached tokens (Batch.fresh_prompts).
        """
        tokens, rows = shape.decodes + shape.tokens, shape.decodes + shape.rows
        return self._load(
            _spread(plan, shape.decodes),
            tokens,
            rows,
            rows,
            num_decodes=shape.decodes,
            max_query=shape.tokens,
            max_context=max_context,
            fresh=fresh,
        )

    def _load(self, plan: StepPlan, tokens: int, rows: int, samples: int, **fields: Any) -> Batch:
        """Load a plan, padded to a size. fields: arguments of `_batch`."""
        key = (tokens, rows, samples, *fields.items())
        padded = self._padded.get(key)
        if padded is None:
            layout = _Layout(tokens, rows, samples, self.max_columns)
            padded = self._padded[key] = _Padded(layout, [layout.arrays(words) for words in self._words])
        self._next_words()
        self._fill(padded.layout, padded.host[self._turn], plan)
        place = self._turn if self._device is None else 0
        batch = padded.batches.get(place)
        if batch is None:
            batch = padded.batches[place] = self._batch(padded.layout, **fields)
        batch.memo.clear()  # notes of operations about an earlier plan
        self.latest = batch
        return batch

    def _next_words(self) -> np.ndarray:
        """Take the next host buffer."""
        self._turn = (self._turn + 1) % len(self._host)
        return self._words[self._turn]

    def _fill(self, layout: _Layout, arrays: dict[str, np.ndarray], plan: StepPlan) -> None:
        """Write the plan into the newest host buffer and start its copy. Padded rows read and write
        nothing."""
        _put(arrays["token_ids"], plan.token_ids, 0)
        _put(arrays["positions"], plan.positions, 0)
        _put(arrays["kv_slots"], plan.kv_slots, -1)
        _put(arrays["context_lens"], plan.context_lens, 0)
        _put(arrays["query_starts"], plan.query_starts, plan.query_starts[-1])
        sample_tokens, sample_slots = _samples(plan)
        _put(arrays["sample_tokens"], sample_tokens, 0)
        if plan.late:
            sample_slots = sample_slots.copy()
            sample_slots[plan.late] = -1  # a decode row with a late mask has one sample, as all before it
        _put(arrays["sample_slots"], sample_slots, -1)
        _put(arrays["token_slots"], plan.slots, -1)
        tables = arrays["block_tables"]
        tables[: plan.num_rows, : plan.block_tables.shape[1]] = plan.block_tables
        tables[plan.num_rows :] = 0
        if self._device is not None:
            host = self._host[self._turn]
            self._device[: layout.total].copy_(host[: layout.total], non_blocking=True)

    def _batch(
        self,
        layout: _Layout,
        *,
        num_decodes: int,
        max_context: int,
        max_query: int = 0,
        fresh: bool = False,
        queries: int = 0,
        decode_tokens: int = -1,
    ) -> Batch:
        """Return a batch of views of the newest buffer."""
        packed = self._host[self._turn] if self._device is None else self._device
        views: dict[str, Any] = {name: packed[start:stop] for name, (start, stop) in layout.views.items()}
        views["block_tables"] = views["block_tables"].view(layout.rows, -1)
        return Batch(
            **views,
            num_decodes=num_decodes,
            max_query=max_query,
            max_context=max_context,
            fresh_prompts=fresh,
            decode_queries=max(queries, 1),
            decode_tokens=decode_tokens,
            verifies=queries > 0,
        )


def _put(array: np.ndarray, values: np.ndarray, padding: int) -> None:
    count = len(values)
    array[:count] = values
    if count < len(array):
        array[count:] = padding


def _samples(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Return (R,) the index of each token that is sampled from, and (R,) its slot."""
    counts, last = plan.samples, plan.query_starts[1:] - 1
    if plan.queries and plan.num_decodes == plan.num_rows:  # each token of a decode row
        return np.arange(plan.num_tokens), np.repeat(plan.slots, counts)
    if counts.max() > 1:
        ends = np.cumsum(counts)
        behind = np.repeat(ends, counts) - 1 - np.arange(ends[-1])  # distance to the row's last token
        return np.repeat(last, counts) - behind, np.repeat(plan.slots, counts)
    return (last, plan.slots) if counts.all() else (last[counts > 0], plan.slots[counts > 0])


def pad_decodes(values: np.ndarray, num_decodes: int, decodes: int, padding: int) -> np.ndarray:
    """Return values with padding behind the first num_decodes, so that `decodes` come before the prompts."""
    rows = np.full((decodes - num_decodes, *values.shape[1:]), padding, values.dtype)
    return np.concatenate([values[:num_decodes], rows, values[num_decodes:]])


def _spread(plan: StepPlan, decodes: int) -> StepPlan:
    """Return the plan with empty rows added after its decode rows, `decodes` of them in all."""
    first, gap = plan.num_decodes, decodes - plan.num_decodes
    if gap == 0:
        return plan

    def padded(values: np.ndarray, padding: int) -> np.ndarray:
        return pad_decodes(values, first, decodes, padding)

    prompts = plan.query_starts[first + 1 :] + gap
    return replace(
        plan,
        token_ids=padded(plan.token_ids, 0),
        positions=padded(plan.positions, 0),
        kv_slots=padded(plan.kv_slots, -1),
        block_tables=padded(plan.block_tables, 0),
        context_lens=padded(plan.context_lens, 0),
        query_starts=np.concatenate([np.arange(decodes + 1, dtype=np.int32), prompts]),
        slots=padded(plan.slots, -1),
        samples=padded(plan.samples, 0),
        num_decodes=decodes,
    )
