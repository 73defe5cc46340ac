"""The operations of kernels.adapters.operation on a GPU; part of kernels.cuda.Cuda."""

from __future__ import annotations

from torch import Tensor

from tridecode.kernels.adapters.fused import adapter_sums
from tridecode.kernels.adapters.launch import Sum, add_adapters
from tridecode.kernels.adapters.operation import NextSums
from tridecode.kernels.gemm.call import Call
from tridecode.kernels.gemm.gemms import Gemms
from tridecode.kernels.gpu import Gpu
from tridecode.kernels.operands import AdapterSlots, AdapterTable, Batch, CacheLayer, Heads, Linear, Norm


class CudaAdapters:
    gpu: Gpu
    gemms: Gemms

    def add_adapters(
        self,
        x: Tensor,
        table: AdapterTable,
        adapters: AdapterSlots,
        *,
        product: Tensor,
        activation: str | None = None,
        residual: Tensor | None = None,
        norm: Norm | None = None,
        normed: Tensor | None = None,
        sums: Tensor | None = None,
        next_sums: NextSums | None = None,
        complete: bool = False,
        out: Tensor,
    ) -> None:
        made = Sum(x, table, product, activation, residual, norm, normed, sums, next_sums, out, complete)
        add_adapters(self.gpu, adapters, made)

    def adapter_sums(
        self,
        x: Tensor,
        table: AdapterTable,
        adapters: AdapterSlots,
        *,
        norm: Norm | None = None,
        normed: Tensor | None = None,
    ) -> Tensor | None:
        return adapter_sums(self.gpu, x, table, adapters, norm, normed)

    def linear_keeping(
        self,
        x: Tensor,
        linear: Linear,
        adapters: AdapterSlots,
        *,
        activation: str,
        product: Tensor,
        out: Tensor,
    ) -> bool:
        return self.gemms.linear_keeping(Call(x, linear, out, None, activation), adapters, product)

    def linear_with_adapters(
        self,
        x: Tensor,
        linear: Linear,
        table: AdapterTable,
        adapters: AdapterSlots,
        sums: Tensor,
        *,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> bool:
        call = Call(x, linear, out, None, activation, residual)
        return self.gemms.linear_with_adapters(call, table, adapters, sums)

    def project_qkv_with_adapters(
        self,
        x: Tensor,
        linear: Linear,
        table: AdapterTable,
        adapters: AdapterSlots,
        sums: Tensor,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        *,
        out: Tensor,
    ) -> bool:
        call = Call(x, linear, out, None)
        return self.gemms.project_qkv_with_adapters(call, table, adapters, sums, heads, batch, cache)
