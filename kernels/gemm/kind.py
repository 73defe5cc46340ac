"""Base of the weight kinds: turns a GEMM, or a projection to heads, into launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from ctypes import addressof

from torch import Tensor

from tridecode.kernels.gemm.call import Call, fields_of_changes
from tridecode.kernels.gpu import ACTIVATIONS, DTYPES, ROW_ACTIVATIONS, Gpu, pointer
from tridecode.kernels.operands import Heads, Linear


class WeightKind(ABC):
    """Launches the GEMMs of one weight kind (packing.KINDS). Calls are already checked and not empty."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu

    @abstractmethod
    def launch(self, call: Call) -> bool:
        """Compute a call whose activation is one of ACTIVATIONS.

        Returns whether its heads were rotated and written to the cache as well.
        """

    def adapts(self, call: Call) -> bool:
        """Return whether one GEMM computes the call and can add adapters in its epilogue."""
        return False

    def sends(self, call: Call) -> bool:
        """Return whether one GEMM computes the call, of a part of a sum, and can send the result."""
        return False

    def keeps(self, call: Call) -> bool:
        """Return whether one GEMM computes the call and can also store the products of some rows."""
        return False

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
        """Compute a GEMM, then an activation that no epilogue supports in a launch of its own."""
        assert call.activation is not None
        gpu, out, residual = self.gpu, call.out, call.residual
        product = gpu.temporary("product", call.tokens, call.linear.weight.shape[0], call.x.dtype)
        self.launch(call.bare(product))
        gpu.library.activate_rows(
            gpu.stream,
            out=out.data_ptr(),
            product=product.data_ptr(),
            bias=pointer(call.linear.bias),
            residual=pointer(residual),
            out_stride=out.stride(0),
            product_stride=product.stride(0),
            residual_stride=0 if residual is None else residual.stride(0),
            tokens=call.tokens,
            columns=out.shape[1],
            activation=ROW_ACTIVATIONS[call.activation],
            out_float32=call.out_float32,
            dtype=DTYPES[call.x.dtype],
        )

    def run(self, kernel: str, task: Mapping[str, float], call: Call) -> None:
        """Launch a kernel of csrc/api/gemm.h.

        task: made in one expression of call.fields(), gpu.scratch_fields and the fields of the weight, the
        tile, the norm and the heads: each further merge costs the host as much as a check of the tensors.
        """
        gpu, more = self.gpu, call.adapters or call.sent or call.kept
        if more is None:
            getattr(gpu.library, kernel)(gpu.stream, task)
            return
        gemm = gpu.library.structures["tridecode_gemm_task"](**task)
        suffix = "adapted" if call.adapters else "sent" if call.sent else "kept"
        getattr(gpu.library, f"{kernel}_{suffix}")(gpu.stream, gemm=addressof(gemm), **more)


def finish_heads(gpu: Gpu, qkv: Tensor, heads: Heads, fields: dict[str, float]) -> None:
    """Clamp, normalise and rotate heads in place, and write keys and values. fields: from fields_of_heads."""
    if heads.changes_qkv:
        gpu.library.finish_heads(
            gpu.stream,
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride(0),
            tokens=qkv.shape[0],
            dtype=DTYPES[qkv.dtype],
            **fields,
            **fields_of_changes(heads, qkv),
        )
        return
    gpu.library.rotate_and_cache(
        gpu.stream,
        out=qkv.data_ptr(),
        out_stride=qkv.stride(0),
        tokens=qkv.shape[0],
        dtype=DTYPES[qkv.dtype],
        **fields,
    )
