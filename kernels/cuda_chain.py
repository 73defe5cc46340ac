"""Products of few tokens, each of the result of the one before it, in one launch on compute capability 9.0
(csrc/gemm/chain/product_chain_sm90a.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor

from tridecode.kernels.cuda_base import ACTIVATIONS, DTYPES, pointer
from tridecode.kernels.cuda_gemm import _check_linear
from tridecode.kernels.cuda_w8a8 import CudaW8A8
from tridecode.kernels.library import current_stream
from tridecode.kernels.ops import Linear, Product
from tridecode.kernels.packed_weight import PackedWeight, multiplied_in_int8
from tridecode.kernels.quantized import QuantizedWeight, operand, stays_in_8_bit
from tridecode.kernels.reference import GATED
from tridecode.kernels.scratch import EXCHANGE_BYTES

#: `operand` of a task -> the most tokens of a launch, where it is faster
CHAIN_TOKENS = {1: 1, 2: 1, 3: 1, 4: 1, 6: 1}
#: the most that the kernel takes
MOST_TOKENS, MOST_PRODUCTS = 4, 4
_OPERANDS = {"int8": 1, "fp8": 2, "two_parts": 3}
#: vectors of 8 inputs that a thread holds for a norm, and threads
_HELD, _THREADS = 4, 512
_LEAST_STAGES = 4
_HEADER_BYTES = 256  # of the exchange


class CudaChain(CudaW8A8):
    """linears."""

    #: in place of CHAIN_TOKENS, for tests and measurements; 0: no launch
    chain_tokens: int | None = None

    @property
    def most_linears_rows(self) -> int:
        if self.capability != 90 or self.gemm_device.shared:  # blocks wait for each other
            return 0
        most = max(CHAIN_TOKENS.values()) if self.chain_tokens is None else self.chain_tokens
        return min(most, MOST_TOKENS)

    def linears(self, products: Sequence[Product]) -> bool:
        x = products[0].x
        tokens = x.shape[0]
        if not 1 <= tokens <= self.most_linears_rows or x.dtype == torch.float32:
            return False
        if len(products) > MOST_PRODUCTS:
            return False
        kind = self._operand(products[0].linear, x.dtype)
        most = CHAIN_TOKENS.get(kind, 0) if self.chain_tokens is None else self.chain_tokens
        if tokens > most or not self._takes(products, kind):
            return False
        for product in products:
            gated = product.activation in GATED
            _check_linear("linears", product.x, product.linear, product.residual, product.out, gated)
        steps = (self.library.structures["tridecode_chain_step"] * len(products))(*map(self._step, products))
        self.library.product_chain_sm90a(
            current_stream(self.device),
            steps=addressof(steps),
            num_steps=len(products),
            tokens=tokens,
            dtype=DTYPES[x.dtype],
            operand=kind,
            exchange=self._exchange.data_ptr(),
            exchange_bytes=EXCHANGE_BYTES,
        )
        return True

    def _operand(self, linear: Linear, dtype: torch.dtype) -> int:
        """`operand` of the task that multiplies with such a weight; 0: none does."""
        weight = linear.weight
        if isinstance(weight, QuantizedWeight):
            return _OPERANDS.get(operand(weight), 0) if stays_in_8_bit(weight, dtype, self.capability) else 0
        if isinstance(weight, PackedWeight) and multiplied_in_int8(weight) and weight.order is None:
            return 4
        if isinstance(weight, Tensor) and weight.dtype == dtype and not linear.activations:
            return 6 if weight.is_contiguous() else 0
        return 0

    def _takes(self, products: Sequence[Product], kind: int) -> bool:
        """Whether the kernel computes all of these."""
        tokens, inputs = products[0].x.shape[0], max(product.x.shape[1] for product in products)
        if not kind or any(_differ(*pair) for pair in zip(products, products[1:])):
            return False
        left = sum(product.out.shape[1] for product in products)  # of results
        if _HEADER_BYTES + 4 * tokens * left > EXCHANGE_BYTES:
            return False
        if self.library.product_chain_stages(inputs, tokens, kind) < _LEAST_STAGES:
            return False
        return all(self._takes_one(product, kind) for product in products)

    def _takes_one(self, product: Product, kind: int) -> bool:
        x, norm, (rows, inputs) = product.x, product.norm, product.linear.weight.shape
        if self._operand(product.linear, x.dtype) != kind or product.activation not in ACTIVATIONS:
            return False
        if inputs % 128 or rows % (32 if product.activation == "swiglu" else 16):
            return False
        if norm is not None and inputs > 8 * _HELD * _THREADS // _rounded_up(x.shape[0]):
            return False
        used = [x, product.out, *(() if product.residual is None else (product.residual,))]
        return all(
            tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and tensor.dtype == x.dtype
            for tensor in used
        )

    def _step(self, product: Product) -> Any:
        """tridecode_chain_step."""
        weight, norm = product.linear.weight, product.norm
        values = weight if isinstance(weight, Tensor) else weight.values
        scales, groups = (None, None) if isinstance(weight, Tensor) else (weight.scales, weight.groups)
        return self.library.structures["tridecode_chain_step"](
            out=product.out.data_ptr(),
            x=product.x.data_ptr(),
            weight=values.data_ptr(),
            bias=pointer(product.linear.bias),
            residual=pointer(product.residual),
            norm_weight=0 if norm is None else norm.weight.data_ptr(),
            norm_bias=0 if norm is None else pointer(norm.bias),
            norm_eps=0.0 if norm is None else norm.eps,
            weight_scales=pointer(scales),
            weight_groups=pointer(groups),
            inputs=weight.shape[1],
            outputs=weight.shape[0],
            activation=ACTIVATIONS[product.activation],
        )


def _differ(product: Product, following: Product) -> bool:
    """Whether the one that follows reads anything but the result."""
    of = following.x
    return of.data_ptr() != product.out.data_ptr() or of.shape != product.out.shape


def _rounded_up(tokens: int) -> int:
    """To a power of two: the groups of warps that round a token each."""
    return next(count for count in (1, 2, 4) if tokens <= count)
