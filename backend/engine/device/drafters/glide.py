"""Drafts with a GLIDE layer: a decoder layer that attends to its own cache and to the target's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.draft_weights import FIRST
from tridecode.backend.engine.device.drafters.glide_layer import GlideLayer, mlp_columns
from tridecode.backend.engine.device.drafters.sequential_drafter import SequentialDrafter
from tridecode.backend.engine.device.step_sampler import StepSampler
from tridecode.backend.engine.speculation.records import GLIDE
from tridecode.backend.models.context import Context, Rows, Workspace
from tridecode.backend.models.layers import add_linears, attention
from tridecode.kernels.operands import Batch


class GlideDrafter(SequentialDrafter):
    """Drafts with DeviceState.trained, a GLIDE layer between the target's embedding and final norm.

    Self-attention reads the layer's own cache. These keys and values depend only on token ids and positions,
    so steps with prompts compute them without attention. Cross-attention reads the target's cache of one
    layer, which holds neither the newest token nor the drafts; a query is rotated to the position of its own
    token. Both attentions use the heads, rotary table, slopes and window of the target's layer.

    sampler, step_ids, turns: as for SequentialDrafter.
    """

    weights: GlideLayer

    def __init__(self, state: DeviceState, sampler: StepSampler, step_ids: torch.Tensor | None, turns: int):
        assert state.trained is not None and state.config.max_step_tokens is not None
        config, info, ranks = state.config, state.trained.info, state.ranks
        self.most_drafts, self.source = min(info.depth, config.max_draft_tokens), GLIDE
        place = ranks.tensor_rank, ranks.tensor_size
        self.weights = GlideLayer.load(state.trained, state.ops, state.dtype, state.device, *place)
        self._work = _workspace(state)
        super().__init__(state, sampler, step_ids, self._work.hidden, turns)
        target = state.model.heads[info.layer]
        self._heads = replace(target, qkv_limit=0.0, query_norm=None, key_norm=None)
        self._target, self._own = info.layer, len(state.model.layers) + len(state.draft_layers)
        shape = 2, target.num_kv_heads, config.block_tokens, target.head_size
        state.draft_layers.append(shape)
        #: embedded tokens of steps with prompts
        self._embedded = torch.zeros_like(state.work.hidden)
        #: number of tokens in the target's cache, for each row that gets drafts
        self._seen = torch.zeros(config.slots, dtype=torch.int32, device=state.device)
        self._rows = torch.arange(config.slots + 1, dtype=torch.int32, device=state.device)
        self._nowhere = torch.full((config.slots,), -1, dtype=torch.int32, device=state.device)

    def _read(self, batch: Batch) -> None:
        state, layer = self._state, self.weights
        context, x = Context(state.ops, state.ranks, state.work, batch), self._embedded[: batch.num_tokens]
        state.model.embed(context, x)
        out, cache = context.parts("qkv", self._heads.qkv_size).whole, state.caches[self._own]
        state.ops.project_qkv(x, layer.qkv, layer.attention_norm, self._heads, batch, cache, out=out)

    def _logits(self, batch: Batch) -> Tensor:
        state, layer = self._state, self.weights
        tokens, rows = batch.decode_queries, batch.num_rows
        context, x = Context(state.ops, state.ranks, self._work, batch), self._hidden[: batch.num_tokens]
        state.model.embed(context, x)
        entry = Rows(x, layer.attention_norm)
        attended = attention(context, entry, layer.qkv, self._heads, state.caches[self._own])
        if tokens > 1:  # earlier tokens of a row only need their keys and values
            x, attended = (part[tokens - 1 :: tokens].contiguous() for part in (x, attended))
        if tokens == FIRST:  # the row's length includes the newest token, which the target has not read
            torch.clamp(batch.context_lens[:rows] - 1, min=0, out=self._seen[:rows])
        return self._finish(self._last_tokens(batch), x, attended)

    def _last_tokens(self, batch: Batch) -> Batch:
        """Return the last token of each row as a batch that writes no keys and reads the target's cache."""
        tokens, rows = batch.decode_queries, batch.num_rows
        return replace(
            batch,
            positions=batch.positions[tokens - 1 :: tokens].contiguous(),
            sample_slots=batch.sample_slots[tokens - 1 :: tokens].contiguous(),
            token_ids=batch.token_ids[tokens - 1 :: tokens].contiguous(),
            kv_slots=self._nowhere[:rows],
            context_lens=self._seen[:rows],
            query_starts=self._rows[: rows + 1],
            sample_tokens=self._rows[:rows],
            decode_queries=1,
            decode_tokens=rows,
            memo={},
        )

    def _finish(self, batch: Batch, x: Tensor, attended: Tensor) -> Tensor:
        """Run the layer from the self-attention's output on; return the logits. x: (R, C), residual stream,
        overwritten. attended: (R, H * D)."""
        state, layer, heads, cache = self._state, self.weights, self._heads, self._state.caches[self._target]
        ops, context = state.ops, Context(state.ops, state.ranks, self._work, batch)
        rows = add_linears(context, x, (attended, layer.dense), norm=layer.cross_norm)
        queries = context.parts("context", heads.num_heads * heads.head_size).whole
        ops.linear(rows.x, layer.cross_query, norm=rows.norm, out=queries)
        qkv = context.parts("qkv", heads.qkv_size).whole  # only its queries are read
        qkv[:, : queries.shape[1]].copy_(queries)
        if heads.rope is not None:
            ops.finish_qkv(qkv, heads, batch, cache)
        ops.decode_attention(qkv, heads, batch, cache, out=queries)
        rows = add_linears(context, x, (queries, layer.cross_dense), norm=layer.mlp_norm)
        mlp = context.mlp(layer)
        ops.linear(rows.x, layer.up, norm=rows.norm, activation="swiglu", out=mlp)
        add_linears(context, x, (mlp, layer.down))
        return state.model.logits(context, x)


def _workspace(state: DeviceState) -> Workspace:
    """Return the activation buffers of a drafting forward; it shares the target's logits buffer."""
    assert state.trained is not None
    info, config, size = state.trained.info, state.config, state.ranks.tensor_size
    layer = replace(state.model_config.of_layer(info.layer), mlp_size=mlp_columns(info, size) * size)
    tokens, rows = FIRST * config.slots, config.slots
    own = Workspace.allocate(layer, tokens, rows, size, state.dtype, state.device, 1)
    return replace(own, logits=state.work.logits)
