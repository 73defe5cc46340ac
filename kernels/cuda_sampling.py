"""Sampling on an NVIDIA GPU: from a whole vocabulary, or from one that the tensor ranks of a host share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tridecode.kernels import scratch
from tridecode.kernels.checks import DtypeError, ShapeError, indices, match
from tridecode.kernels.draft_history import DraftHistory
from tridecode.kernels.gpu import Gpu, contiguous
from tridecode.kernels.library import KernelError
from tridecode.kernels.operands import MOST_QUERIES, Batch
from tridecode.kernels.peer_sums import PeerSums
from tridecode.kernels.sampling_state import SamplingState
from tridecode.kernels.top_log_probs import TopRows


@dataclass(frozen=True)
class SharedIds:
    """The ids of this rank: first .. first + count - 1 of vocab_size, in the first columns of its logits."""

    first: int
    count: int
    vocab_size: int


class CudaSampling:
    """`sample` of kernels.ops.Ops, and the same over several ranks."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._scratch: Tensor | None = None

    def reserve(self, max_rows: int, vocab_size: int) -> None:
        self._scratch = self._gpu.bytes(self._gpu.library.sample_scratch(max_rows, vocab_size))

    def sample(
        self, logits: Tensor, slots: Tensor, state: SamplingState, tokens: Tensor, log_probs: Tensor
    ) -> None:
        fields = self._sample_fields(logits, slots, state, tokens, log_probs)
        self._gpu.library.sample(self._gpu.stream, **fields)

    def verify(
        self,
        logits: Tensor,
        batch: Batch,
        state: SamplingState,
        tokens: Tensor,
        log_probs: Tensor,
        accepted: Tensor,
    ) -> None:
        """`verify` of kernels.ops.Ops."""
        rows, count = batch.num_decodes, batch.decode_tokens
        fields = self._sample_fields(logits, batch.sample_slots[:count], state, tokens, log_probs)
        if batch.decode_queries > MOST_QUERIES or accepted.shape != (rows,):
            raise ShapeError(
                f"verify: {rows} rows of up to {batch.decode_queries} tokens and accepted "
                f"{tuple(accepted.shape)}; wanted at most {MOST_QUERIES} tokens and ({rows},)"
            )
        given = (
            ("token_ids", batch.token_ids),
            ("query_starts", batch.query_starts),
            ("context_lens", batch.context_lens),
            ("accepted", accepted),
        )
        indices("verify", *given)
        fields |= {name: tensor.data_ptr() for name, tensor in given}
        self._gpu.library.verify(
            self._gpu.stream, lengths=state.lengths.data_ptr(), num_decodes=rows, **fields
        )

    def keep_raw_logits(self, logits: Tensor, slots: Tensor, state: SamplingState, rows: TopRows) -> None:
        """Implement kernels.top_log_probs.TopOps.keep_raw_logits."""
        self._gpu.library.keep_raw_logits(self._gpu.stream, self._top_fields(logits, slots, state, rows))

    def top_log_probs(
        self, logits: Tensor, slots: Tensor, state: SamplingState, tokens: Tensor, rows: TopRows
    ) -> None:
        """Implement kernels.top_log_probs.TopOps.top_log_probs."""
        match("top_log_probs", ("R", "slots", slots), ("R", "tokens", tokens))
        indices("top_log_probs", ("tokens", tokens))
        fields = self._top_fields(logits, slots, state, rows)
        self._gpu.library.top_log_probs(self._gpu.stream, {**fields, "tokens": tokens.data_ptr()})

    def _top_fields(
        self, logits: Tensor, slots: Tensor, state: SamplingState, rows: TopRows
    ) -> dict[str, float]:
        sizes = match("top_log_probs", ("RV", "logits", logits), ("R", "slots", slots))
        indices("top_log_probs", ("slots", slots), ("top", rows.top))
        contiguous("top_log_probs", ("top", rows.top), ("kept", rows.kept))
        if logits.dtype != torch.float32 or rows.kept.dtype != torch.float32:
            raise DtypeError(
                f"top_log_probs: logits are {logits.dtype}, kept {rows.kept.dtype}; wanted float32"
            )
        needed = scratch.top_log_probs_bytes(sizes["R"], sizes["V"])
        if rows.scratch.numel() < needed or rows.top.shape[0] < sizes["R"]:
            raise KernelError(
                f"top_log_probs: {sizes['R']} rows of {sizes['V']} logits need {needed:,} bytes; the buffers "
                f"hold {rows.top.shape[0]} rows and {rows.scratch.numel():,} bytes"
            )
        return {
            "logits": logits.data_ptr(),
            "slots": slots.data_ptr(),
            "state": state.slots.data_ptr(),
            "bad_ids": state.bad_ids.data_ptr(),
            "bad_ends": state.bad_ends.data_ptr(),
            "biases": state.biases.data_ptr(),
            "kept": rows.kept.data_ptr(),
            "top": rows.top.data_ptr(),
            "num_rows": sizes["R"],
            "vocab_size": sizes["V"],
            "bad_size": state.bad_ids.shape[1],
            "bias_size": state.biases.shape[1],
            "logits_stride": logits.stride(0),
            "kept_stride": rows.kept.stride(0),
            "scratch": rows.scratch.data_ptr(),
            "counters": self._gpu.counters.data_ptr(),
        }

    def look_up(
        self,
        history: DraftHistory,
        rows: Tensor,
        sampled: Tensor,
        accepted: Tensor,
        drafts: Tensor,
        searches: bool,
        found: Tensor,
    ) -> None:
        """`look_up` of kernels.ops.Ops."""
        given = {
            "tokens": history.tokens,
            "lengths": history.lengths,
            "scopes": history.scopes,
            "ring": history.ring,
            "ring_scopes": history.ring_scopes,
            "used": history.used,
            "rows": rows,
            "sampled": sampled,
            "accepted": accepted,
            "drafts": drafts,
            "found": found,
        }
        indices("look_up", *given.items())
        contiguous("look_up", *given.items())
        sizes = match("look_up", ("nc", "rows", rows), ("nc", "found", found), ("Sd", "drafts", drafts))
        if sizes["c"] != 3 or sizes["n"] > history.best.shape[0]:
            raise ShapeError(
                f"look_up: rows {tuple(rows.shape)} of {history.best.shape[0]} slots; wanted 3 columns, and "
                "one row per slot at most"
            )
        self._gpu.library.look_up(
            self._gpu.stream,
            best=history.best.data_ptr(),
            width=history.tokens.shape[1],
            num_rows=sizes["n"],
            num_drafts=sizes["d"],
            ring_size=history.ring.shape[0],
            searches=int(searches),
            **{name: tensor.data_ptr() for name, tensor in given.items()},
        )

    def sample_shared(
        self,
        logits: Tensor,
        slots: Tensor,
        state: SamplingState,
        ids: SharedIds,
        peers: PeerSums,
        tokens: Tensor,
        log_probs: Tensor,
    ) -> None:
        """Sample when each rank has the logits of its ids only: every rank gets the tokens of the whole rows.

        logits: (R, columns) float32 of this rank's ids; a multiple of 8 columns; those from ids.count on are
        padding. state: its counts (S, columns) cover this rank's ids; everything else covers the whole
        vocabulary and is the same on all ranks. peers: connected, with room for R rows (`sampled_rows`).
        Launched by every rank, in the same order, also within a graph. A rank that does not arrive is
        recorded as `lost` in peers. The log-sum-exp used by log_probs and by top-p without top-k is summed
                rank by rank, so its last bits may differ from those of `sample`; otherwise the results are
        the same.
        """
        fields = self._sample_fields(logits, slots, state, tokens, log_probs)
        columns = logits.shape[1]
        if (
            columns % 8
            or logits.stride(0) % 8
            or (ids.count and ids.first % 8)
            or not 0 <= ids.count <= columns
        ):
            raise ShapeError(
                f"sample_shared: {ids} in {columns} columns, stride {logits.stride(0)}; wanted multiples of 8"
            )
        if state.counts.shape[1] != columns:
            raise ShapeError(f"sample_shared: counts of {state.counts.shape[1]} ids; wanted {columns}")
        if logits.shape[0] > peers.sampled_rows:
            raise KernelError(
                f"sample_shared: {logits.shape[0]} rows; the peers exchange {peers.sampled_rows}"
            )
        fields |= peers.sampling_fields
        fields |= {
            "vocab_size": ids.count,
            "first_id": ids.first,
            "whole_vocab_size": ids.vocab_size,
            "counts_stride": columns,
        }
        self._gpu.library.sample(self._gpu.stream, **fields)

    def _sample_fields(
        self, logits: Tensor, slots: Tensor, state: SamplingState, tokens: Tensor, log_probs: Tensor
    ) -> dict[str, float]:
        sizes = match(
            "sample",
            ("RV", "logits", logits),
            ("R", "slots", slots),
            ("R", "tokens", tokens),
            ("R", "log_probs", log_probs),
        )
        indices("sample", ("slots", slots), ("tokens", tokens))
        if logits.dtype != torch.float32 or log_probs.dtype != torch.float32:
            raise DtypeError(
                f"sample: logits are {logits.dtype}, log_probs {log_probs.dtype}; wanted float32"
            )
        needed = self._gpu.library.sample_scratch(sizes["R"], sizes["V"])
        if self._scratch is None or self._scratch.numel() < needed:
            raise KernelError(
                f"sample: {sizes['R']} rows of {sizes['V']} logits need {needed:,} bytes; call reserve first"
            )
        return {
            "logits": logits.data_ptr(),
            "slots": slots.data_ptr(),
            "state": state.slots.data_ptr(),
            "last_tokens": state.last_tokens.data_ptr(),
            "history": state.history.data_ptr(),
            "counts": state.counts.data_ptr(),
            "bad_ids": state.bad_ids.data_ptr(),
            "bad_ends": state.bad_ends.data_ptr(),
            "masks": state.masks.data_ptr(),
            "biases": state.biases.data_ptr(),
            "tokens": tokens.data_ptr(),
            "log_probs": log_probs.data_ptr(),
            "num_rows": sizes["R"],
            "vocab_size": sizes["V"],
            "history_size": state.history.shape[1],
            "bad_size": state.bad_ids.shape[1],
            "mask_words": state.masks.shape[1],
            "bias_size": state.biases.shape[1],
            "logits_stride": logits.stride(0),
            "scratch": self._scratch.data_ptr(),
            "counters": self._gpu.counters.data_ptr(),
        }
