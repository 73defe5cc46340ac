"""The parts of a decoder: interfaces to weights and ranks, buffers, attention over a paged cache, positions.

Letters as in kernels.ops. A model holds weights and calls operations. It allocates nothing in a step: every
buffer comes from `Workspace`, so that a CUDA graph can capture the step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models.quantized_parts import read_quantized, stacked
from tridecode.backend.weights.layout import WeightSpec, share_size
from tridecode.backend.weights.quantization import Quantization, stored_specs
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.ops import (
    Batch,
    CacheLayer,
    DecoderLayer,
    Heads,
    Linear,
    Norm,
    Ops,
    Product,
    Rope,
)


class Weights(ABC):
    """The source of a model's tensors: this rank's shard, on the device, in the engine's dtype.

    specs: of the model's tensors; files: those that hold them, the parts of quantised matrices among them.
    quantization: of the files. int8_mode: of EngineConfig, for files that are not quantised; int8_head: of
    EngineConfig. tensor_rank, tensor_size, dtype: of the shards.
    """

    def __init__(
        self,
        specs: Iterable[WeightSpec],
        ops: Ops,
        quantization: Quantization | None = None,
        int8_mode: int = 0,
        tensor_rank: int = 0,
        tensor_size: int = 1,
        dtype: torch.dtype = torch.float32,
        int8_head: bool = False,
    ):
        self.specs, self.ops = {spec.name: spec for spec in specs}, ops
        self.files = {spec.name: spec for spec in stored_specs(self.specs.values(), quantization)}
        self.quantization, self.int8_mode = quantization, int8_mode if quantization is None else 0
        self.rank, self.size, self.dtype, self.int8_head = tensor_rank, tensor_size, dtype, int8_head
        self.linears: dict[tuple[str, ...], Linear] = {}  # what `linear` has given, by its names

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """The shard of the file `name`, in its shape; a part of a quantised matrix in its own dtype."""

    def linear(self, *names: str) -> Linear:
        """The matrices `<name>.weight`, stacked along their outputs, with `<name>.bias` if there is one."""
        weight = self._matrix([f"{name}.weight" for name in names])
        has_bias = f"{names[0]}.bias" in self.specs
        bias = _joined([self.tensor(f"{name}.bias") for name in names]) if has_bias else None
        self.linears[names] = packed = self.ops.pack(Linear(weight, bias), self.dtype)
        return packed

    def _matrix(self, names: list[str]) -> Tensor | QuantizedWeight:
        """(out, in): matrices of files (in, out), stacked along their outputs."""
        if names[0] not in self.files:
            return stacked([self.quantized(name) for name in names])
        dense = _joined([self.tensor(name) for name in names]).t()
        if not self.int8_mode:
            return dense
        return round_to_nearest(dense, "int8", activations="int8" if self.int8_mode == 2 else "")

    def quantized(self, name: str) -> QuantizedWeight:
        """This rank's shard of a matrix that is quantised in the files."""
        assert self.quantization is not None, name
        return read_quantized(self.specs[name], self.quantization, self.tensor, self.rank, self.size)

    def embedding(self, is_head: bool) -> Tensor | QuantizedWeight:
        """The word embedding (V, C); where it is the head too, as int8_head wants that."""
        table = self.tensor("model.wte")
        return round_to_nearest(table, "int8") if is_head and self.int8_head else table

    def head(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Linear:
        """The language model's head over `weight` (V, C), which may be the word embedding itself."""
        if self.int8_head and isinstance(weight, Tensor):
            weight = round_to_nearest(weight, "int8")
        return self.ops.pack(Linear(weight, bias), self.dtype, is_head=True)

    def norm(self, name: str, eps: float, centred: bool = False) -> Norm:
        """A LayerNorm, or an RMSNorm if there is no `<name>.bias`. centred: a LayerNorm, its bias 0 if there
        is none."""
        weight = self.tensor(f"{name}.weight")
        if f"{name}.bias" in self.specs:
            return Norm(weight, self.tensor(f"{name}.bias"), eps)
        return Norm(weight, torch.zeros_like(weight) if centred else None, eps)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class RowSums(Protocol):
    """The sum over the tensor ranks, fused with what comes after it: kernels.peer_sums.PeerSums."""

    def add_rows(
        self,
        partial: Tensor,
        biases: Sequence[Tensor] = (),
        residual: Tensor | None = None,
        norm: Norm | None = None,
        *,
        out: Tensor | None,
        normed: Tensor | None = None,
        follows_product: bool = False,
    ) -> None: ...


class Ranks(Protocol):
    """This rank's place in the tensor-parallel group and the pipeline."""

    tensor_rank: int
    tensor_size: int
    stage: int
    num_stages: int

    def all_reduce(self, x: Tensor) -> None:
        """Sum x over the tensor group, in place, in rank order, so that every rank holds the same bits."""
        ...

    def row_sums(self, x: Tensor) -> RowSums | None:
        """Return the kernel that sums rows such as x over the tensor group in one launch; None: use
        all_reduce."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """(tensor_size, *x.shape): x of every rank of the tensor group, in rank order."""
        ...

    def receive(self, x: Tensor) -> None:
        """Fill x (T, C) with the output of the stage before."""
        ...

    def send(self, x: Tensor) -> None: ...


@dataclass
class Workspace:
    """The activations of a step, allocated once for max_tokens rows and the columns of this rank's share.

    H, K and F are those of the largest layer; a smaller one uses the front of a buffer (Context.parts).
    """

    hidden: Tensor  # (T, C) the residual stream
    qkv: Tensor  # (T, (H + 2K) * D)
    context: Tensor  # (T, H * D)
    mlp: Tensor  # (T, F)
    #: (T, C) a tensor rank's partial sums and then their norm, or what is normalised before it is added
    delta: Tensor
    last: Tensor  # (R, C) rows that are sampled from
    logits: Tensor  # (R, V) float32, or (R, VocabShare.size) where ranks share the vocabulary

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        max_tokens: int,
        max_rows: int,
        tensor_size: int,
        dtype: torch.dtype,
        device: torch.device,
        logit_columns: int | None = None,
    ) -> Workspace:
        """logit_columns: None: the vocabulary."""

        def empty(rows: int, columns: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(rows, columns, dtype=kind, device=device)

        config, mlp = config.largest_layer(), config.mlp_share(tensor_size)
        needs_delta = tensor_size > 1 or config.residual == "sandwich"
        queries = config.num_heads // tensor_size * config.head_size
        keys = share_size(config.num_kv_heads, tensor_size) * config.head_size
        return cls(
            hidden=empty(max_tokens, config.hidden_size),
            qkv=empty(max_tokens, queries + 2 * keys),
            context=empty(max_tokens, queries),
            mlp=empty(max_tokens, mlp),
            delta=empty(max_tokens if needs_delta else 0, config.hidden_size),
            last=empty(max_rows, config.hidden_size),
            logits=empty(max_rows, logit_columns or config.vocab_size, torch.float32),
        )


@dataclass(frozen=True)
class Context:
    """The arguments of a step that every layer takes."""

    ops: Ops
    ranks: Ranks
    work: Workspace
    batch: Batch
    _parts: dict[tuple[str, int], Parts] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens

    def mlp(self, layer: DecoderLayer) -> Tensor:
        """(T, F): the workspace's buffer for the inner activations of a layer's MLP."""
        return self.parts("mlp", layer.down.weight.shape[1]).whole

    def parts(self, name: str, columns: int) -> Parts:
        """The front of a buffer of the workspace as (T, columns), contiguous: a layer may be narrower than
        another. Made once for all layers of a width: a view costs the host as much as a launch."""
        found = self._parts.get((name, columns))
        if found is None:
            tokens = self.num_tokens
            whole = getattr(self.work, name).view(-1)[: tokens * columns].view(tokens, columns)
            decodes = self.batch.num_decodes
            found = self._parts[name, columns] = Parts(whole, whole[:decodes], whole[decodes:])
        return found


class Parts(NamedTuple):
    """A buffer of a step: the whole, the rows of decoding sequences, those of prompts."""

    whole: Tensor
    decodes: Tensor
    prompts: Tensor


class Rows(NamedTuple):
    """The input of a product: norm(x), which the product computes; x alone where that is done (norm None)."""

    x: Tensor  # (T, C)
    norm: Norm | None


def attention(context: Context, rows: Rows | None, qkv: Linear, heads: Heads, cache: CacheLayer) -> Tensor:
    """(T, H * D): causal attention of the rows over the cache; writes the new keys and values to it.

    rows: None where the buffer "qkv" has the product of project_qkv already, and nothing else is done."""
    ops, batch = context.ops, context.batch
    projected = context.parts("qkv", heads.qkv_size)
    out = context.parts("context", heads.num_heads * heads.head_size)
    unfinished = None
    if rows is not None:
        ops.project_qkv(rows.x, qkv, rows.norm, heads, batch, cache, out=projected.whole)
    elif batch.num_decodes == batch.num_tokens:
        unfinished = qkv
    else:
        ops.finish_qkv(projected.whole, heads, batch, cache)
    if batch.num_decodes:
        ops.decode_attention(projected.decodes, heads, batch, cache, out=out.decodes, unfinished=unfinished)
    if batch.num_decodes < batch.num_tokens:
        ops.prefill_attention(projected.prompts, heads, batch, cache, out=out.prompts)
    return out.whole


def add_linears(
    context: Context, residual: Tensor, *products: tuple[Tensor, Linear], norm: Norm | None = None
) -> Rows:
    """residual += x @ weight.T + bias of each (x, linear), summed over the tensor ranks.

    Returns the residual as the next product's input, which `norm` normalises: where the sum over the ranks
    computes the norm too, its rows are in work.delta until the next call.
    """
    if context.ranks.tensor_size == 1:
        for x, linear in products:
            context.ops.linear(x, linear, residual=residual, out=residual)
        return Rows(residual, norm)
    sums = context.ranks.row_sums(residual)
    if sums is None:
        residual.add_(_sum_over_ranks(context, *products))
        return Rows(residual, norm)
    delta, biases = _partial_sums(context, False, *products), _biases(products)
    normed = None if norm is None else delta
    sums.add_rows(delta, biases, residual, norm, out=residual, normed=normed, follows_product=True)
    return Rows(residual, None) if normed is None else Rows(normed, None)


class Following(NamedTuple):
    """The attention of the next layer: its norm, its QKV projection, and that projection's number of
    columns."""

    norm: Norm
    qkv: Linear
    columns: int


def finish_layer(
    context: Context,
    x: Tensor,
    attended: Tensor,
    layer: DecoderLayer,
    activation: str,
    following: Following | None,
) -> bool:
    """A layer behind its attention, x += dense(attended) and x += mlp(norm(x)), and the product of
    project_qkv of the layer that follows, in one launch, if the operations have one for them. False: not
    done. Of a rank that sums with no other."""
    mlp = context.mlp(layer)
    products = [
        Product(attended, layer.dense, x, residual=x),
        Product(x, layer.up, mlp, norm=layer.mlp_norm, activation=activation),
        Product(mlp, layer.down, x, residual=x),
    ]
    if following is not None:
        qkv = context.parts("qkv", following.columns).whole
        products.append(Product(x, following.qkv, qkv, norm=following.norm))
    return context.ops.linears(products)


def add_and_norm(context: Context, x: Tensor, product: tuple[Tensor, Linear], norm: Norm) -> None:
    """x = norm(x + y @ weight.T + bias) of the product (y, linear), summed over the tensor ranks."""
    sums = None if context.ranks.tensor_size == 1 else context.ranks.row_sums(x)
    if sums is None:
        add_linears(context, x, product)
        context.ops.norm(x, norm, out=x)
        return
    delta = _partial_sums(context, False, product)
    sums.add_rows(delta, _biases([product]), x, norm, out=None, normed=x, follows_product=True)


def add_normed(context: Context, residual: Tensor, x: Tensor, linear: Linear, norm: Norm) -> None:
    """residual += norm(x @ weight.T + bias), the product summed over tensor ranks."""
    sums = None if context.ranks.tensor_size == 1 else context.ranks.row_sums(residual)
    if sums is None:
        delta = _sum_over_ranks(context, (x, linear))
        context.ops.norm(delta, norm, out=delta)
    else:
        delta = _partial_sums(context, False, (x, linear))
        biases = _biases([(x, linear)])
        sums.add_rows(delta, biases, None, norm, out=None, normed=delta, follows_product=True)
    residual.add_(delta)


def add_over_ranks(context: Context, x: Tensor, norm: Norm | None) -> None:
    """x = norm(the sum of every rank's x); no norm: the sum."""
    sums = context.ranks.row_sums(x)
    if sums is not None:
        sums.add_rows(x, norm=norm, out=x if norm is None else None, normed=None if norm is None else x)
        return
    context.ranks.all_reduce(x)
    if norm is not None:
        context.ops.norm(x, norm, out=x)


def _sum_over_ranks(context: Context, *products: tuple[Tensor, Linear]) -> Tensor:
    """(T, C): the sum of x @ weight.T + bias of each (x, linear), in work.delta."""
    # the bias is whole on every rank: only the first adds it
    delta = _partial_sums(context, context.ranks.tensor_rank == 0, *products)
    context.ranks.all_reduce(delta)
    return delta


def _partial_sums(context: Context, with_biases: bool, *products: tuple[Tensor, Linear]) -> Tensor:
    """(T, C): this rank's part of the sum of x @ weight.T + bias of each (x, linear), in work.delta."""
    delta = context.work.delta[: context.num_tokens]
    for index, (x, linear) in enumerate(products):
        partial = linear if with_biases or linear.bias is None else replace(linear, bias=None)
        context.ops.linear(x, partial, residual=delta if index else None, out=delta)
    return delta


def _biases(products: Sequence[tuple[Tensor, Linear]]) -> list[Tensor]:
    return [linear.bias for _, linear in products if linear.bias is not None]


def alibi_slopes(num_heads: int, largest: float = 8.0) -> Tensor:
    """(num_heads,) float32 slopes of Press et al. 2022, with their rule where that is not a power of two.

    2^(-8/n), 2^(-16/n), ... for the largest power of two n <= num_heads, then every other slope of the
    sequence for 2n. largest: in place of the 8 (MPT's alibi_bias_max).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-largest * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-largest * (2 * i + 1) / (2 * power)) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


def make_heads(
    config: ModelConfig,
    ranks: Ranks,
    rope: Rope | None = None,
    slopes: Tensor | None = None,
    scale: float | None = None,
    key_bias: Tensor | None = None,
    **fields: Any,
) -> Heads:
    """This rank's share of the heads of a layer. slopes: (num_heads,), key_bias: (num_heads, positions), of
    all ranks. scale: of the scores; None: attention_scale's. fields: further ones of Heads."""
    assert not config.layer_sizes, "layers differ in heads: Decoder.layer_heads makes those of each"
    num_heads = config.num_heads // ranks.tensor_size
    mine = slice(ranks.tensor_rank * num_heads, (ranks.tensor_rank + 1) * num_heads)
    if slopes is not None:
        slopes = slopes[mine].contiguous()
    if key_bias is not None:
        key_bias = key_bias[mine].contiguous()
    return Heads(
        num_heads=num_heads,
        num_kv_heads=share_size(config.num_kv_heads, ranks.tensor_size),
        head_size=config.head_size,
        scale=attention_scale(config) if scale is None else scale,
        rope=rope,
        slopes=slopes,
        key_bias=key_bias,
        **fields,
    )


def attention_scale(config: ModelConfig) -> float:
    """Return the factor of the attention scores."""
    return config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
