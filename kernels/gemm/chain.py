"""GEMMs of few tokens in one launch, which read each other's results, on compute capability 9.0.

See product_chain_sm90a.cu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor

from tridecode.kernels.gemm.call import Call, check_call
from tridecode.kernels.gemm.chain_table import CHAIN_TOKENS, chain_tokens
from tridecode.kernels.gemm.kind import WeightKind
from tridecode.kernels.gpu import ACTIVATIONS, DTYPES, FUSED_GATES, Gpu, pointer
from tridecode.kernels.operands import Norm, Product
from tridecode.kernels.scratch import EXCHANGE_BYTES

#: limits of the chained-GEMM kernel
MOST_TOKENS, MOST_PRODUCTS = 4, 4
#: vectors of 8 inputs that a thread holds for a norm, and threads of a block
_HELD, _THREADS = 4, 512
_LEAST_STAGES = 4
_HEADER_BYTES = 256  # bytes of the exchange buffer


class Chain:
    """`linears` of kernels.ops.Ops. most_tokens: for tests and benchmarks, replaces chain_tokens."""

    def __init__(self, gpu: Gpu, kinds: Mapping[str, WeightKind], most_tokens: int | None = None):
        self._gpu, self._kinds = gpu, kinds
        self.most_tokens = most_tokens

    @property
    def most_rows(self) -> int:
        """Return the maximum rows of x; more are declined."""
        if self._gpu.capability != 90 or self._gpu.gemm_device.shared:  # because blocks wait for each other
            return 0
        return min(CHAIN_TOKENS if self.most_tokens is None else self.most_tokens, MOST_TOKENS)

    def linears(self, products: Sequence[Product]) -> bool:
        x = products[0].x
        tokens = x.shape[0]
        if not 1 <= tokens <= self.most_rows or x.dtype == torch.float32 or len(products) > MOST_PRODUCTS:
            return False
        operand = self._operand(products[0])
        if not operand or not self._takes(products, operand):
            return False
        most = self.most_tokens
        outputs = min(product.out.shape[1] for product in products)
        adds = any(product.stream is not None for product in products)
        inputs = max(product.x.shape[1] for product in products)
        if tokens > (chain_tokens(operand, outputs, inputs, adds) if most is None else most):
            return False
        for product in products:
            check_call("linears", _call(product))
        library = self._gpu.library
        steps = (library.structures["tridecode_chain_step"] * len(products))(*map(self._step, products))
        library.product_chain_sm90a(
            self._gpu.stream,
            steps=addressof(steps),
            num_steps=len(products),
            tokens=tokens,
            dtype=DTYPES[x.dtype],
            operand=library.operands[operand],
            **self._exchange(products),
        )
        return True

    def _exchange(self, products: Sequence[Product]) -> Mapping[str, float]:
        """Return the fields of the exchange: that of the ranks if the products sum over them."""
        for product in products:
            if product.over_ranks is not None:
                fields = product.over_ranks.chain_fields
                assert fields is not None  # checked by _takes_streams
                return fields
        return {"exchange": self._gpu.exchange.data_ptr(), "exchange_bytes": EXCHANGE_BYTES}

    def _operand(self, product: Product) -> str:
        return self._kinds[product.linear.kind].chain_operand(product.linear)

    def _takes(self, products: Sequence[Product], operand: str) -> bool:
        """Return whether the chain kernel can compute all these GEMMs."""
        tokens, inputs = products[0].x.shape[0], max(product.x.shape[1] for product in products)
        if not reads_in_order(products) or not self._takes_streams(products):
            return False
        results = sum(product.out.shape[1] * (1 + bool(product.over_ranks)) for product in products)
        if _HEADER_BYTES + 4 * tokens * results > EXCHANGE_BYTES:
            return False
        code = self._gpu.library.operands[operand]
        columns = max((product.x.shape[1] for product in products if product.stream is not None), default=0)
        if self._gpu.library.product_chain_stages(inputs, columns, tokens, code) < _LEAST_STAGES:
            return False
        return all(self._takes_one(product, operand) for product in products)

    def _takes_streams(self, products: Sequence[Product]) -> bool:
        """Return whether no product adds to a stream, or two that the kernel supports: the second stores the
        stream, which every block must have read before.
        """
        adding = [i for i, product in enumerate(products) if product.stream is not None]
        parts = [i for i, product in enumerate(products) if product.over_ranks is not None]
        if not adding:
            return not parts
        if parts and (adding != [i + 1 for i in parts] or not _are_parts([products[i] for i in parts])):
            return False
        streams = [stream for product in products if (stream := product.stream) is not None]
        rows, first = streams[0][0], products[adding[0]]
        return (
            len(adding) == 2
            and adding[0] + 2 <= adding[1]
            and first.linear.weight.shape[0] >= 16 * self._gpu.gemm_device.multiprocessors
            and all(other.data_ptr() == rows.data_ptr() for other, _ in streams)
            and all(products[i].x.shape == rows.shape for i in adding)
            and all(parts if norm is None else norm.bias is None for _, norm in streams)
            and all(not _is_centred(products[i].norm) or streams[k][1] is None for k, i in enumerate(adding))
        )

    def _takes_one(self, product: Product, operand: str) -> bool:
        x, norm, (rows, inputs) = product.x, product.norm, product.linear.weight.shape
        if self._operand(product) != operand or product.activation not in ACTIVATIONS:
            return False
        if inputs % 128 or rows % (32 if product.activation in FUSED_GATES else 16):
            return False
        held = 8 * _HELD * _THREADS // _rounded_up(x.shape[0])
        if (norm is not None or product.stream is not None) and inputs > held:
            return False
        used = [x, product.out, *(() if product.residual is None else (product.residual,))]
        if product.stream is not None:
            used.append(product.stream[0])
        return all(
            tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and tensor.dtype == x.dtype
            for tensor in used
        )

    def _step(self, product: Product) -> Any:
        """Return a tridecode_chain_step."""
        linear, norm = product.linear, product.norm
        rows, outer = (None, None) if product.stream is None else product.stream
        return self._gpu.library.structures["tridecode_chain_step"](
            out=product.out.data_ptr(),
            x=product.x.data_ptr(),
            bias=pointer(linear.bias),
            residual=pointer(product.residual),
            norm_weight=0 if norm is None else norm.weight.data_ptr(),
            norm_bias=0 if norm is None else pointer(norm.bias),
            norm_eps=0.0 if norm is None else norm.eps,
            outer_weight=0 if outer is None else outer.weight.data_ptr(),
            outer_eps=0.0 if outer is None else outer.eps,
            stream=pointer(rows),
            inputs=linear.weight.shape[1],
            outputs=linear.weight.shape[0],
            activation=ACTIVATIONS[product.activation],
            over_ranks=int(product.over_ranks is not None),
            **self._kinds[linear.kind].chain_fields(linear),
        )


def _is_centred(norm: Norm | None) -> bool:
    return norm is not None and norm.bias is not None


def _are_parts(products: Sequence[Product]) -> bool:
    """Return whether the kernel can sum these over the ranks."""
    return all(
        product.over_ranks is not None
        and product.over_ranks.chain_fields is not None
        and product.residual is None
        and product.activation is None
        for product in products
    )


def _call(product: Product) -> Call:
    return Call(product.x, product.linear, product.out, product.norm, product.activation, product.residual)


def reads_in_order(products: Sequence[Product]) -> bool:
    """Return whether each GEMM reads the result of the one before it.

    The second may read earlier rows instead, if the third reads the result of the first and adds to that of
    the second. The third then begins when both are finished, so its result may replace the rows that the
    first has read.
    """
    follows = [_reads(after.x, before.out) for before, after in zip(products, products[1:])]
    if follows and not follows[0] and len(products) > 2:
        first, second, third = products[:3]
        if second.x.data_ptr() == first.out.data_ptr() or second.residual is None:
            return False
        # the third waits for the second's words as well
        also = third.residual is not None and _reads(third.residual, second.out)
        return also and _reads(third.x, first.out) and all(follows[2:])
    return all(follows)


def _reads(x: Tensor, out: Tensor) -> bool:
    return x.data_ptr() == out.data_ptr() and x.shape == out.shape


def _rounded_up(tokens: int) -> int:
    """Return the next power of two: the number of warp groups that quantise a token each."""
    return next(count for count in (1, 2, 4) if tokens <= count)
