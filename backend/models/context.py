"""The context of a step for the layers: this rank's place, the buffers of the activations, and their views.

Nothing is allocated in a step: every buffer comes from `Workspace`, so that a CUDA graph can capture it.
Letters as in kernels.ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.weights.layout import share_size
from tridecode.kernels.operands import Batch, DecoderLayer, Norm
from tridecode.kernels.ops import Ops


class RowSums(Protocol):
    """The sum over the tensor ranks, fused with the operation after it or, in a launch of several GEMMs
    (Product.over_ranks), with these; a GEMM may send its part (Ops.linear_sending):
    kernels.peer_sums.PeerSums.
    """

    @property
    def chain_fields(self) -> Mapping[str, float] | None: ...

    def sent_fields(self, partial: Tensor) -> Mapping[str, float] | None: ...

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
        sent: bool = False,
    ) -> None: ...


class HalfSums(Protocol):
    """Sums over the tensor ranks for a step in two halves: kernels.peer_sums.PeerCopies. `send` starts the
    exchange of a half's partial sums, which runs together with what follows; `add_rows` waits for it.
    """

    def send(self, half: int, partial: Tensor) -> None: ...

    def add_rows(
        self,
        half: int,
        partial: Tensor,
        biases: Sequence[Tensor],
        residual: Tensor,
        norm: Norm | None,
        *,
        normed: Tensor | None,
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
        all_reduce.
        """
        ...

    def half_sums(self, x: Tensor) -> HalfSums | None:
        """Return the sums for a step in two halves; None: compute a step of rows such as x as a whole."""
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

    H, K and F are those of the largest layer; a smaller one uses the first columns (Context.parts).
    """

    hidden: Tensor  # (T, C) the residual stream
    qkv: Tensor  # (T, (H + 2K) * D)
    context: Tensor  # (T, H * D)
    mlp: Tensor  # (T, F)
    #: (T, C) a tensor rank's partial sums and then their norm, or values that are normalised before they are
    #: added
    delta: Tensor
    last: Tensor  # (R, C) rows that are sampled from
    logits: Tensor  # (R, V) float32, or (R, VocabShare.size) if ranks share the vocabulary

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
        """Return the front of a workspace buffer as (T, columns), contiguous: layers may differ in width.

        Views are created once for all layers of a width: a view costs the host as much as a launch.
        """
        found = self._parts.get((name, columns))
        if found is None:
            tokens = self.num_tokens
            whole = getattr(self.work, name).view(-1)[: tokens * columns].view(tokens, columns)
            decodes = self.batch.decode_tokens
            found = self._parts[name, columns] = Parts(whole, whole[:decodes], whole[decodes:])
        return found


class Parts(NamedTuple):
    """A buffer of a step: all rows, the decode rows, the prefill rows."""

    whole: Tensor
    decodes: Tensor
    prompts: Tensor


class Rows(NamedTuple):
    """The input of a GEMM: norm(x), fused into the GEMM; norm None: x is already normalised."""

    x: Tensor  # (T, C)
    norm: Norm | None
