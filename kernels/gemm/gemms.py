"""The GEMM operations of kernels.ops.Ops on one GPU, computed by each weight's kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tridecode.kernels.adapters import fused
from tridecode.kernels.gemm.call import Call, check_call, check_qkv, fields_of_heads
from tridecode.kernels.gemm.chain import Chain
from tridecode.kernels.gemm.cublas_products import CublasProducts
from tridecode.kernels.gemm.dense import Dense
from tridecode.kernels.gemm.dequantised import DequantisedProducts
from tridecode.kernels.gemm.eight_bit import EightBit, Fp8Blocks, TwoParts
from tridecode.kernels.gemm.kind import WeightKind, finish_heads
from tridecode.kernels.gemm.packed import Int4, Packed
from tridecode.kernels.gemm.packing import pack_linear
from tridecode.kernels.gemm.plan import KEPT_TOKENS, SENT_TOKENS
from tridecode.kernels.gpu import Gpu
from tridecode.kernels.operands import (
    AdapterSlots,
    AdapterTable,
    Batch,
    CacheLayer,
    Heads,
    Linear,
    Product,
    RankWords,
)


class Gemms:
    """Implements linear, linears, project_qkv, finish_qkv and pack. kinds: by the names of packing.KINDS."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        cublas = CublasProducts(gpu)
        dense = Dense(gpu, cublas)
        self.dequantised = DequantisedProducts(gpu, dense, cublas)
        self.kinds: dict[str, WeightKind] = {
            "dense": dense,
            "int8": EightBit(gpu, cublas, "int8"),
            "fp8": EightBit(gpu, cublas, "fp8"),
            "fp8_blocks": Fp8Blocks(gpu, cublas),
            "two_parts": TwoParts(gpu, self.dequantised, EightBit(gpu, cublas, "two_parts")),
            "packed": Packed(gpu, self.dequantised),
            "int4": Int4(gpu, self.dequantised),
        }
        self.chain = Chain(gpu, self.kinds)
        #: whether a weight's columns are sorted by groups, so that x is gathered
        self.sorts_inputs = False

    def pack(self, linear: Linear, dtype: torch.dtype, is_head: bool) -> Linear:
        packed = pack_linear(linear, dtype, self._gpu.capability, is_head)
        self.sorts_inputs |= packed.sorts_inputs
        if packed.dequantised_bytes:
            self._gpu.arena("expanded_weight", packed.dequantised_bytes)
        return packed.linear

    def linear(self, call: Call) -> None:
        check_call("linear", call)
        if call.x.shape[0] > 0:
            self.kinds[call.linear.kind].linear(call)

    def linear_sending(self, call: Call, sums: RankWords) -> bool:
        if call.linear.bias is not None or call.tokens > SENT_TOKENS:
            return False
        check_call("linear_sending", call)
        kind, fields = self.kinds[call.linear.kind], sums.sent_fields(call.out)
        if fields is None or not kind.sends(call):
            return False
        if call.x.shape[0] > 0:
            kind.linear(call._replace(sent=fields))
        return True

    def linear_keeping(self, call: Call, adapters: AdapterSlots, product: Tensor) -> bool:
        if call.linear.bias is not None or call.tokens > KEPT_TOKENS:
            return False
        if adapters.groups is None or adapters.order is None:
            return False
        check_call("linear_keeping", call)
        kind = self.kinds[call.linear.kind]
        if not kind.keeps(call):
            return False
        fields = fused.kept_fields(call.x, call.linear, adapters, product)
        if call.x.shape[0] > 0:
            kind.linear(call._replace(kept=fields))
        return True

    def linear_with_adapters(
        self, call: Call, table: AdapterTable, adapters: AdapterSlots, sums: Tensor
    ) -> bool:
        check_call("linear_with_adapters", call)
        kind = self.kinds[call.linear.kind]
        if not fused.fits(call.x, table, adapters) or not kind.adapts(call):
            return False
        fields = fused.adapter_fields("linear_with_adapters", call.x, table, adapters, sums)
        if call.x.shape[0] > 0:
            kind.linear(call._replace(adapters=fields))
        return True

    def project_qkv_with_adapters(
        self,
        call: Call,
        table: AdapterTable,
        adapters: AdapterSlots,
        sums: Tensor,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
    ) -> bool:
        check_call("project_qkv_with_adapters", call)
        check_qkv("project_qkv_with_adapters", call.out, heads, batch, cache)
        kind = self.kinds[call.linear.kind]
        call = call._replace(heads=heads, head_fields=fields_of_heads(heads, batch, cache))
        if heads.changes_qkv or not fused.fits(call.x, table, adapters) or not kind.adapts(call):
            return False
        fields = fused.adapter_fields("project_qkv_with_adapters", call.x, table, adapters, sums)
        if call.x.shape[0] > 0:
            kind.project(call._replace(adapters=fields))
        return True

    def linears(self, products: Sequence[Product]) -> bool:
        return self.chain.linears(products)

    def project_qkv(self, call: Call, heads: Heads, batch: Batch, cache: CacheLayer) -> None:
        check_call("project_qkv", call)
        check_qkv("project_qkv", call.out, heads, batch, cache)
        if call.x.shape[0] > 0:
            fields = fields_of_heads(heads, batch, cache)
            self.kinds[call.linear.kind].project(call._replace(heads=heads, head_fields=fields))

    def finish_qkv(self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer) -> None:
        check_qkv("finish_qkv", qkv, heads, batch, cache)
        if qkv.shape[0] > 0:
            finish_heads(self._gpu, qkv, heads, fields_of_heads(heads, batch, cache))
