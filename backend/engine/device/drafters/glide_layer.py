"""The weights of a GLIDE layer on one rank, from the tensors of its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tridecode.backend.models.specs import column_specs, norm_specs, row_specs
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.draft_files import DraftInfo, TrainedDraft
from tridecode.backend.weights.layout import WeightSpec, share_size
from tridecode.kernels.operands import DecoderLayer, Linear, Norm
from tridecode.kernels.ops import Ops

#: epsilon of the RMS norms
EPS = 1e-5
_QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


@dataclass(frozen=True)
class GlideLayer(DecoderLayer):
    """A decoder layer with cross-attention to the target's cache (Du et al., arXiv 2402.02082).

    x += dense(attention(qkv(attention_norm(x))))
    x += cross_dense(attention(cross_query(cross_norm(x)), the target's keys and values))
    x += down(swiglu(up(mlp_norm(x))))
    """

    cross_norm: Norm
    cross_query: Linear
    cross_dense: Linear

    @classmethod
    def load(
        cls,
        trained: TrainedDraft,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        tensor_rank: int,
        tensor_size: int,
    ) -> GlideLayer:
        """Return this rank's shard, split like the target's layers: by heads, and by columns of the MLP."""
        weights = _FileTensors(trained, ops, dtype, device, tensor_rank, tensor_size)
        return cls(
            attention_norm=weights.norm("input_layernorm", EPS),
            qkv=weights.linear("self_attn.qkv"),
            dense=weights.linear("self_attn.o_proj"),
            cross_norm=weights.norm("cross_attn_layernorm", EPS),
            cross_query=weights.linear("cross_attn.q_proj"),
            cross_dense=weights.linear("cross_attn.o_proj"),
            mlp_norm=weights.norm("post_attention_layernorm", EPS),
            up=weights.linear("mlp.gate_proj", "mlp.up_proj"),
            down=weights.linear("mlp.down_proj"),
        )


def mlp_columns(info: DraftInfo, tensor_size: int) -> int:
    """Return the size of the MLP's inner activations on one rank."""
    return share_size(info.width, tensor_size, padded=True)


def glide_specs(info: DraftInfo) -> list[WeightSpec]:
    """Return the layer's tensors in the layout of Decoder: matrices (in, out), with q, k and v in one."""
    hidden, queries = info.hidden_size, info.num_heads * info.head_size
    keys, heads = info.num_kv_heads * info.head_size, (info.num_heads,)
    every_head = (*heads, info.num_kv_heads, info.num_kv_heads)
    return [
        *norm_specs("input_layernorm", hidden, False),
        *column_specs("self_attn.qkv", hidden, (queries, keys, keys), False, 0, every_head),
        *row_specs("self_attn.o_proj", queries, hidden, False, 0, heads),
        *norm_specs("cross_attn_layernorm", hidden, False),
        *column_specs("cross_attn.q_proj", hidden, (queries,), False, 0, heads),
        *row_specs("cross_attn.o_proj", queries, hidden, False, 0, heads),
        *norm_specs("post_attention_layernorm", hidden, False),
        *column_specs("mlp.gate_proj", hidden, (info.width,), False, 0),
        *column_specs("mlp.up_proj", hidden, (info.width,), False, 0),
        *row_specs("mlp.down_proj", info.width, hidden, False, 0),
    ]


class _FileTensors(Weights):
    """The shards of one rank, cut from the tensors of the file, whose matrices are (out, in)."""

    def __init__(
        self,
        trained: TrainedDraft,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        tensor_rank: int,
        tensor_size: int,
    ):
        specs = glide_specs(trained.info)
        super().__init__(specs, ops, None, 0, tensor_rank, tensor_size, dtype)
        self._tensors, self._device = trained.tensors, device

    def tensor(self, name: str) -> Tensor:
        return _shard(self.specs[name], _whole(self._tensors, name), self.rank, self.size).to(
            self._device, self.dtype
        )


def _whole(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor of glide_specs: a norm, or a matrix (in, out)."""
    if name == "self_attn.qkv.weight":
        return torch.cat([tensors[part] for part in _QKV]).t()
    return tensors[name].t() if tensors[name].ndim == 2 else tensors[name]


def _shard(spec: WeightSpec, whole: Tensor, rank: int, size: int) -> Tensor:
    """Return the shard of one rank, zero-padded as WeightSpec describes."""
    if spec.axis is None:
        return whole
    parts = []
    for (start, stop), columns in zip(spec.slices(rank, size), spec.share_sizes(size)):
        shape = [*whole.shape]
        shape[spec.axis] = columns - (stop - start)
        parts += [whole.narrow(spec.axis, start, stop - start), whole.new_zeros(shape)]
    return torch.cat(parts, spec.axis)
