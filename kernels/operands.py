"""The operands of a model's operations: weights, heads, cache and batch. Letters as in ops.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tridecode.kernels.formats.packed_weight import PackedWeight
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.sampling_state import MOST_DRAFTS


@dataclass(frozen=True)
class Norm:
    """LayerNorm (bias given) or RMSNorm (bias None). weight, bias: (C,), the dtype of the activations."""

    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class Linear:
    """weight: (out, in), bias: (out,) or None, as returned by `Ops.pack`: on CUDA the rows of weight are
    contiguous, on the CPU weight may have a library's layout. A quantised weight is a QuantizedWeight
    (quantized.py), on CUDA packed by packed_weight.py. activations: "int8" or "fp8" if `pack` has dequantised
    a weight whose GEMM quantises its input: each row of x, after the norm, is quantised to it first, with one
    scale or, if activation_group is not 0, one for each activation_group columns. is_head: whether this is
    the language model's head, if it stays quantised on CUDA. kind: how CUDA multiplies the weight, one of
    packing.KINDS.
    """

    weight: Tensor | QuantizedWeight | PackedWeight
    bias: Tensor | None = None
    activations: str = ""
    activation_group: int = 0
    is_head: bool = False
    kind: str = "dense"

    @property
    def dense(self) -> Tensor:
        """Return the weight, for implementations whose `pack` dequantises all weights."""
        assert isinstance(self.weight, Tensor), self.weight.format
        return self.weight


@dataclass(frozen=True)
class Rope:
    """cos, sin: (positions, size / 2) float32. The first `size` dimensions of a head are rotated, half
    against half (LLaMA, GPT-NeoX) or, interleaved, each even dimension against the next (GPT-J).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @property
    def size(self) -> int:
        return 2 * self.cos.shape[1]


@dataclass(frozen=True)
class Heads:
    """Attention heads of this rank. slopes: (H,) float32 ALiBi slopes or None; scale: factor of the scores,
    usually 1/sqrt(D). window: a query attends to this many tokens, itself included; 0: all before it.
    softcap: scores s become softcap * tanh(s / softcap) before ALiBi and mask; 0: no cap. qkv_limit: q, k and
    v are clamped to [-qkv_limit, qkv_limit]; 0: no clamp. query_norm, key_norm: norm of each head before the
    rotation; weight and bias (D,), or (H, D) and (K, D) if heads have their own. key_bias: (H, positions)
    float32, replaces slopes: added to the scores of the key at each position; the last column also applies
    beyond it.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    rope: Rope | None = None
    slopes: Tensor | None = None
    window: int = 0
    softcap: float = 0.0
    qkv_limit: float = 0.0
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    key_bias: Tensor | None = None

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    @property
    def changes_qkv(self) -> bool:
        """Return whether clamp or norms come between the QKV product and the rotary embedding."""
        return self.qkv_limit > 0 or self.query_norm is not None or self.key_norm is not None


@dataclass(frozen=True)
class CacheLayer:
    """One layer's paged cache. blocks: (N, 2, K, P, D), keys at [:, 0], values at [:, 1]; a slot is block * P
    + offset.

    The tokens of one head in one block are contiguous, so that one copy loads them. scales: (N, 2, K, P)
    float32 if blocks are int8 or float8_e4m3fn, as computed by kernels.formats.kv_rounding; None if they are
    X.
    """

    blocks: Tensor
    scales: Tensor | None = None

    @property
    def block_tokens(self) -> int:
        return self.blocks.shape[3]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors whose first axis is the N blocks, as views to copy and clear.

        8-bit blocks are returned as int8, since torch cannot index every type on a GPU.
        """
        return (self.blocks,) if self.scales is None else (self.blocks.view(torch.int8), self.scales)


@dataclass(frozen=True)
class AdapterTable:
    """The matrices of LoRA adapters for one GEMM, by slot.

    pairs: slot -> (a (R, in), b (R, out)), X, contiguous. entries: (S, 4) int64 at a fixed address for the
    CUDA kernel: a tridecode_adapter_pair per slot (csrc/api/adapters.h); a strided view of a larger tensor.
    ranks: an upper bound of R; 0: unknown.
    """

    entries: Tensor
    pairs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    ranks: int = 0


@dataclass(frozen=True)
class AdapterSlots:
    """The LoRA adapters of a step's tokens.

    slots: (T,) int32, the slot of each token, -1 for none. order: (T,) int32, the order in which
    Ops.add_adapters computes rows: those with adapters first, by slot; None: any. groups: (G, 2) int32, each
    slot of the tokens and where its rows begin in order, then -1 and the number of rows with an adapter in
    all further lines; None: not known.
    """

    slots: Tensor
    order: Tensor | None = None
    groups: Tensor | None = None

    def of(self, tokens: slice) -> AdapterSlots:
        """Return the adapters of a range of the tokens."""
        return AdapterSlots(self.slots[tokens])


#: tokens that a decode row may have, at most 16: decode attention loads all tiles of 16 tokens of a row but
#: the last two before the GEMM that writes the new tokens has ended
MOST_QUERIES = MOST_DRAFTS + 1
#: Maximum prefill tokens of a row, or padded prefill tokens of a step, for which attention of prompts with an
#: 8-bit cached prefix splits the keys of a row among blocks (csrc/attention/prefill/prefill_split.cuh).
FEW_TOKENS = 256
#: The same for a step with a 16-bit cache. With more tokens, one block per head and 128 queries fills a GPU
#: and is faster: 58 us against 88 for 4 rows of 60 tokens after 2,016 cached ones of BLOOM-7B1 on an H100.
FEW_EXACT_TOKENS = 128


@dataclass
class Batch:
    """One step as the device sees it. Rows are sequences: the first `num_decodes` decode, the others are
    prompts or chunks of them. Row b has the tokens query_starts[b] .. query_starts[b + 1] - 1. A decode row
    has one or, in a step that verifies proposed tokens, up to MOST_QUERIES. All index tensors are int32.

    A padded row of a graph has context_lens 0, slot -1 and kv_slots -1: it reads nothing and writes nothing.
    In a step that verifies, padded rows have no tokens, and padded tokens follow those of the rows.
    """

    token_ids: Tensor  # (T,)
    positions: Tensor  # (T,)
    kv_slots: Tensor  # (T,) cache slot to which each new token is written; -1: none
    block_tables: Tensor  # (B, M)
    context_lens: Tensor  # (B,) tokens in the cache after this step
    query_starts: Tensor  # (B + 1,)
    sample_tokens: Tensor  # (R,) index of each token whose logits are needed
    sample_slots: Tensor  # (R,) its batch slot
    num_decodes: int
    max_query: int  # longest prefill row, 0 if there is none
    max_context: int  # an upper bound of context_lens
    fresh_prompts: bool  # no prefill row has tokens in the cache from before this step
    decode_queries: int = 1  # tokens of the longest decode row, or an upper bound
    decode_tokens: int = -1  # of all decode rows, with padding; -1: one per row
    verifies: bool = False  # decode rows are placed and verified (Ops.place_rows, Ops.verify)
    #: (B,) batch slot of each row, also where sample_slots leaves a row out; None: as sample_slots
    token_slots: Tensor | None = None
    #: values derived once per step and used by several layers; every Batch has its own
    memo: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.decode_tokens < 0:
            self.decode_tokens = self.num_decodes

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.context_lens.shape[0]


@dataclass(frozen=True)
class DecoderLayer:
    """One pre-norm layer: x += dense(attention(attention_norm(x))); x += down(activation(up(mlp_norm(x)))).

    up: with "swiglu" its rows are gate rows, then up rows.
    """

    attention_norm: Norm
    qkv: Linear
    dense: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


class LinearOps(Protocol):
    """The operations of `Ops` that compute one product."""

    def add_normed(self, residual: Tensor, x: Tensor, norm: Norm | None) -> None: ...

    def linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> None: ...


class RankWords(Protocol):
    """The part of kernels.peer_sums.PeerSums with which GEMMs sum over the tensor ranks or send their part.

    chain_fields: fields of tridecode_chain_task, for the GEMMs of one launch; None if they cannot sum.
    """

    @property
    def chain_fields(self) -> Mapping[str, float] | None: ...

    def sent_fields(self, partial: Tensor) -> Mapping[str, float] | None:
        """Return the fields of tridecode_sent_gemm_task for the GEMM that computes `partial`; None: it cannot
        send.
        """
        ...


class RankOps(Protocol):
    """The part of kernels.ops.Ops for sums over the tensor ranks."""

    def linear_sending(self, x: Tensor, linear: Linear, sums: RankWords, *, out: Tensor) -> bool:
        """Compute `linear` without a bias, this rank's part of the next sum of `sums`, and send the part to
        the other rank, so that PeerSums.add_rows need not (`sent`).

        Returns False, with nothing done, if no kernel sends it.
        """
        ...


@dataclass(frozen=True)
class Product:
    """The arguments of one `Ops.linear`.

    stream: (rows, norm): first rows += norm(x), as `Ops.add_normed`; the product then reads these rows.
    over_ranks: out is this rank's part of a sum over the tensor ranks, which only `Ops.linears` computes; it
    may leave out as it was. The product that reads out has a stream, with a norm or None: rows += the sum.
    """

    x: Tensor
    linear: Linear
    out: Tensor
    norm: Norm | None = None
    activation: str | None = None
    residual: Tensor | None = None
    stream: tuple[Tensor, Norm | None] | None = None
    over_ranks: RankWords | None = None

    def compute(self, ops: LinearOps) -> None:
        """Compute `linear` of ops with these arguments."""
        x, norm, activation, residual = self.x, self.norm, self.activation, self.residual
        assert self.over_ranks is None, "a sum over the ranks"
        if self.stream is not None:
            ops.add_normed(self.stream[0], x, self.stream[1])
            x = self.stream[0]
        ops.linear(x, self.linear, norm=norm, activation=activation, residual=residual, out=self.out)
