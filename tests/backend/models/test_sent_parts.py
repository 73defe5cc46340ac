"""Parts of a sum over tensor ranks that the operations may send themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tridecode.backend.engine.adapters.adapted_ops import AdaptedOps
from tridecode.backend.models.context import Context
from tridecode.backend.models.layers import add_linears
from tridecode.kernels.operands import Linear, Norm
from tridecode.kernels.reference import Reference

TOKENS, COLUMNS, INPUTS = 3, 8, 16


class SendingOps(Reference):
    """Sends the parts that it is asked to send. asked: their linears."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Linear] = []

    def linear_sending(self, x, linear, sums, *, out) -> bool:
        self.asked.append(linear)
        self.linear(x, linear, out=out)
        return True


class Sums:
    """Records the calls of add_rows."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def add_rows(self, partial, biases, residual, norm, **named) -> None:
        self.calls.append({"partial": partial.clone(), "biases": biases, "norm": norm, **named})


def make_context(ops) -> tuple[Context, Sums]:
    sums = Sums()
    ranks = SimpleNamespace(tensor_size=2, tensor_rank=0, row_sums=lambda x: sums)
    work = SimpleNamespace(delta=torch.zeros(TOKENS + 1, COLUMNS))
    batch = SimpleNamespace(num_tokens=TOKENS)
    return Context(ops, cast(Any, ranks), cast(Any, work), cast(Any, batch)), sums


def make_product(generator: torch.Generator) -> tuple[torch.Tensor, Linear]:
    weight, bias = torch.randn(COLUMNS, INPUTS, generator=generator), torch.ones(COLUMNS)
    return torch.randn(TOKENS, INPUTS, generator=generator), Linear(weight, bias)


@pytest.mark.parametrize("count", [1, 2])
def test_the_only_part_of_a_sum_is_sent_without_its_bias(count: int) -> None:
    """The second of two products adds to the first: neither is sent."""
    generator, ops = torch.Generator().manual_seed(0), SendingOps()
    context, sums = make_context(ops)
    products = [make_product(generator) for _ in range(count)]
    residual, norm = torch.zeros(TOKENS, COLUMNS), Norm(torch.ones(COLUMNS), None, 1e-5)
    rows = add_linears(context, residual, *products, norm=norm)
    (call,) = sums.calls
    torch.testing.assert_close(call["partial"], sum(x @ linear.dense.t() for x, linear in products))
    assert call["sent"] == (count == 1) and call["follows_product"]
    assert call["biases"] == [linear.bias for _, linear in products]
    assert [linear.bias for linear in ops.asked] == [None] * (count == 1)
    assert call["out"] is residual and rows.x is call["normed"] and rows.norm is None
    assert call["normed"].data_ptr() == context.work.delta.data_ptr()


def test_rows_with_adapters_are_not_sent_by_the_product_alone() -> None:
    numbers, starts = np.array([-1], np.int32), np.array([0, TOKENS], np.int32)
    ops = SendingOps()
    adapted = AdaptedOps(ops, numbers, starts, {}, torch.device("cpu"))
    context, sums = make_context(cast(Any, adapted))
    add_linears(context, torch.zeros(TOKENS, COLUMNS), make_product(torch.Generator().manual_seed(1)))
    assert not ops.asked and not sums.calls[0]["sent"]
