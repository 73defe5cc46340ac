"""The contracts of a model's operations. operands.py has the types of their arguments, reference/ defines
their results, cuda.py is the fast implementation.

Letters: T tokens of this step (all sequences, concatenated), B sequences, H query heads, K key/value heads
(of this rank), D head size, C hidden size, F MLP size, V vocabulary, S batch slots, N cache blocks, P tokens
of a block, M block-table columns. Every operation writes into `out`, never synchronises, and is safe inside
CUDA graph capture; scratch memory belongs to the implementation and is reserved once with `reserve`. All
tensors of a call are on one device. Shapes, dtypes and layouts are checked before anything is launched:
ShapeError, DtypeError, LayoutError (kernels.checks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tridecode.kernels.adapters.operation import AdapterOps
from tridecode.kernels.draft_history import DraftHistory
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.operands import Batch, CacheLayer, Heads, Linear, Norm, Product, RankOps
from tridecode.kernels.sampling_state import SamplingState, SlotRows
from tridecode.kernels.top_log_probs import TopOps


class Ops(AdapterOps, RankOps, TopOps, Protocol):
    """Every operation. Activations, weights and cache share one dtype X: float32, float16 or bfloat16; the
    cache may be in 8 bits instead, with scales.
    """

    @property
    def most_linears_rows(self) -> int:
        """Return the maximum rows of x that `linears` accepts; 0: none."""
        ...

    @property
    def splits_steps(self) -> bool:
        """Return whether `linear` accepts a part of a step's tokens; False if rows have adapters."""

    def reserve(
        self,
        max_tokens: int,
        max_columns: int,
        max_rows: int,
        max_context: int,
        vocab_size: int,
        context_bytes: int = 0,
    ) -> None:
        """Allocate scratch for calls of up to max_tokens rows of max_columns, attention of up to max_rows
        sequences over max_context tokens, and sampling of max_rows rows. Called once, before the first
        step.

        context_bytes: bytes of max_context keys and values of a layer in X, in whole blocks, if the cache has
        8 bits; else 0.
        """
        ...

    def captures(self, heads: Heads) -> bool:
        """Return whether attention of these heads may be captured in a CUDA graph."""
        ...

    def captured_tokens(self, heads: Heads, cache: CacheLayer, dtype: torch.dtype) -> int:
        """Return the maximum prefill tokens, with padding, of a CUDA graph whose prompts have cached tokens
        (Batch.fresh_prompts is False). dtype: X.
        """
        ...

    def pack(self, linear: Linear, dtype: torch.dtype = torch.float32, is_head: bool = False) -> Linear:
        """Return the same linear with its weight in this implementation's fastest layout; called once, at
        load.

        weight: (out, in), contiguous along either axis, on the operations' device. dtype: X, to which a
        quantised weight is dequantised if the implementation does not read it directly. is_head: whether this
        is the language model's head, which has few rows: no scratch memory is reserved to dequantise it. The
        result may share its memory.
        """
        ...

    def resolve_tokens(self, token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> None:
        """Replace token_ids[i] < 0 by last_tokens[slots[i]] (0 if slots[i] < 0), for i < len(slots): the
        token that the last step sampled and the host has not read yet.

        token_ids: (T,) int32, changed in place. slots: (B',) int32, B' <= T. last_tokens: (S,) int32.
        """
        ...

    def place_rows(self, batch: Batch, state: SamplingState, block_tokens: int) -> None:
        """Complete decode rows whose tokens, positions or lengths only the device knows; in place.

        Let row b have n tokens, t = query_starts[b] + i its token i and s = sample_slots[t], which is the
        row's slot for all of them. token_ids[t] < 0 becomes state.last_tokens[s] if i = 0, else
        state.drafts[s, i - 1]; 0 if s < 0. Where context_lens[b] < 0, let p = state.lengths[s] + i: p is
        added to positions[t], which holds the shift of the rotary table, kv_slots[t] becomes the place of p
        in the row's blocks (-1 beyond block_tables), and context_lens[b] becomes state.lengths[s] + n. Other
        values stay. block_tokens: P.
        """
        ...

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
        """out[t] = factor * (table[token_ids[t]] (+ position_table[positions[t]])).

        first_id: the table holds the rows of V ids from this one on, and out[t] is 0 for other ids; None: it
        holds the rows of all ids. token_ids, positions: (T,) int32. table: (V, C) X, or int8 with a scale for
        each row. position_table: (positions, C) X. out: (T, C) X. The sum is computed in float32. The engine
        checks that ids are in range when a request arrives.
        """
        ...

    def norm(self, x: Tensor, norm: Norm, *, out: Tensor) -> None:
        """LayerNorm or RMSNorm of each row, statistics in float32.

        x, out: (T, C) X, rows contiguous; out may be x. LayerNorm: (x - mean) / sqrt(var + eps) * weight +
        bias, the variance of the centred row. RMSNorm: x / sqrt(mean(x^2) + eps) * weight.
        Sources: Ba et al. 2016; Zhang and Sennrich 2019, equation 4. Agrees with
        torch.nn.functional.layer_norm and transformers' LlamaRMSNorm.
        """
        ...

    def add_normed(
        self,
        residual: Tensor,
        x: Tensor,
        norm: Norm | None,
        next_norm: Norm | None = None,
        *,
        normed: Tensor | None = None,
    ) -> None:
        """residual += norm(x), then normed = next_norm(residual) of the rounded sum.

        residual, x, normed: (T, C) X, rows contiguous; normed may be x. norm None: x is added as it is.
        next_norm and normed are given together. Norms as in `norm`.
        """
        ...

    def soft_cap(self, x: Tensor, cap: float) -> None:
        """x = cap * tanh(x / cap), in place. x: (R, V) float32, contiguous. cap: above 0."""
        ...

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
        """out = activation(norm(x) @ weight.T + bias) + residual, products and sums in float32.

        x: (T, in) X. weight: (O, in) X or quantised. residual: (T, O) X, may be out. out: (T, O) X, or
        float32 for the language model's head; it may not be x. activation: None, "gelu_tanh", "gelu" (erf),
        "relu", "silu" or, gated, "swiglu", "geglu_tanh" or "geglu", where weight holds O / 2 gate rows and
        then O / 2 up rows and out is (T, O / 2): silu (gelu_tanh, gelu) of the gate * up.
        """
        ...

    def linears(self, products: Sequence[Product]) -> bool:
        """Compute `linear` of each, in this order, in one launch if this implementation has one that is
        faster; else return False and change nothing. A linear may read the whole output of an earlier one,
        and may first add x to a residual stream (Product.stream).
        """
        ...

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
        """out = norm(x) @ weight.T + bias as (T, q | k | v), clamped to heads.qkv_limit; each head of q and k
        goes through heads.query_norm and key_norm and is rotated if heads.rope is given; k and v are also
        written to the cache at batch.kv_slots (not if that is -1).

        x: (T, C) X. weight: ((H + 2K) * D, C) X, rows q, k, v, heads-major. out: (T, (H + 2K) * D) X, holding
        the rotated q, the rotated k and v; with an 8-bit cache, k and v are the dequantised values.
        Rotation in float32 at batch.positions.
        Source: Su et al. 2021; agrees with transformers' apply_rotary_pos_emb.
        """
        ...

    def finish_qkv(self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer) -> None:
        """Finish qkv in place as project_qkv does after its GEMM: clamp, norms, rotation, quantisation for an
        8-bit cache; write keys and values to the cache. Used if something, such as LoRA deltas, is added to
        the GEMM first.

        qkv: (T, (H + 2K) * D) X, rows contiguous.
        """
        ...

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
        """Causal attention of the decode rows over their cached tokens. Query i of the n of row b, the first
        H * D columns of qkv[query_starts[b] + i], stands at position context_lens[b] - n + i. It sees the
        tokens up to itself, or the last heads.window of them.

        qkv: (decode_tokens, (H + 2K) * D) X, rows contiguous. out: (decode_tokens, H * D) X. A row with
        context_lens 0 gets zeros; rows of out without a decode row stay. decode_queries is at most
        MOST_QUERIES. Scores are scale * q.k, with heads.softcap, + slopes[h] * (j - position) or
        key_bias[h, j]; softmax in float32;
        query head h reads kv head h // (H / K). Sources: Vaswani et al. 2017; Press et al. 2022 (ALiBi).

        unfinished: set if qkv is the bare GEMM output; the batch then has only decode rows. finish_qkv is
        applied first, and qkv is undefined afterwards.
        """
        ...

    def prefill_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        """Causal attention of the rows from num_decodes on: query i of row b has position context_lens[b] -
        its query count + i and attends to the cached tokens up to itself.

        qkv: (T - decode_tokens, (H + 2K) * D) X, its k and v columns as project_qkv wrote them, so that fresh
        prompts need not read the cache. out: (T - decode_tokens, H * D) X. Otherwise like decode_attention.
        """
        ...

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        """out[i] = x[rows[i]]. x: (T, C), rows: (R,) int32, out: (R, C) of the dtype of x."""
        ...

    def sample(
        self, logits: Tensor, slots: Tensor, state: SamplingState, *, tokens: Tensor, log_probs: Tensor
    ) -> None:
        """Choose the next token of each row and update the state.

        logits: (R, V) float32, overwritten. slots: (R,) int32; rows with slot -1 are skipped. tokens: (R,)
        int32 and log_probs: (R,) float32, written for every other row; log_probs is 0 unless
        return_log_probs is set.

        Parameters are fields of sampling_state.h. In this order: biases are added to the logits of their ids;
        in slots that are `masked`, ids whose bits in the slot's mask are 0 become impossible, and so do the
        last ids of matching bad words, and each id that would complete a second occurrence of
        no_repeat_ngram_size ids of the history (0: none); logits are divided by temperature (0: not divided);
        ids with counts > 0 get the repetition penalty (x < 0: x * r, else x / r), then minus presence, minus
        frequency * count; all of end_ids are impossible while generated < min_tokens; log_probs is the log-
        softmax, over the whole vocabulary, of these logits, in which impossible ids have no probability.
        top_k 1 or temperature 0 is greedy: the largest logit, lowest id first. Otherwise: ids below the
        largest logit + log(min_p) are dropped (min_p 0 drops none), and those below the top_k-th largest
        logit (ties stay; top_k 0 drops none), then the smallest set of most likely ids whose probability
        within the rest reaches top_p_now is kept (ties stay), then the set of the ids whose logit is nearest
        to the mean logit of what is left, whose probability within that reaches typical_p (ties stay; 1 drops
        none), and of these the largest logit + g wins, where g = -log(-log1p(-u)) and u comes from the slot's
        seed: word (id % 4) of Philox-4x32-10 with the halves of seed as key, the low one first, and counter
        (id / 4, generated, 0, 0), as (word + 0.5) / 2^32 (u near 0 decides who wins, and there float32 is
        precise enough). The answer thus depends only on the sequence itself. Where the largest logit is +inf,
        or one is NaN, the token is BROKEN_LOGITS; where every id is impossible, it is NO_TOKEN. log_prob is
        then 0, and the state continues as if id 0 had been drawn.

        Then, for the token t: last_tokens = t; generated += 1; with bad words or n-grams, history grows by t
        (a full history no longer); counts[t] += 1, up to 32767, with penalties that are not neutral; with
        top_p_decay < 1, top_p_now = top_p if t is top_p_reset_id, else max(top_p_now * top_p_decay,
        top_p_min).
        Sources: FasterTransformer's sampling layers for the order; Meister et al. 2022 for typical_p; Gumbel
        1954 and Salmon et al. 2011 for the draw.
        """
        ...

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
        """Choose a token behind each token of the decode rows, keep those of each row up to the first that
        differs from the row's next token, and update the state.

        logits: (N, V) float32 behind the N = decode_tokens tokens, overwritten. The first N of
        batch.sample_slots are their slots; no two rows have the same one. The token at i of a row is the one
        that `sample` would choose if the row's tokens 1 .. i had been sampled before: number generated + i
        of the random generator, and so on for every parameter. accepted: (num_decodes,) int32, 1 more than
        the number of leading tokens that equal the row's next one; 0 for a row without tokens or of slot -1.
        tokens: (N,) int32 and log_probs: (N,) float32 as of `sample` for the first accepted[b] tokens of row
        b, undefined behind them. The state becomes what `sample` makes of these tokens one after another,
        and state.lengths[slot] becomes context_lens[b] - n + accepted[b] for a row of n tokens.
        Source: Leviathan et al. 2023, with a deterministic draft: a draw depends on nothing but the sequence
        and its seed, so that accepted tokens are those of one token a step.
        """
        ...

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
        """Append a step's tokens to the histories of its slots, and draft what followed the longest earlier
        occurrence of their newest tokens.

        rows: (n, 3) int32, for each row its slot, the index of its first sample in `sampled`, and the index
        in `accepted` of the number of samples that it keeps; -1: it keeps one. A row of slot -1 finds
        nothing; no two others have the same slot. Tokens beyond the width of history.tokens are dropped. An
        occurrence ends before the newest token, in the history or in the part of the ring whose scope is one
        of the slot's, and has LEAST_MATCH tokens or more; more than MOST_MATCH count as MOST_MATCH. Among
        equally long ones the history goes before the ring, and the later before the earlier. drafts[slot]:
        (S, num_drafts) int32, the tokens behind it. Where the history ends they repeat; where an answer ends,
        and without an occurrence, they are 0. found: (n, 3) int32, columns MATCHED, SOURCE and AGREED:
        whether drafts[slot, 0] was the first new token before. searches: False: the tokens are appended, and
        nothing is found.
        Source: Saxena 2023, prompt lookup decoding.
        """
        ...

    def candidates(
        self, logits: Tensor, rows: Tensor, sequences: SlotRows, *, ids: Tensor, log_probs: Tensor
    ) -> None:
        """Return the most likely next tokens of some rows, most likely first, for beam search.

        logits: (R, V) float32, unchanged. rows: (n,) int64, of the logits. sequences: their n slots,
        unchanged. ids: (n, W) int32 and log_probs: (n, W) float32, W <= V. The logits of a row are processed
        as in `sample`, and log_probs is their log-softmax over the whole vocabulary: minus infinity where all
        ids are impossible, NaN where a logit is NaN or plus infinity. The order of equal ones is undefined.
        May allocate; is not part of a captured graph.
        """
        ...
