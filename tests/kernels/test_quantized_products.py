"""GEMMs with quantised weights, and rounding to nearest, compared with float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.quantized import rounded_fp8, rounded_int4, rounded_int8
from tridecode.kernels import cpu
from tridecode.kernels.checks import DtypeError
from tridecode.kernels.cpu import Cpu
from tridecode.kernels.formats.round_to_nearest import round_blocks, round_to_nearest
from tridecode.kernels.operands import Linear
from tridecode.kernels.reference import Reference

#: float32 sums of 96 products of about 1
SUMS = 1e-4


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("columns", [96, 81])
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_rounded_weights_are_the_nearest_values(format: str, columns: int) -> None:
    weight = draw(40, columns)
    weight[7] = 0
    found = round_to_nearest(weight, format, 32).expanded(torch.float64)
    with np.errstate(invalid="ignore"):
        wanted = {"int8": rounded_int8, "fp8": rounded_fp8, "int4": lambda w: rounded_int4(w, 32)}[format](
            weight.numpy()
        )
    assert not found[7].any()
    np.testing.assert_allclose(found, np.nan_to_num(wanted), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(40, 81), (128, 128), (264, 144)])
def test_blocks_of_fp8_have_scales_of_their_own(shape: tuple[int, int]) -> None:
    weight = draw(*shape) * torch.logspace(-3, 3, shape[1])
    weight[:, 5], weight[:128, :128] = 0, weight[:128, :128] * 1e-4
    made = round_blocks(weight, 128, "fp8")
    assert made.scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128)) and made.activations == "fp8"
    found = made.expanded(torch.float64)
    for rows, columns in np.ndindex(*made.scales.shape):
        place = np.s_[rows * 128 : (rows + 1) * 128, columns * 128 : (columns + 1) * 128]
        block = weight[place].double()
        largest = block.abs().max()
        # half a step of E4M3: 1/16 of a value, or 2^-10 of the value that is stored as 448
        assert ((found[place] - block).abs() <= block.abs() / 16 + largest / 448 * 2**-9).all()
        assert found[place].abs().max() == pytest.approx(largest.item(), rel=1e-6)


def test_a_large_matrix_is_rounded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(40, 96)
    whole = round_to_nearest(weight, "int4", 32)
    monkeypatch.setattr("tridecode.kernels.formats.round_to_nearest._BLOCK_ELEMENTS", 7 * 96)
    blocks = round_to_nearest(weight, "int4", 32)
    assert torch.equal(whole.values, blocks.values) and torch.equal(whole.scales, blocks.scales)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_rounded_activations_do_not_hide_what_is_not_a_number(activations: str, bad: float) -> None:
    x = draw(3, 96)
    x[1, 5] = bad
    out = torch.empty(3, 40)
    Reference().linear(x, Linear(round_to_nearest(draw(40, 96, seed=1), "int8", 0, activations)), out=out)
    assert torch.isfinite(out[[0, 2]]).all() and torch.isnan(out[1]).all()


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(DtypeError, match="format is 'int3'; wanted int8, fp8 or int4"):
        round_to_nearest(draw(8, 8), "int3")


@pytest.mark.parametrize("activations", ["", "int8", "fp8"])
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("ops", [Reference(), Cpu(), Cpu(batch_invariant=True)])
@pytest.mark.parametrize("has_vnni", [False, True])
def test_products_are_those_of_the_rounded_matrices(
    ops: Reference, format: str, activations: str, has_vnni: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 outputs are more than a block of the CPU's int8 GEMM."""
    monkeypatch.setattr(cpu, "multiplies_int8", lambda: has_vnni)
    x, weight, bias, residual = draw(5, 96), draw(600, 96, seed=1), draw(600, seed=2), draw(5, 600, seed=3)
    quantized = round_to_nearest(weight, format, 32 if format == "int4" else 0, activations)
    linear = ops.pack(Linear(quantized, bias))
    out = residual.clone()
    ops.linear(x, linear, residual=out, out=out)
    rounded = {"": lambda a: a, "int8": rounded_int8, "fp8": rounded_fp8}[activations](x.numpy())
    wanted = rounded.astype(np.float64) @ quantized.expanded(torch.float64).numpy().T
    wanted += bias.numpy() + residual.numpy()
    np.testing.assert_allclose(out, wanted, atol=SUMS)


@pytest.mark.parametrize("rows", [3, 17, 40])
@pytest.mark.parametrize("columns", [16, 81, 1536])
def test_a_row_has_the_same_int8_product_beside_others(rows: int, columns: int, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "multiplies_int8", lambda: True)
    ops, x = Cpu(), draw(40, columns)
    linear = ops.pack(Linear(round_to_nearest(draw(50, columns, seed=1), "int8")))
    whole, part = torch.empty(40, 50), torch.empty(rows, 50)
    ops.linear(x, linear, out=whole)
    ops.linear(x[:rows], linear, out=part)
    assert torch.equal(part, whole[:rows])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("has_vnni", [False, True])
def test_an_int8_product_of_what_is_not_a_number_is_none(bad: float, has_vnni: bool, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "multiplies_int8", lambda: has_vnni)
    ops, x, out = Cpu(), draw(4, 96), torch.empty(4, 40)
    x[1, 7] = bad
    ops.linear(x, ops.pack(Linear(round_to_nearest(draw(40, 96, seed=1), "int8"))), out=out)
    assert out[0].isfinite().all() and not out[1].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_vnni", [False, True])
def test_16_bit_products_add_in_float32(dtype: torch.dtype, has_vnni: bool, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "multiplies_int8", lambda: has_vnni)
    x, weight = draw(3, 96).to(dtype), draw(64, 96, seed=1)
    quantized = round_to_nearest(weight, "int8")
    out = torch.empty(3, 32, dtype=dtype)
    ops = Cpu()
    ops.linear(x, ops.pack(Linear(quantized), dtype), activation="swiglu", out=out)
    product = x.double() @ quantized.expanded(torch.float64).t()
    gate, up = product[:, :32], product[:, 32:]
    wanted = gate * gate.sigmoid() * up
    assert (out.double() - wanted).abs().max() <= 3 * torch.finfo(dtype).eps * wanted.abs().max()
