"""One-pass heads: computes all drafts of a row from the hidden state that gave its newest token."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter, SampledStep
from tridecode.backend.engine.device.drafters.draws import DraftDraws
from tridecode.backend.engine.device.drafters.row_inputs import RowInputs
from tridecode.backend.engine.device.pending import Found
from tridecode.backend.engine.device.step_sampler import StepSampler
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.ranks.vocab_share import mask_padding
from tridecode.backend.engine.speculation.records import HEADS
from tridecode.backend.engine.step.decode_graphs import Capturer, no_collection
from tridecode.backend.engine.step.plan import StepPlan
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

    def first_outs(self, count: int) -> tuple[Linear, int]:
        """Return `outs` of the first `count` heads and the number of its heads, which is `depth` where the
        weight has a library's layout (fp32 on a CPU)."""
        weight = self.outs.dense
        if weight.is_mkldnn:
            return self.outs, self.depth
        rows = count * (weight.shape[0] // self.depth)
        return replace(self.outs, weight=weight[:rows]), count


class HeadsDrafter(DeviceDrafter):
    """Computes z_j = z + outs_j(silu(inner(rms(z), rms(e)))), j = 1 … depth; the target's head turns each z_j
    into the logits of one draft.

    z: the hidden state behind the target's final norm. e: the newest token's row of the word embedding.
    tools/train_draft/heads.py trains the weights. Each tensor rank computes all of z_j and, of the logits,
    its share of the vocabulary.
    """

    weights: HeadWeights

    def __init__(self, state: DeviceState, weights: HeadWeights, sampler: StepSampler, turns: int):
        config, device = state.config, state.device
        self.most_drafts, self.source = weights.depth, HEADS
        self._state, self.weights, self._sampler = state, weights, sampler
        self._draws = DraftDraws(state)
        self._logits = state.work.logits
        columns = self._logits.shape[1]
        #: rows of each head's logits are padded to a multiple of this: sampling needs 16-byte alignment
        self._multiple = 4 // math.gcd(columns, 4)
        rows = self._padded(config.slots)
        fewest = max(weights.depth * self._multiple, rows)
        if len(self._logits) < fewest:
            self._logits = torch.zeros(fewest, columns, device=device)
        # slots: -1 for padding. firsts: one less than the row's first sample. counted: of
        # StepSampler.counts. where, source: slots that get drafts, and the rows that these are taken from;
        # padding repeats row 0. keeps: see DraftDraws.take
        sizes = {
            "slots": (rows, np.int32),
            "keeps": (config.slots, np.int32),
            **{name: (rows, np.int64) for name in ("firsts", "counted", "where", "source")},
        }
        self._inputs = RowInputs(sizes, device, turns)
        #: the newest token of each row, and its hidden state
        self._newest = torch.zeros(rows, dtype=torch.int32, device=device)
        self._states = torch.zeros(rows, state.model_config.hidden_size, dtype=state.dtype, device=device)
        self._drawn = torch.zeros((weights.depth, rows), dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.replayed = 0

    def begin(self, plan: StepPlan) -> None:
        part = plan.part(Drafting)
        if part is not None:
            self._send(plan, part, self._padded_rows(len(part.rows), self._count(part)))

    @torch.inference_mode()
    def propose(self, step: SampledStep) -> Found | None:
        part = step.plan.part(Drafting)
        if part is None:
            return None
        count = self._count(part)
        self._draws.take_counts(step.plan.slots[part.rows])
        self._run(self._padded_rows(len(part.rows), count), count)
        return self.masked_drafts(step)

    def prepare(self, phase: Callable[[str], None]) -> None:
        """Capture a graph for each padded number of rows and number of drafts, on a GPU whose steps run as
        graphs."""
        state = self._state
        capture = Capturer(self._draft, phase, lambda: torch.cuda.synchronize(state.device))
        sizes = [rows for rows in ROWS if rows <= state.config.slots]
        if state.vocab is not None and not state.ranks.captures(self._states[: max(sizes)]):
            return
        self._send_empty(max(sizes))
        with no_collection():
            for rows in reversed(sizes):
                for count in range(self.weights.depth, 0, -1):
                    what = f"of {count} drafts of {rows} rows"
                    self._graphs[rows, count] = capture((rows, count), what)

    @torch.inference_mode()
    def rehearse(self, rows: int, drafts: int) -> None:
        count = min(drafts, self.weights.depth)
        padded = self._padded_rows(rows, count)
        self._send_empty(padded)
        self._run(padded, count)

    def _count(self, part: Drafting) -> int:
        return min(part.count, self.weights.depth)

    def _padded_rows(self, rows: int, count: int) -> int:
        """Return the rows of the graph for `rows` rows of `count` drafts, or `rows` if there is none."""
        place = bisect_left(ROWS, rows)
        has_graph = place < len(ROWS) and (ROWS[place], count) in self._graphs
        return ROWS[place] if has_graph else rows

    def _send(self, plan: StepPlan, part: Drafting, padded: int) -> None:
        """Send the inputs of the rows of a part."""
        host, rows, count = self._inputs.next(), part.rows, len(part.rows)
        host["slots"][:count] = host["where"][:count] = plan.slots[rows]
        host["firsts"][:count] = (np.cumsum(plan.samples) - plan.samples)[rows] - 1
        kept_all = self._sampler.kept_all
        # a decode row of a step that verifies keeps a prefix of its samples
        host["counted"][:count] = (
            np.where(rows < plan.num_decodes, rows, kept_all) if plan.queries else kept_all
        )
        host["source"][:count] = np.arange(count)
        host["keeps"][:] = 1
        host["keeps"][plan.slots[part.masked]] = 0
        self._pad(host, count, padded)

    def _send_empty(self, padded: int) -> None:
        """Send inputs of rows that have no slot."""
        host = self._inputs.next()
        host["where"][0] = 0
        host["keeps"][:] = 1
        self._pad(host, 0, padded)

    def _pad(self, host: dict[str, np.ndarray], count: int, padded: int) -> None:
        host["slots"][count:padded] = -1
        host["firsts"][count:padded] = -1
        host["counted"][count:padded] = self._sampler.kept_all
        host["where"][count:padded] = host["where"][0]
        host["source"][count:padded] = 0
        self._inputs.send()

    def _run(self, rows: int, count: int) -> None:
        graph = self._graphs.get((rows, count))
        if graph is None:
            self._draft((rows, count))
        else:
            graph.replay()
            self.replayed += 1

    @torch.inference_mode()
    def _draft(self, size: tuple[int, int]) -> None:
        """Write SamplingState.drafts for the first rows of the inputs. size: rows, and drafts of each."""
        rows, count = size
        state, sampler, own = self._state, self._sampler, self._inputs.device
        self._draws.take(own["keeps"])
        kept = sampler.counts.index_select(0, own["counted"][:rows]).clamp(min=1)
        samples = own["firsts"][:rows] + kept
        torch.index_select(state.work.last, 0, samples, out=self._states[:rows])
        torch.clamp(sampler.tokens.index_select(0, samples), min=0, out=self._newest[:rows])
        self._draw(rows, count)
        drawn = self._drawn[:count].index_select(1, own["source"][:rows])
        state.sampling.drafts[:, :count].index_copy_(0, own["where"][:rows], drawn.T)

    def _draw(self, rows: int, count: int) -> None:
        """Write _drawn for the first `rows` rows of _states and _newest."""
        state, ops = self._state, self._state.ops
        padded, slots = self._padded(rows), self._inputs.device["slots"][:rows]
        guesses = self._guesses(self._states[:padded], self._newest[:padded], count)
        step = self._heads_at_once(padded)
        for first in range(0, count, step):
            part = guesses[first : min(first + step, count)]
            logits = self._logits[: len(part) * padded]
            ops.linear(part.reshape(len(logits), -1), state.model.head, out=logits)
            mask_padding(logits, state.vocab)
            for number in range(len(part)):
                mine = logits[number * padded :][:rows]
                self._drawn[first + number, :rows] = self._draws.draw(mine, slots)

    def _guesses(self, z: Tensor, newest: Tensor, count: int) -> Tensor:
        """Return z_j of the first `count` heads or of all, (heads, n, C). z: (n, C) before the final norm.
        newest: (n,) int32."""
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
        outs, heads = weights.first_outs(count)
        added = z.new_empty(rows, heads * size)
        ops.linear(inner, outs, residual=z.repeat(1, heads), out=added)
        return added.view(rows, heads, size).transpose(0, 1)

    def _padded(self, rows: int) -> int:
        return -(-rows // self._multiple) * self._multiple

    def _heads_at_once(self, rows: int) -> int:
        """Return the number of heads whose logits are computed together for `rows` rows."""
        return min(self.weights.depth, max(1, len(self._logits) // rows))
