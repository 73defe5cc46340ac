"""One-pass heads: computes all drafts of a row from the hidden state that gave its newest token."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter, SampledStep
from tridecode.backend.engine.device.drafters.draws import DraftDraws
from tridecode.backend.engine.device.pending import Found
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.ranks.vocab_share import mask_padding
from tridecode.backend.engine.speculation.records import HEADS
from tridecode.backend.engine.step.decode_graphs import Capturer, no_collection
from tridecode.backend.engine.step.query_graphs import ROWS
from tridecode.kernels.operands import Linear, Norm
from tridecode.kernels.ops import Ops

#: added to the mean square of the inputs
EPS = 1e-5


@dataclass(frozen=True)
class HeadWeights:
    """The tensors of one-pass heads in the engine's dtype and layout, the same on every tensor rank.

    inner: (F, 2C), of the normalised hidden state and the normalised embedding of the newest token. outs:
    (depth * C, F).
    """

    inner: Linear
    outs: Linear
    norm: Norm
    depth: int

    @classmethod
    def pack(
        cls, tensors: Mapping[str, Tensor], depth: int, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> HeadWeights:
        """Pack the tensors of a file with checked shapes. depth: number of heads to use, from the first
        on."""
        moved = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
        size = moved["hidden.weight"].shape[1]
        inner = torch.cat([moved["hidden.weight"], moved["token.weight"]], 1)
        return cls(
            ops.pack(Linear(inner, moved["hidden.bias"]), dtype),
            ops.pack(Linear(moved["outs.weight"][: depth * size].contiguous(), None), dtype),
            Norm(torch.ones(size, dtype=dtype, device=device), None, EPS),
            depth,
        )


class HeadsDrafter(DeviceDrafter):
    """Computes z_j = z + outs_j(silu(inner(rms(z), rms(e)))), j = 1 … depth; the target's head turns each z_j
    into the logits of one draft.

    z: the hidden state behind the target's final norm. e: the newest token's row of the word embedding.
    tools/train_draft/heads.py trains the weights. Each tensor rank computes all of z_j and, of the logits,
    its share of the vocabulary.
    """

    weights: HeadWeights

    def __init__(self, state: DeviceState, weights: HeadWeights):
        config, device = state.config, state.device
        self.most_drafts, self.source = weights.depth, HEADS
        self._state, self.weights = state, weights
        self._draws = DraftDraws(state)
        self._logits = state.work.logits
        columns = self._logits.shape[1]
        #: rows of each head's logits are padded to a multiple of this: sampling needs 16-byte alignment
        self._multiple = 4 // math.gcd(columns, 4)
        rows = self._padded(config.slots)
        fewest = max(weights.depth * self._multiple, rows)
        if len(self._logits) < fewest:
            self._logits = torch.zeros(fewest, columns, device=device)
        #: inputs of the graphs: the newest token of each row, its hidden state, its slot
        self._newest = torch.zeros(rows, dtype=torch.int32, device=device)
        self._states = torch.zeros(rows, state.model_config.hidden_size, dtype=state.dtype, device=device)
        self._slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._drawn = torch.zeros((weights.depth, rows), dtype=torch.int32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.replayed = 0

    @torch.inference_mode()
    def propose(self, step: SampledStep) -> Found | None:
        part = step.plan.part(Drafting)
        if part is None:
            return None
        rows, device = len(part.rows), self._state.device
        slots = step.plan.slots[part.rows]
        where = on_device(torch.from_numpy(slots.astype(np.int64)), device)
        samples = self._samples(step, part.rows)
        torch.index_select(self._state.work.last, 0, samples, out=self._states[:rows])
        torch.clamp(step.tokens.index_select(0, samples), min=0, out=self._newest[:rows])
        self._slots[:rows] = where
        self._draws.take(step.state, slots, step.plan.slots[part.masked])
        count = min(part.count, self.weights.depth)
        step.state.drafts[:, :count].index_copy_(0, where, self._run(rows)[:count].T)
        return self.masked_drafts(step)

    def prepare(self, phase: Callable[[str], None]) -> None:
        """Capture a graph for each padded number of rows, on a GPU whose steps run as graphs."""
        state = self._state
        capture = Capturer(self._draft, phase, lambda: torch.cuda.synchronize(state.device))
        sizes = [rows for rows in ROWS if rows <= state.config.slots]
        if state.vocab is not None and not state.ranks.captures(self._states[: max(sizes)]):
            return
        with no_collection():
            for rows in reversed(sizes):
                self._graphs[rows] = capture(rows, f"of the drafts of {rows} rows")

    @torch.inference_mode()
    def rehearse(self, rows: int, drafts: int) -> None:
        self._slots.fill_(-1)
        self._run(rows)

    def _samples(self, step: SampledStep, rows: np.ndarray) -> Tensor:
        """Return (n,) int64: for each of these rows of the plan, the sample that is its newest token."""
        plan, device = step.plan, self._state.device
        firsts = (np.cumsum(plan.samples) - plan.samples)[rows]
        found = on_device(torch.from_numpy(firsts.astype(np.int64)), device)
        if plan.queries:  # a decode row keeps a prefix of its samples
            decodes = int(np.searchsorted(rows, plan.num_decodes))
            kept = on_device(torch.from_numpy(rows[:decodes].astype(np.int64)), device)
            found[:decodes] += step.accepted.index_select(0, kept).clamp(min=1) - 1
        return found

    def _run(self, rows: int) -> Tensor:
        """Return the drafts of the first `rows` rows of the inputs, (depth, rows) int32."""
        place = bisect_left(ROWS, rows)
        graph = self._graphs.get(ROWS[place]) if place < len(ROWS) else None
        if graph is None:
            self._draft(rows)
        else:
            self._slots[rows : ROWS[place]] = -1
            graph.replay()
            self.replayed += 1
        return self._drawn[:, :rows]

    @torch.inference_mode()
    def _draft(self, rows: int) -> None:
        """Write _drawn for the first `rows` rows of the inputs."""
        state, ops, weights = self._state, self._state.ops, self.weights
        padded = self._padded(rows)
        guesses = self._guesses(self._states[:padded], self._newest[:padded])
        step = self._heads_at_once(padded)
        for first in range(0, weights.depth, step):
            part = guesses[first : first + step]
            logits = self._logits[: len(part) * padded]
            ops.linear(part.reshape(len(logits), -1), state.model.head, out=logits)
            mask_padding(logits, state.vocab)
            for number in range(len(part)):
                mine = logits[number * padded :][:rows]
                self._drawn[first + number, :rows] = self._draws.draw(mine, self._slots[:rows])

    def _guesses(self, z: Tensor, newest: Tensor) -> Tensor:
        """Return z_j of all heads, (depth, n, C). z: (n, C) before the final norm. newest: (n,) int32."""
        state, ops, weights = self._state, self._state.ops, self.weights
        model, (rows, size) = state.model, z.shape
        if model.final_norm is not None:
            normed = torch.empty_like(z)
            ops.norm(z, model.final_norm, out=normed)
            z = normed
        inputs = torch.empty_like(z), torch.empty_like(z)
        first_id = None if state.vocab is None else state.vocab.first
        ops.embed(newest, model.embedding, first_id=first_id, out=inputs[1])
        if first_id is not None:
            state.ranks.all_reduce(inputs[1])
        ops.norm(inputs[1], weights.norm, out=inputs[1])
        ops.norm(z, weights.norm, out=inputs[0])
        inner = z.new_empty(rows, weights.inner.weight.shape[0])
        ops.linear(torch.cat(inputs, 1), weights.inner, activation="silu", out=inner)
        added = z.new_empty(rows, weights.depth * size)
        ops.linear(inner, weights.outs, residual=z.repeat(1, weights.depth), out=added)
        return added.view(rows, weights.depth, size).transpose(0, 1)

    def _padded(self, rows: int) -> int:
        return -(-rows // self._multiple) * self._multiple

    def _heads_at_once(self, rows: int) -> int:
        """Return the number of heads whose logits are computed together for `rows` rows."""
        return min(self.weights.depth, max(1, len(self._logits) // rows))
