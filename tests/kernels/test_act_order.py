"""Weights in 4 bit whose groups are not consecutive inputs (GPTQ's act-order): columns sorted by their
groups, and products that take their inputs in that order, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.kernels.test_linear import HeadsCase, make_heads, norm64
from tests.kernels.test_packed_weight import quantized, read_back
from tridecode.kernels.formats.packed_weight import PackedWeight, has_uneven_groups, not_packed, pack
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.operands import Linear, Norm
from tridecode.kernels.scratch import arena_bytes

DTYPES = [torch.float16, torch.bfloat16]
#: columns of a group, whether groups have zeros
GROUPS = [(128, False), (128, True), (256, True), (64, False), (32, True)]


def shuffled(rows: int, columns: int, size: int, zeros: bool) -> QuantizedWeight:
    """Each column has a group of its own choice, and each group `size` columns; the last may have fewer."""
    weight = quantized("int4", rows, columns, size, zeros)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return replace(weight, groups=(torch.arange(columns) // size)[order].to(torch.int32))


# ---------------------------------------------------------------- without a GPU


@pytest.mark.parametrize("size, zeros", GROUPS)
@pytest.mark.parametrize("columns", [256, 512, 320])
def test_columns_are_sorted_by_their_groups(columns: int, size: int, zeros: bool) -> None:
    weight = shuffled(24, columns, size, zeros)
    assert not_packed(weight, torch.float16) == "" and not has_uneven_groups(weight)
    made = pack(weight, torch.float16)
    assert made.order is not None and made.order.dtype == torch.int32
    wanted = weight.expanded(torch.float64).numpy()[:, made.order.long().numpy()]
    assert sorted(made.order.tolist()) == list(range(columns))
    # scales are rounded to float16
    np.testing.assert_allclose(read_back(made), wanted, rtol=2**-10, atol=1e-12)


def test_groups_that_cannot_be_sorted_are_expanded() -> None:
    weight = shuffled(16, 512, 128, False)
    assert not has_uneven_groups(replace(weight, groups=None))
    groups = weight.groups.clone()
    groups[int((groups == 0).nonzero()[0])] = 1
    assert has_uneven_groups(replace(weight, groups=groups))
    rank = replace(weight, columns=256, values=weight.values[:, :128], groups=weight.groups[:256])
    assert not_packed(rank, torch.float16) == "groups that are not consecutive inputs"
    assert not_packed(replace(weight, group_size=0), torch.float16).startswith("groups that are not")


def test_memory_is_planned_from_shapes() -> None:
    weight = shuffled(24, 512, 128, True)
    fields = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in weight.__dict__.items()}
    assert pack(QuantizedWeight(**fields), torch.bfloat16).nbytes == pack(weight, torch.bfloat16).nbytes
    more, plain = arena_bytes(100, 4096, True), arena_bytes(100, 4096)
    assert more == {**plain, "ordered": 100 * 4096 * 2}


# ---------------------------------------------------------------- on a GPU


class Case:
    """A weight of unit variance, packed."""

    def __init__(self, place: Place, size: int, zeros: bool, inputs: int, outputs: int, dtype: torch.dtype):
        made = shuffled(outputs, inputs, size, zeros)
        spread = made.expanded().std().item() * inputs**0.5
        made = replace(made, scales=made.scales / spread)
        parts = {
            name: value.to(place.device) for name, value in made.__dict__.items() if torch.is_tensor(value)
        }
        self.weight = replace(made, **parts)
        self.bias = place.normal(outputs, dtype=dtype)
        self.linear = place.ops.pack(Linear(self.weight, self.bias), dtype)
        assert isinstance(self.linear.weight, PackedWeight) and self.linear.weight.order is not None

    def product64(self, x: Tensor) -> Tensor:
        return x.double() @ self.weight.expanded(torch.float64).t() + self.bias.double()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size, zeros", GROUPS)
@pytest.mark.parametrize("inputs, outputs", [(512, 264), (4096, 512), (14336, 128)])
def test_products(
    cuda_place: Place, inputs: int, outputs: int, size: int, zeros: bool, dtype: torch.dtype
) -> None:
    place = cuda_place
    case = Case(place, size, zeros, inputs, outputs, dtype)
    norm = Norm(place.normal(inputs, dtype=dtype), place.normal(inputs, dtype=dtype), 1e-5)
    for tokens in (1, 2, 3, 8, 17, 33, 64, 130, 257, 300):
        x = place.normal(tokens, inputs, dtype=dtype)
        out = place.normal(tokens, outputs, dtype=dtype)
        wanted = case.product64(x) + out.double()
        place.settle()
        place.ops.linear(x, case.linear, residual=out, out=out)
        assert_close("linear", out, wanted)
        place.ops.linear(x, case.linear, norm=norm, activation="relu", out=out)
        assert_close("linear", out, case.product64(norm64(x, norm)).relu())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size, zeros", GROUPS)
def test_swiglu(cuda_place: Place, size: int, zeros: bool, dtype: torch.dtype) -> None:
    place = cuda_place
    case = Case(place, size, zeros, 512, 2 * 1000, dtype)
    for tokens in (1, 7, 40, 256, 300):
        x, out = place.normal(tokens, 512, dtype=dtype), place.poison(tokens, 1000, dtype=dtype)
        place.settle()
        place.ops.linear(x, case.linear, activation="swiglu", out=out)
        gate, up = case.product64(x).chunk(2, dim=1)
        assert_close("two products", out, F.silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(8, 2, 128, 128, False), (2, 2, 256, 64, True)], ids=str)
def test_queries_and_keys(
    cuda_place: Place, heads: tuple[int, int, int, int, bool], dtype: torch.dtype
) -> None:
    for tokens in (1, 5, 40, 270):
        made: HeadsCase = make_heads(cuda_place, tokens, 512, heads, dtype)
        case = Case(cuda_place, 128, True, 512, made.heads.qkv_size, dtype)
        made.linear = case.linear
        out = made.project(cuda_place)
        dense = Linear(case.weight.expanded(torch.float64), case.bias)
        assert_close("linear", out, replace(made, linear=dense).wanted())
