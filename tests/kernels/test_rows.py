"""resolve_tokens, embed, gather_rows and norm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tridecode.kernels.checks import DtypeError, ShapeError
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.operands import Norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def test_unknown_tokens_become_the_newest_of_their_slot(place: Place):
    tokens = place.ints([7, -1, -1, -1, 5, -1])
    place.ops.resolve_tokens(tokens, place.ints([0, 3, -1, 1]), place.ints([10, 11, 12, 13]))
    assert tokens.tolist() == [7, 13, 0, 11, 5, -1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 111, 768])
def test_embed_adds_the_position(place: Place, columns: int, dtype: torch.dtype):
    table, places = place.normal(50, columns, dtype=dtype), place.normal(9, columns, dtype=dtype)
    ids, positions = place.ints([3, 49, 0, 3, 17]), place.ints([8, 0, 1, 2, 3])
    out = place.poison(5, columns, dtype=dtype)
    place.settle()
    place.ops.embed(ids, table, positions=positions, position_table=places, out=out)
    assert_close("embed", out, table.double()[ids.long()] + places.double()[positions.long()])
    place.ops.embed(ids, table, out=out)
    assert torch.equal(out, table[ids.long()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 111, 768])
def test_embed_reads_a_table_in_int8(place: Place, columns: int, dtype: torch.dtype):
    values = place.ints(torch.randint(-127, 128, (50, columns), generator=place.generator)).to(torch.int8)
    scales, places = place.normal(50, 1, dtype=torch.float32).abs(), place.normal(9, columns, dtype=dtype)
    table = QuantizedWeight("int8", columns, values, scales)
    ids, positions = place.ints([3, 49, 0, 3, 17]), place.ints([8, 0, 1, 2, 3])
    out = place.poison(5, columns, dtype=dtype)
    place.settle()
    wanted = (values.double() * scales.double())[ids.long()]
    place.ops.embed(ids, table, out=out)
    rounding = torch.finfo(dtype).eps
    assert ((out.double() - wanted).abs() <= rounding * wanted.abs()).all()
    place.ops.embed(ids, table, positions=positions, position_table=places, out=out)
    more = places.double()[positions.long()]
    assert ((out.double() - wanted - more).abs() <= rounding * (wanted.abs() + more.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 111])
@pytest.mark.parametrize("quantised", [False, True])
def test_a_table_of_some_ids_gives_zeros_for_the_others(
    place: Place, columns: int, dtype: torch.dtype, quantised: bool
) -> None:
    """The shares of three ranks add up to the look-up in the whole table."""
    whole, places = place.normal(48, columns, dtype=dtype), place.normal(9, columns, dtype=dtype)
    table = round_to_nearest(whole, "int8") if quantised else whole
    ids, positions = place.ints([16, 47, 0, 15, 31, 32]), place.ints([8, 0, 1, 2, 3, 5])
    parts, out = [], place.poison(6, columns, dtype=dtype)
    for first in (0, 16, 32):
        share = whole[first : first + 16].contiguous()
        if isinstance(table, QuantizedWeight):
            rows = slice(first, first + 16)
            share = replace(table, values=table.values[rows].contiguous(), scales=table.scales[rows])
        parts.append(place.poison(6, columns, dtype=dtype))
        place.settle()
        for more in ({}, {"positions": positions, "position_table": places}):
            place.ops.embed(ids, share, first_id=first, out=parts[-1], **more)
        mine = (ids >= first) & (ids < first + 16)
        assert not parts[-1][~mine].any() and mine.any()
    place.ops.embed(ids, table, positions=positions, position_table=places, out=out)
    assert torch.equal(torch.stack(parts).sum(0), out)


def test_embed_refuses_other_quantised_tables(place: Place):
    table = round_to_nearest(place.normal(50, 64, dtype=torch.float32), "fp8")
    out = place.poison(1, 64, dtype=torch.float32)
    with pytest.raises(ShapeError, match="table is fp8 .*wanted int8"):
        place.ops.embed(place.ints([3]), table, out=out)


@pytest.mark.parametrize("columns", [1, 8, 19, 256])
def test_gather_rows_takes_rows_in_any_order(place: Place, columns: int):
    x = place.normal(40, 300, dtype=torch.float16)[:, :columns]
    rows = place.ints([39, 0, 7, 7])
    out = place.poison(4, columns, dtype=torch.float16)
    place.ops.gather_rows(x, rows, out=out)
    assert torch.equal(out, x[rows.long()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("columns", [8, 64, 111, 768, 4096])
@pytest.mark.parametrize("tokens", [1, 19, 257])
def test_norm_matches_float64(place: Place, tokens: int, columns: int, bias: bool, dtype: torch.dtype):
    x = place.normal(tokens, columns, dtype=dtype, scale=3.0) + 2.0
    norm = Norm(
        place.normal(columns, dtype=dtype), place.normal(columns, dtype=dtype) if bias else None, 1e-5
    )
    x64, weight = x.double(), norm.weight.double()
    if norm.bias is not None:
        centred = x64 - x64.mean(-1, keepdim=True)
        wanted = (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + norm.bias.double()
        )
    else:
        wanted = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    place.settle()
    place.ops.norm(x, norm, out=x)  # in place
    assert_close("norm", x, wanted)


def test_a_norm_of_another_width_is_refused_by_name(place: Place):
    x = place.normal(2, 64, dtype=torch.float32)
    with pytest.raises(ShapeError, match="weight.shape.0. is 32"):
        place.ops.norm(x, Norm(place.normal(32, dtype=torch.float32), None, 1e-5), out=x)
    with pytest.raises(DtypeError, match="weight is torch.float16"):
        place.ops.norm(x, Norm(place.normal(64, dtype=torch.float16), None, 1e-5), out=x)
