"""The operations on an NVIDIA GPU: check, then launch. Contracts are in ops.py, the kernels in csrc/.

Weights, norms, biases and rope tables are constants: kernels prefetch them before their predecessor has
finished. Code that changes a constant in place must synchronise the device before the next operation.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from tridecode.kernels.adapters.cuda import CudaAdapters
from tridecode.kernels.checks import DtypeError, ShapeError, indices, match, same_dtype
from tridecode.kernels.cuda_attention import CudaAttention
from tridecode.kernels.cuda_sampling import CudaSampling, SharedIds
from tridecode.kernels.draft_history import DraftHistory
from tridecode.kernels.formats.quantized import QuantizedWeight, check_int8_table
from tridecode.kernels.gemm.call import Call
from tridecode.kernels.gemm.gemms import Gemms
from tridecode.kernels.gpu import DTYPES, Gpu, contiguous, pointer
from tridecode.kernels.operands import (
    FEW_TOKENS,
    MOST_QUERIES,
    Batch,
    CacheLayer,
    Heads,
    Linear,
    Norm,
    Product,
    RankWords,
)
from tridecode.kernels.peer_sums import PeerSums
from tridecode.kernels.reference.sampling import beam_candidates
from tridecode.kernels.sampling_state import SamplingState, SlotRows
from tridecode.kernels.scratch import arena_bytes, expanded_bytes
from tridecode.kernels.top_log_probs import TopRows


class Cuda(CudaAdapters):
    """Every operation of kernels.ops.Ops. Used by one thread, for tensors of `device`.

    dependent_launch: let a kernel start before its predecessor ends (programmatic dependent launch, compute
    capability 9.0). None: on, unless TRIDECODE_DEPENDENT_LAUNCH=0.
    """

    def __init__(self, device: torch.device, dependent_launch: bool | None = None):
        self.gpu = Gpu(device, dependent_launch)
        self.gemms = Gemms(self.gpu)
        self._attention = CudaAttention(self.gpu)
        self._sampling = CudaSampling(self.gpu)
        self.fuses_adapters = self.gpu.capability >= 90  # the kernel uses clusters of blocks

    @property
    def most_linears_rows(self) -> int:
        return self.gemms.chain.most_rows

    @property
    def splits_steps(self) -> bool:
        return True

    def reserve(
        self,
        max_tokens: int,
        max_columns: int,
        max_rows: int,
        max_context: int,
        vocab_size: int,
        context_bytes: int = 0,
    ) -> None:
        for name, size in arena_bytes(max_tokens, max_columns, self.gemms.sorts_inputs).items():
            self.gpu.arena(name, size)
        if context_bytes:
            self.gpu.arena("expanded", expanded_bytes(context_bytes))
        self._sampling.reserve(max_rows, vocab_size)

    def captures(self, heads: Heads) -> bool:
        return True  # every attention kernel reads lengths and block tables on the device

    def captured_tokens(self, heads: Heads, cache: CacheLayer, dtype: torch.dtype) -> int:
        if cache.scales is None:
            return sys.maxsize
        return FEW_TOKENS if self._attention.splits(heads, cache, dtype) else 0

    def pack(self, linear: Linear, dtype: torch.dtype = torch.float32, is_head: bool = False) -> Linear:
        return self.gemms.pack(linear, dtype, is_head)

    def norm(self, x: Tensor, norm: Norm, *, out: Tensor) -> None:
        self.gpu.norm(x, norm, out)

    def add_normed(
        self,
        residual: Tensor,
        x: Tensor,
        norm: Norm | None,
        next_norm: Norm | None = None,
        *,
        normed: Tensor | None = None,
    ) -> None:
        self.gpu.add_normed(residual, x, norm, next_norm, normed)

    def soft_cap(self, x: Tensor, cap: float) -> None:
        match("soft_cap", ("RV", "x", x))
        contiguous("soft_cap", ("x", x))
        if x.dtype != torch.float32:
            raise DtypeError(f"soft_cap: x is {x.dtype}; wanted float32")
        if x.numel():
            self.gpu.library.soft_cap(x.data_ptr(), x.numel(), cap, self.gpu.stream)

    def linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> None:
        self.gemms.linear(Call(x, linear, out, norm, activation, residual))

    def linear_sending(self, x: Tensor, linear: Linear, sums: RankWords, *, out: Tensor) -> bool:
        return self.gemms.linear_sending(Call(x, linear, out), sums)

    def linears(self, products: Sequence[Product]) -> bool:
        return self.gemms.linears(products)

    def project_qkv(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        *,
        out: Tensor,
    ) -> None:
        self.gemms.project_qkv(Call(x, linear, out, norm), heads, batch, cache)

    def finish_qkv(self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer) -> None:
        self.gemms.finish_qkv(qkv, heads, batch, cache)

    def decode_attention(
        self,
        qkv: Tensor,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        *,
        out: Tensor,
        unfinished: Linear | None = None,
    ) -> None:
        self._attention.decode(qkv, heads, batch, cache, out, unfinished)

    def prefill_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        self._attention.prefill(qkv, heads, batch, cache, out)

    def sample(
        self, logits: Tensor, slots: Tensor, state: SamplingState, *, tokens: Tensor, log_probs: Tensor
    ) -> None:
        self._sampling.sample(logits, slots, state, tokens, log_probs)

    def verify(
        self,
        logits: Tensor,
        batch: Batch,
        state: SamplingState,
        *,
        tokens: Tensor,
        log_probs: Tensor,
        accepted: Tensor,
    ) -> None:
        self._sampling.verify(logits, batch, state, tokens, log_probs, accepted)

    @property
    def has_top_log_probs(self) -> bool:
        return True

    def keep_raw_logits(self, logits: Tensor, slots: Tensor, state: SamplingState, rows: TopRows) -> None:
        self._sampling.keep_raw_logits(logits, slots, state, rows)

    def top_log_probs(
        self, logits: Tensor, slots: Tensor, state: SamplingState, tokens: Tensor, rows: TopRows
    ) -> None:
        self._sampling.top_log_probs(logits, slots, state, tokens, rows)

    def look_up(
        self,
        history: DraftHistory,
        rows: Tensor,
        sampled: Tensor,
        accepted: Tensor,
        drafts: Tensor,
        *,
        searches: bool,
        found: Tensor,
    ) -> None:
        self._sampling.look_up(history, rows, sampled, accepted, drafts, searches, found)

    def sample_shared(
        self,
        logits: Tensor,
        slots: Tensor,
        state: SamplingState,
        ids: SharedIds,
        peers: PeerSums,
        *,
        tokens: Tensor,
        log_probs: Tensor,
    ) -> None:
        """Sample from a vocabulary that the tensor ranks share: see CudaSampling.sample_shared."""
        self._sampling.sample_shared(logits, slots, state, ids, peers, tokens, log_probs)

    def candidates(
        self, logits: Tensor, rows: Tensor, sequences: SlotRows, *, ids: Tensor, log_probs: Tensor
    ) -> None:
        beam_candidates(logits, rows, sequences, ids, log_probs)  # torch: no kernel yet

    def resolve_tokens(self, token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> None:
        indices("resolve_tokens", ("token_ids", token_ids), ("slots", slots), ("last_tokens", last_tokens))
        if slots.shape[0] > token_ids.shape[0]:
            raise ShapeError(f"resolve_tokens: {slots.shape[0]} slots, but {token_ids.shape[0]} tokens")
        self.gpu.library.resolve_tokens(
            token_ids.data_ptr(),
            slots.data_ptr(),
            last_tokens.data_ptr(),
            slots.shape[0],
            self.gpu.stream,
        )

    def place_rows(self, batch: Batch, state: SamplingState, block_tokens: int) -> None:
        count, tables = batch.decode_tokens, batch.block_tables
        arrays = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "kv_slots": batch.kv_slots,
            "context_lens": batch.context_lens,
            "block_tables": tables,
            "query_starts": batch.query_starts,
            "slots": batch.sample_slots,
            "last_tokens": state.last_tokens,
            "lengths": state.lengths,
            "drafts": state.drafts,
        }
        indices("place_rows", *arrays.items())
        if batch.decode_queries > MOST_QUERIES or batch.sample_slots.shape[0] < count:
            raise ShapeError(
                f"place_rows: rows of up to {batch.decode_queries} tokens and {batch.sample_slots.shape[0]} "
                f"slots of {count} tokens; wanted at most {MOST_QUERIES} tokens per row, and a slot for each"
            )
        contiguous("place_rows", ("block_tables", tables), ("drafts", state.drafts))
        self.gpu.library.place_rows(
            self.gpu.stream,
            **{name: tensor.data_ptr() for name, tensor in arrays.items()},
            table_stride=tables.stride(0),
            num_rows=batch.num_decodes,
            columns=tables.shape[1],
            block_tokens=block_tokens,
            num_drafts=state.drafts.shape[1],
        )

    def embed(
        self,
        token_ids: Tensor,
        table: Tensor | QuantizedWeight,
        *,
        positions: Tensor | None = None,
        position_table: Tensor | None = None,
        first_id: int | None = None,
        factor: float = 1.0,
        out: Tensor,
    ) -> None:
        scales = None
        if isinstance(table, QuantizedWeight):
            scales = check_int8_table("embed", table).scales
            table = table.values
        sizes = match("embed", ("VC", "table", table), ("TC", "out", out), ("T", "token_ids", token_ids))
        indices("embed", ("token_ids", token_ids))
        dtype = same_dtype("embed", ("out", out), *([("table", table)] if scales is None else []))
        contiguous("embed", ("table", table), ("out", out))
        if position_table is not None and positions is not None:
            match(
                "embed",
                ("TC", "out", out),
                ("PC", "position_table", position_table),
                ("T", "positions", positions),
            )
            indices("embed", ("positions", positions))
            same_dtype("embed", ("out", out), ("position_table", position_table))
            contiguous("embed", ("position_table", position_table))
        else:
            positions = position_table = None
        if scales is not None:
            contiguous("embed", ("table.scales", scales))
        self.gpu.library.embed(
            out.data_ptr(),
            token_ids.data_ptr(),
            table.data_ptr(),
            pointer(scales),
            pointer(positions),
            pointer(position_table),
            factor,
            sizes["T"],
            sizes["C"],
            first_id or 0,
            sizes["V"],
            DTYPES[dtype],
            self.gpu.stream,
        )

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        match("gather_rows", ("TC", "x", x), ("RC", "out", out), ("R", "rows", rows))
        indices("gather_rows", ("rows", rows))
        same_dtype("gather_rows", ("x", x), ("out", out))
        size = x.element_size()
        self.gpu.library.gather_rows(
            out.data_ptr(),
            x.data_ptr(),
            rows.data_ptr(),
            out.shape[0],
            out.shape[1] * size,
            x.stride(0) * size,
            out.stride(0) * size,
            self.gpu.stream,
        )
