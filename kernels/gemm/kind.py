"""Base of the weight kinds: turns a GEMM, or a projection to heads, into launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from tridecode.kernels.gemm.call import Call
from tridecode.kernels.gpu import ACTIVATIONS, DTYPES, Gpu
from tridecode.kernels.operands import Heads, Linear
from tridecode.kernels.reference.products import activated, change_qkv


class WeightKind(ABC):
    """Launches the GEMMs of one weight kind (packing.KINDS). Calls are already checked and not empty."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu

    @abstractmethod
    def launch(self, call: Call) -> bool:
        """Compute a call whose activation is one of ACTIVATIONS.

        Returns whether its heads were rotated and written to the cache as well.
        """

    def linear(self, call: Call) -> None:
        """Compute any call without heads."""
        if call.activation in ACTIVATIONS:
            self.launch(call)
        else:
            self.activate_behind(call)

    def project(self, call: Call) -> None:
        """Compute a call with heads: the GEMM, then rotation and the write to the KV cache."""
        heads, fields = call.heads, call.head_fields
        assert heads is not None and fields is not None
        if heads.changes_qkv:
            self.launch(call._replace(heads=None, head_fields=None))
        elif self.launch(call):
            return
        finish_heads(self.gpu, call.out, heads, fields)

    def chain_operand(self, linear: Linear) -> str:
        """Return the operand code name of the chained-GEMM kernel (gemm/chain.py) for this weight; "" if
        unsupported.
        """
        return ""

    def chain_fields(self, linear: Linear) -> dict[str, int]:
        """Return the fields of tridecode_chain_step for a weight that chain_operand accepts."""
        raise NotImplementedError

    def activate_behind(self, call: Call) -> None:
        """Compute a GEMM, then, by torch, an activation that no epilogue supports."""
        assert call.activation is not None
        product = self.gpu.temporary("product", call.tokens, call.linear.weight.shape[0], call.x.dtype)
        self.launch(call._replace(out=product, activation=None, residual=None))
        product = activated(product, call.activation)
        call.out.copy_(product if call.residual is None else product.add_(call.residual))

    def run(self, kernel: str, task: Mapping[str, float]) -> None:
        """Launch a kernel of csrc/api/gemm.h.

        task: made in one expression of call.fields(), gpu.scratch_fields and the fields of the weight, the
        tile, the norm and the heads: each further merge costs the host as much as a check of the tensors.
        """
        gpu = self.gpu
        getattr(gpu.library, kernel)(gpu.stream, task)


def finish_heads(gpu: Gpu, qkv: Tensor, heads: Heads, fields: dict[str, float]) -> None:
    """Clamp, normalise and rotate heads in place, and write keys and values. fields: from fields_of_heads."""
    if heads.changes_qkv:
        change_qkv(qkv, heads)
    gpu.library.rotate_and_cache(
        gpu.stream,
        out=qkv.data_ptr(),
        out_stride=qkv.stride(0),
        tokens=qkv.shape[0],
        dtype=DTYPES[qkv.dtype],
        **fields,
    )
