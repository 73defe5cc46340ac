"""What the families share: a transformer's state on one rank, attention over the paged cache, and the head.

Letters as in kernels.ops. A model holds weights and calls operations; it allocates nothing in a step: every
buffer comes from `Workspace`, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tridecode.backend.config import ModelConfig, RopeConfig, check_tensor_size
from tridecode.kernels.ops import Batch, CacheLayer, DecoderLayer, Heads, Linear, Norm, Ops, Rope


class Weights(Protocol):
    """Where a model gets its tensors from: this rank's shard, on the device, in the engine's dtype."""

    def tensor(self, name: str) -> Tensor: ...

    def linear(self, name: str, bias: bool) -> Linear:
        """`<name>.weight` as (out, in), with `<name>.bias`."""
        ...

    def fused_linear(self, names: list[str], bias: bool) -> Linear:
        """The linears of `names` stacked along their outputs."""
        ...

    def head(self, weight: Tensor) -> Linear:
        """The language model's head over `weight` (V, C), which may be the word embedding itself."""
        ...

    def norm(self, name: str, eps: float, bias: bool) -> Norm: ...


class Ranks(Protocol):
    """This rank's place in the tensor-parallel group and the pipeline."""

    tensor_rank: int
    tensor_size: int
    stage: int
    num_stages: int

    def all_reduce(self, x: Tensor) -> None:
        """Sum x over the tensor group, in place, in rank order, so that every rank holds the same bits."""
        ...

    def receive(self, x: Tensor) -> None:
        """Fill x (T, C) with what the stage before sent."""
        ...

    def send(self, x: Tensor) -> None: ...


@dataclass
class Workspace:
    """Activations of one step, allocated once for the longest: rows of max_tokens, columns as the rank needs
    them."""

    hidden: Tensor  # (T, C) the residual stream
    qkv: Tensor  # (T, (H + 2K) * D)
    context: Tensor  # (T, H * D)
    mlp: Tensor  # (T, F)
    delta: Tensor  # (T, C) a tensor rank's partial sums
    last: Tensor  # (R, C) rows whose logits are wanted
    logits: Tensor  # (R, V) float32

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        max_tokens: int,
        max_rows: int,
        tensor_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Workspace:
        def empty(rows: int, columns: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(rows, columns, dtype=kind, device=device)

        queries = config.num_heads * config.head_size // tensor_size
        keys = config.num_kv_heads * config.head_size // tensor_size
        return cls(
            hidden=empty(max_tokens, config.hidden_size),
            qkv=empty(max_tokens, queries + 2 * keys),
            context=empty(max_tokens, queries),
            mlp=empty(max_tokens, config.mlp_size // tensor_size),
            delta=empty(max_tokens if tensor_size > 1 else 0, config.hidden_size),
            last=empty(max_rows, config.hidden_size),
            logits=empty(max_rows, config.vocab_size, torch.float32),
        )


@dataclass(frozen=True)
class Context:
    """What every layer of a step is given."""

    ops: Ops
    ranks: Ranks
    work: Workspace
    batch: Batch

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens


def attention(
    context: Context, x: Tensor, qkv: Linear, norm: Norm, heads: Heads, cache: CacheLayer
) -> Tensor:
    """(T, H * D): causal attention of norm(x) over the cache, which it extends."""
    ops, batch, work = context.ops, context.batch, context.work
    tokens, decodes = batch.num_tokens, batch.num_decodes
    projected, out = work.qkv[:tokens], work.context[:tokens]
    ops.project_qkv(x, qkv, norm, heads, batch, cache, out=projected)
    if decodes:
        ops.decode_attention(projected[:decodes], heads, batch, cache, out=out[:decodes])
    if decodes < tokens:
        ops.prefill_attention(projected[decodes:], heads, batch, cache, out=out[decodes:])
    return out


def add_linear(context: Context, x: Tensor, linear: Linear, residual: Tensor) -> None:
    """residual += x @ weight.T + bias, the partial products of the tensor ranks summed first."""
    if context.ranks.tensor_size == 1:
        context.ops.linear(x, linear, residual=residual, out=residual)
        return
    delta = context.work.delta[: context.num_tokens]
    # the bias is whole on every rank: only the first adds it
    partial = linear if context.ranks.tensor_rank == 0 else Linear(linear.weight)
    context.ops.linear(x, partial, out=delta)
    context.ranks.all_reduce(delta)
    residual.add_(delta)


def run_at_once(
    context: Context,
    x: Tensor,
    layers: Sequence[DecoderLayer],
    heads: Heads,
    activation: str,
    caches: Sequence[CacheLayer],
) -> bool:
    """All layers of a small step in one launch, where the operations have one and no rank waits for
    another."""
    if context.ranks.tensor_size > 1:
        return False
    return context.ops.decoder_layers(x, layers, heads, activation, context.batch, caches)


def logits(context: Context, x: Tensor, norm: Norm, head: Linear) -> Tensor:
    """(R, V) float32 logits of the rows that the batch wants."""
    rows = context.batch.sample_tokens
    last, out = context.work.last[: rows.shape[0]], context.work.logits[: rows.shape[0]]
    context.ops.gather_rows(x, rows, out=last)
    context.ops.linear(last, head, norm=norm, out=out)
    return out


def alibi_slopes(num_heads: int) -> Tensor:
    """(num_heads,) float32 slopes of Press et al. 2022, with the two-part rule where num_heads is no power of
    two.

    2^(-8/n), 2^(-16/n), ... for the largest power of two n <= num_heads, then every other slope of the
    sequence for 2n.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-8.0 * (2 * i + 1) / (2 * power)) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


def rope_table(rope: RopeConfig, num_positions: int, device: torch.device) -> Rope:
    """cos and sin of every position, float32, computed in float32 as transformers does."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        frequencies = _llama3_frequencies(frequencies, rope)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return Rope(angles.cos().to(device), angles.sin().to(device))


def _llama3_frequencies(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended (transformers' llama3
    rule)."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(between, blended, scaled)


def make_heads(
    config: ModelConfig, ranks: Ranks, rope: Rope | None = None, slopes: Tensor | None = None
) -> Heads:
    """This rank's share of the heads; slopes are of all heads and are cut here. ConfigError if they cannot be
    shared."""
    check_tensor_size(config, ranks.tensor_size)
    num_heads = config.num_heads // ranks.tensor_size
    if slopes is not None:
        slopes = slopes[ranks.tensor_rank * num_heads : (ranks.tensor_rank + 1) * num_heads].contiguous()
    return Heads(
        num_heads=num_heads,
        num_kv_heads=config.num_kv_heads // ranks.tensor_size,
        head_size=config.head_size,
        scale=config.head_size**-0.5,
        rope=rope,
        slopes=slopes,
    )
