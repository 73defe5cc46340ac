"""A plan on the device: one packed int32 buffer, copied in one transfer, and a Batch of views into it.

The views of a padded decode batch have fixed addresses, so that a captured CUDA graph reads the next plan
from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        self.views: dict[str, tuple[int, int]] = {}
        offset = 0
        for name, size in sizes.items():
            self.views[name] = (offset, offset + size)
            offset += -(-size // _ALIGN) * _ALIGN
        self.total = offset


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
        self._turn = 0
        self.latest: Batch  # the newest batch
        #: token_ids, positions, kv_slots and context_lens of the newest batch: what Ops.place_rows writes
        self.placed: torch.Tensor

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
        packed = self._fill(layout, plan, plan.num_tokens, plan.num_rows)
        decodes = plan.num_decodes
        queries = np.diff(plan.query_starts[decodes:])
        return self._batch(
            layout,
            packed,
            plan.num_rows,
            num_decodes=decodes,
            max_query=int(queries.max(initial=0)),
            max_context=max(int(plan.context_lens.max()), 1),
            fresh=bool((plan.context_lens[decodes:] == queries).all()),
            queries=plan.queries,
            decode_tokens=int(plan.query_starts[decodes]),
        )

    def load_padded(self, plan: StepPlan, rows: int, max_context: int) -> Batch:
        """Load a plan of decode rows of one token, padded to `rows`.

        All plans of a size share the addresses.
        """
        layout = _Layout(rows, rows, rows, self.max_columns)
        packed = self._fill(layout, plan, rows, rows)
        return self._batch(
            layout, packed, rows, num_decodes=rows, max_query=0, max_context=max_context, fresh=False
        )

    def load_rows(self, plan: StepPlan, rows: int, queries: int, max_context: int) -> Batch:
        """Load a plan of decode rows of up to `queries` tokens that verifies, padded to rows * queries tokens
        of `rows` rows. All plans of a size share the addresses."""
        tokens = rows * queries
        layout = _Layout(tokens, rows, tokens, self.max_columns)
        packed = self._fill(layout, plan, tokens, rows)
        return self._batch(
            layout,
            packed,
            rows,
            num_decodes=rows,
            max_query=0,
            max_context=max_context,
            fresh=False,
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
        layout = _Layout(tokens, rows, rows, self.max_columns)
        packed = self._fill(layout, _spread(plan, shape.decodes), tokens, rows)
        return self._batch(
            layout,
            packed,
            rows,
            num_decodes=shape.decodes,
            max_query=shape.tokens,
            max_context=max_context,
            fresh=fresh,
        )

    def _fill(self, layout: _Layout, plan: StepPlan, tokens: int, rows: int) -> torch.Tensor:
        """Write the plan into the next host buffer and start its copy. Padded rows read and write nothing."""
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % len(self._host)
        words = host.numpy()

        def put(name: str, values: np.ndarray, padding: int) -> None:
            start, stop = layout.views[name]
            words[start : start + len(values)] = values
            words[start + len(values) : stop] = padding

        put("token_ids", plan.token_ids, 0)
        put("positions", plan.positions, 0)
        put("kv_slots", plan.kv_slots, -1)
        put("context_lens", plan.context_lens, 0)
        put("query_starts", plan.query_starts, int(plan.query_starts[-1]))
        sample_tokens, sample_slots = _samples(plan)
        put("sample_tokens", sample_tokens, 0)
        if plan.late:
            sample_slots = sample_slots.copy()
            sample_slots[plan.late] = -1  # a decode row with a late mask has one sample, as all before it
        put("sample_slots", sample_slots, -1)
        put("token_slots", plan.slots, -1)
        start, stop = layout.views["block_tables"]
        tables = words[start:stop].reshape(rows, -1)
        tables[: plan.num_rows, : plan.block_tables.shape[1]] = plan.block_tables
        tables[plan.num_rows :] = 0
        if self._device is None:
            return host
        self._device[: layout.total].copy_(host[: layout.total], non_blocking=True)
        return self._device

    def _batch(
        self,
        layout: _Layout,
        packed: torch.Tensor,
        rows: int,
        *,
        num_decodes: int,
        max_query: int,
        max_context: int,
        fresh: bool,
        queries: int = 0,
        decode_tokens: int = -1,
    ) -> Batch:
        self.placed = packed[: layout.views["context_lens"][1]]
        views: dict[str, Any] = {name: packed[start:stop] for name, (start, stop) in layout.views.items()}
        views["block_tables"] = views["block_tables"].view(rows, -1)
        self.latest = Batch(
            **views,
            num_decodes=num_decodes,
            max_query=max_query,
            max_context=max_context,
            fresh_prompts=fresh,
            decode_queries=max(queries, 1),
            decode_tokens=decode_tokens,
            verifies=queries > 0,
        )
        return self.latest


def _samples(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Return (R,) the index of each token that is sampled from, and (R,) its slot."""
    counts, last = plan.samples, plan.query_starts[1:] - 1
    if counts.max() > 1:
        ends = np.cumsum(counts)
        behind = np.repeat(ends, counts) - 1 - np.arange(ends[-1])  # distance to the row's last token
        return np.repeat(last, counts) - behind, np.repeat(plan.slots, counts)
    return (last, plan.slots) if counts.all() else (last[counts > 0], plan.slots[counts > 0])


def _spread(plan: StepPlan, decodes: int) -> StepPlan:
    """Return the plan with empty rows added after its decode rows, `decodes` of them in all."""
    first, gap = plan.num_decodes, decodes - plan.num_decodes
    if gap == 0:
        return plan

    def padded(values: np.ndarray, padding: int) -> np.ndarray:
        rows = np.full((gap, *values.shape[1:]), padding, values.dtype)
        return np.concatenate([values[:first], rows, values[first:]])

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
