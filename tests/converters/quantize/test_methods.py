"""The methods over single matrices, against float64 written out step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.quantized import rounded_fp8_blocks
from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.quantize.awq import awq_scales, clipped
from tridecode.converters.quantize.gptq import gptq
from tridecode.converters.quantize.methods import method_of
from tridecode.converters.quantize.rounding import Grid
from tridecode.converters.quantize.smoothquant import searched_smoothing_scales, smoothing_scales
from tridecode.converters.quantize.statistics import SAMPLE, Collector, InputStatistics
from tridecode.kernels.formats.quantized import QuantizedWeight

OUT, IN, TOKENS = 24, 96, 400


def weight_of(seed: int, out: int = OUT, inputs: int = IN) -> Tensor:
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs_of(seed: int, inputs: int = IN, tokens: int = TOKENS) -> Tensor:
    """(tokens, inputs): correlated, and of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, inputs, generator=generator, dtype=torch.float64)
    mixed = mixed @ torch.randn(inputs, inputs, generator=generator, dtype=torch.float64) / inputs**0.5
    return (
        mixed
        * torch.linspace(0.2, 3, inputs, dtype=torch.float64)[torch.randperm(inputs, generator=generator)]
    )


def hessian_of(x: Tensor) -> Tensor:
    return x.T @ x / x.shape[0]


def error_of(weight: Tensor, rounded: Tensor, x: Tensor) -> float:
    """||(W - Wq) x|| / ||W x||."""
    return float(((weight - rounded.double()) @ x.T).norm() / (weight @ x.T).norm())


def written_out(weight: Tensor, group_size: int, format: str, symmetric: bool) -> Tensor:
    """Rounding to nearest, number by number."""
    out = torch.empty_like(weight)
    for row in range(weight.shape[0]):
        for first in range(0, weight.shape[1], group_size or weight.shape[1]):
            group = weight[row, first : first + (group_size or weight.shape[1])]
            least, most, zero = -127, 127, 0
            if format == "int4":
                least, most, zero = 0, 15, 8
            largest = float(group.abs().max())
            step = largest / (7.5 if format == "int4" else 127)
            if not symmetric:
                low, high = min(float(group.min()), 0.0), max(float(group.max()), 0.0)
                step = (high - low) / 15
            step = float(torch.tensor(step, dtype=torch.float32))  # as it is stored
            if not symmetric:
                zero = round(-low / step)
            for column, number in enumerate(group.tolist()):
                level = min(max(round(number / step) + zero, least), most)
                out[row, first + column] = (level - zero) * step
    return out


@pytest.mark.parametrize("columns", [96, 90, 33])
@pytest.mark.parametrize(
    "format, group_size, symmetric",
    [("int4", 32, False), ("int4", 32, True), ("int8", 0, True), ("int8", 32, True), ("int4", 0, False)],
)
def test_rounding_to_nearest_is_the_formula(
    format: str, group_size: int, symmetric: bool, columns: int
) -> None:
    weight = weight_of(1, 5, columns)
    weight[0] = weight[0].abs()  # a row without negative weights
    stored = Grid(format, group_size, symmetric).rounded(weight)
    wanted = written_out(weight, group_size, format, symmetric)
    assert stored.shape == (5, columns)
    assert (stored.zeros is not None) == (not symmetric)
    torch.testing.assert_close(stored.expanded(torch.float64), wanted, rtol=1e-6, atol=1e-6)


def test_fp8_rounds_to_e4m3() -> None:
    weight = weight_of(2)
    stored = Grid("fp8", 0, symmetric=True).rounded(weight)
    scales = (weight.abs().amax(1, keepdim=True) / 448).float()
    assert torch.equal(stored.scales, scales)
    # a number has 3 bits behind the leading one: an error of 1/16 at most, where it is not subnormal
    error = (stored.expanded().double() - weight).abs()
    assert (error <= weight.abs() / 16 + scales * 2**-10).all()
    assert float(stored.expanded().abs().max()) == pytest.approx(float(weight.abs().max()))


def test_a_group_of_zeros_stays_zero() -> None:
    weight = torch.zeros(4, 64)
    weight[:, 32:] = 1.0
    for symmetric in (True, False):
        assert (Grid("int4", 32, symmetric).rounded(weight).expanded()[:, :32] == 0).all()


def brain_surgeon(
    weight: Tensor,
    hessian: Tensor,
    group_size: int,
    act_order: bool,
    static: bool,
    damping: float = 0.01,
    ranges: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Optimal brain quantisation in one order, with the inverse Hessian of the rest at each step.

    ranges: (out, G), of the grids as shares of the whole ones. Returns the rounded matrix and the group of
    each column. Asymmetric int4.
    """
    count = weight.shape[1]
    order = sorted(range(count), key=lambda j: -float(hessian[j, j])) if act_order else list(range(count))
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(count, dtype=torch.float64)
    rest, result = weight.clone(), torch.empty_like(weight)
    grids: dict[int, list[tuple[float, int]]] = {}
    group_of = torch.empty(count, dtype=torch.int64)
    for place, column in enumerate(order):
        left = order[place:]
        inverse = torch.linalg.inv(damped[left][:, left])
        group = (column if static else place) // group_size
        group_of[column] = group
        if group not in grids:
            members = range(group * group_size, min((group + 1) * group_size, count))
            columns = list(members) if static else [order[member] for member in members]
            shares = [1.0] * len(weight) if ranges is None else ranges[:, group].tolist()
            rows = (weight if static else rest)[:, columns].tolist()
            grids[group] = [_grid(row, share) for row, share in zip(rows, shares)]
        for row in range(weight.shape[0]):
            step, zero = grids[group][row]
            level = min(max(round(float(rest[row, column]) / step) + zero, 0), 15)
            result[row, column] = (level - zero) * step
        error = (rest[:, column] - result[:, column]) / inverse[0, 0]
        rest[:, left] -= error[:, None] * inverse[0]
    return result, group_of


def _grid(numbers: list[float], share: float = 1.0) -> tuple[float, int]:
    low, high = min([0.0, *numbers]) * share, max([0.0, *numbers]) * share
    step = float(torch.tensor((high - low) / 15, dtype=torch.float32))
    return step, round(-low / step)


@pytest.mark.parametrize("group_size", [32, 128, 24])
@pytest.mark.parametrize("act_order, static", [(False, False), (True, False), (True, True)])
def test_gptq_is_optimal_brain_quantisation(group_size: int, act_order: bool, static: bool) -> None:
    """150 inputs: more than a block of GPTQ's, and a last group that is not whole."""
    weight, x = weight_of(3, 6, 150), inputs_of(4, 150)
    hessian = hessian_of(x)
    stored = gptq(weight, hessian, Grid("int4", group_size), act_order, static)
    wanted, group_of = brain_surgeon(weight, hessian, group_size, act_order, static)
    torch.testing.assert_close(stored.expanded(torch.float64), wanted, rtol=1e-6, atol=1e-6)
    if act_order and not static:
        assert stored.groups is not None and torch.equal(stored.groups.long(), group_of)
    else:
        assert stored.groups is None and stored.group_size == group_size


@pytest.mark.parametrize("group_size", [32, 128])
def test_gptq_takes_ranges_of_its_groups(group_size: int) -> None:
    weight, hessian = weight_of(23, 6, 150), hessian_of(inputs_of(24, 150))
    ranges = torch.linspace(0.5, 1.0, 6 * -(-150 // group_size), dtype=torch.float64).view(6, -1)
    stored = gptq(weight, hessian, Grid("int4", group_size), shrink=ranges[..., None])
    wanted, _ = brain_surgeon(weight, hessian, group_size, True, True, ranges=ranges)
    torch.testing.assert_close(stored.expanded(torch.float64), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "format, group_size, symmetric",
    [("int4", 32, False), ("int4", 32, True), ("int8", 0, True), ("fp8", 0, True)],
)
@pytest.mark.parametrize("act_order, static", [(False, False), (True, False), (True, True)])
def test_gptq_errs_less_than_rounding(
    format: str, group_size: int, symmetric: bool, act_order: bool, static: bool
) -> None:
    weight, x, unseen = weight_of(5), inputs_of(6)[:300], inputs_of(6)[300:]
    grid = Grid(format, group_size, symmetric)
    stored = gptq(weight.float(), hessian_of(x).float(), grid, act_order, static)
    nearest = grid.rounded(weight)
    assert stored.format == format and stored.expanded().isfinite().all()
    for inputs in (x, unseen):
        gained = error_of(weight, stored.expanded(), inputs) / error_of(weight, nearest.expanded(), inputs)
        assert gained < 0.9


@pytest.mark.parametrize("out, inputs", [(256, 384), (200, 300)])
def test_gptq_of_fp8_blocks_has_the_blocks_scales_and_a_smaller_error(out: int, inputs: int) -> None:
    weight, x = weight_of(21, out, inputs), inputs_of(22, inputs, 4 * inputs)
    stored = gptq(weight, hessian_of(x), Grid("fp8", 128, symmetric=True, block_rows=128))
    assert (stored.group_size, stored.block_rows) == (128, 128)
    for row in range(0, out, 128):
        for column in range(0, inputs, 128):
            largest = weight[row : row + 128, column : column + 128].abs().max()
            assert stored.scales[row // 128, column // 128] == pytest.approx(float(largest) / 448, rel=1e-6)
    nearest = torch.from_numpy(rounded_fp8_blocks(weight.float().numpy()))
    assert error_of(weight, stored.expanded(), x) < 0.8 * error_of(weight, nearest, x)


@pytest.mark.parametrize("format, group, rows", [("int8", 128, 128), ("fp8", 0, 128), ("fp8", 128, 64)])
def test_other_blocks_are_not_a_grid(format: str, group: int, rows: int) -> None:
    with pytest.raises(ValueError, match=f"block_rows {rows}, group_size {group}; wanted square blocks"):
        Grid(format, group, symmetric=True, block_rows=rows)


def test_inputs_that_were_never_seen_are_rounded_to_nearest() -> None:
    weight, x = weight_of(7), inputs_of(8)
    x[:, [3, 40]] = 0
    stored = gptq(weight, hessian_of(x), Grid("int4", 32))
    nearest = Grid("int4", 32).rounded(weight)
    assert torch.equal(stored.expanded()[:, [3, 40]], nearest.expanded()[:, [3, 40]])


def test_fewer_tokens_than_inputs_are_enough() -> None:
    weight, x = weight_of(9), inputs_of(10)[:5]
    stored = gptq(weight.float(), hessian_of(x).float(), Grid("int4", 32))
    nearest = Grid("int4", 32).rounded(weight)
    assert error_of(weight, stored.expanded(), x) < 0.3 * error_of(weight, nearest.expanded(), x)


def test_a_hessian_with_nan_is_refused() -> None:
    hessian = hessian_of(inputs_of(1))
    hessian[4, 4] = torch.nan
    with pytest.raises(CheckpointError, match="not finite"):
        gptq(weight_of(1), hessian, Grid("int4", 32))


def outliers(seed: int) -> Tensor:
    """Inputs, a few of them 30 times as large as the others."""
    x = torch.randn(TOKENS, IN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[:, [5, 37, 70]] *= 30
    return x


def test_awq_errs_less_than_rounding_where_inputs_have_outliers() -> None:
    weight, x = weight_of(11), outliers(12)
    grid = Grid("int4", 32)
    scales = awq_scales([weight], hessian_of(x), x.abs().mean(0), grid)
    assert (scales[[5, 37, 70]] > 2 * scales.median()).all()
    stored = grid.rounded(weight * scales)
    unseen = outliers(13)
    nearest = error_of(weight, grid.rounded(weight).expanded(), unseen)
    assert error_of(weight, stored.expanded().double() / scales, unseen) < 0.6 * nearest


def test_awq_leaves_matrices_alone_where_no_scale_helps() -> None:
    weight = torch.zeros(OUT, IN, dtype=torch.float64)  # nothing is rounded
    x = outliers(14)
    assert torch.equal(
        awq_scales([weight], hessian_of(x), x.abs().mean(0), Grid("int4", 32)), torch.ones(IN).double()
    )


@pytest.mark.parametrize("columns", [96, 90])
@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_has_the_least_error_of_all_ranges(symmetric: bool, columns: int) -> None:
    """Each range by itself; inputs of different groups are uncorrelated, as clipping supposes."""
    weight = weight_of(15, 5, columns)
    weight[:, ::32] *= 6
    weight[2] = 0
    grid = Grid("int4", 32, symmetric)
    hessian = torch.zeros(columns, columns, dtype=torch.float64)
    for first in range(0, columns, 32):
        part = inputs_of(first, min(32, columns - first))
        hessian[first : first + 32, first : first + 32] = hessian_of(part)
    found = clipped(weight, hessian, grid).expanded().double() - weight
    losses = []
    for step in range(21):
        error = grid.rounded(weight, 1 - step / 40).expanded().double() - weight
        blocks = range(0, columns, 32)
        losses.append([_loss(error[:, i : i + 32], hessian[i : i + 32, i : i + 32]) for i in blocks])
    blocks = range(0, columns, 32)
    mine = torch.stack([_loss(found[:, i : i + 32], hessian[i : i + 32, i : i + 32]) for i in blocks])
    least = torch.stack([torch.stack(row) for row in losses]).amin(0)
    torch.testing.assert_close(mine, least, rtol=1e-4, atol=1e-9)
    whole = torch.stack(losses[0])
    assert mine[:, [0, 1, 3, 4]].sum() < 0.9 * whole[:, [0, 1, 3, 4]].sum()


def _loss(error: Tensor, hessian: Tensor) -> Tensor:
    return torch.einsum("oi,ij,oj->o", error, hessian, error)


def test_smoothing_is_the_papers_formula() -> None:
    weights, x = [weight_of(16), weight_of(17, 7)], outliers(18)
    weights[0][:, 20] = weights[1][:, 20] = 0
    largest = x.abs().amax(0)
    largest[30] = 0
    found = smoothing_scales(weights, largest, 0.5)
    wanted = [
        float(largest[j]) ** 0.5 / max(float(weight[:, j].abs().max()) for weight in weights) ** 0.5
        if j not in (20, 30)
        else 1.0
        for j in range(IN)
    ]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


def test_smoothing_lets_outliers_fit_8_bit() -> None:
    """W8A8 by hand: per-token inputs and per-output weights, with and without smoothing."""
    weight, x = weight_of(19) / 10, outliers(20)
    scales = smoothing_scales([weight], x.abs().amax(0))
    exact = x @ weight.T
    plain = _int8(x) @ _int8(weight).T - exact
    smoothed = _int8(x / scales) @ _int8(weight * scales).T - exact
    assert smoothed.norm() < 0.5 * plain.norm()


@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_the_searched_smoothing_has_the_least_error_of_all(activations: str) -> None:
    weights, x = [weight_of(27) / 10, weight_of(28, 7)], outliers(29)
    grid, exact = Grid("int8", 0, symmetric=True), [x @ weight.T for weight in weights]

    def error(scales: Tensor) -> float:
        rounded = _int8(x / scales) if activations == "int8" else _fp8(x / scales)
        products = [rounded @ _int8(weight * scales).T for weight in weights]
        return sum(float((a - b).square().sum()) for a, b in zip(products, exact))

    found = searched_smoothing_scales(weights, x.abs().amax(0), x, grid, activations)
    each = [smoothing_scales(weights, x.abs().amax(0), step / 20) for step in range(21)]
    least = min(map(error, [torch.ones(IN, dtype=torch.float64), *each]))
    assert error(found) == pytest.approx(least, rel=1e-4)
    if activations == "int8":
        assert least < 0.98 * error(each[10])  # of the paper's alpha, 0.5


def test_no_smoothing_where_it_only_loses() -> None:
    """Inputs and weights of one size each: every scale makes one of them uneven."""
    x = torch.randint(0, 2, (TOKENS, IN), generator=torch.Generator().manual_seed(30)).double() * 2 - 1
    weight = torch.where(weight_of(31) > 0, 1.0, -1.0).double()
    found = searched_smoothing_scales([weight], x.abs().amax(0), x, Grid("int8", 0, True), "int8")
    assert torch.equal(found, torch.ones(IN, dtype=torch.float64))


@pytest.mark.parametrize("calls", [[SAMPLE // 2], [300] * 3 + [1, 40_000, 7, 20_000]])
def test_the_sample_is_of_all_inputs_alike(calls: list[int]) -> None:
    module, collector, total = torch.nn.Identity(), Collector(), 0
    with collector.watching({"x": module}):
        for count in calls:
            module(torch.arange(total, total + count, dtype=torch.float64).repeat(2, 1).T[None])
            total += count
    sample = collector.taken("x").sample
    assert sample.shape == (min(total, SAMPLE), 2) and sample[:, 0].unique().numel() == len(sample)
    # the mean of 1,024 of 61,000 numbers drawn at random: half of the largest, to 4 standard errors
    assert float(sample.mean()) == pytest.approx(total / 2, rel=4 * 3**-0.5 / 32)


def test_a_full_sample_takes_inputs_in_its_place_and_changes_no_input() -> None:
    """The first call fills it exactly."""
    module, collector = torch.nn.Identity(), Collector()
    calls = [inputs_of(32, 2, SAMPLE), inputs_of(33, 2, 1), inputs_of(34, 2, 4 * SAMPLE)]
    given, places = [x.clone() for x in calls], set()
    with collector.watching({"x": module}):
        for x in given:
            module(x)
            sums = collector._sums["x"].sums
            assert sums is not None
            places.add(sums.sample.data_ptr())
    sample = collector.taken("x").sample
    assert len(places) == 1 and sample.shape == (SAMPLE, 2)
    assert all(torch.equal(x, call) for x, call in zip(given, calls))
    later = (sample[:, None] == calls[2]).all(-1).any(-1)
    assert 0.7 < float(later.double().mean()) < 0.9  # 4 of 5 inputs


def _fp8(rows: Tensor) -> Tensor:
    steps = rows.abs().amax(1, keepdim=True) / 448
    return (rows / steps).float().to(torch.float8_e4m3fn).double() * steps


def _int8(rows: Tensor) -> Tensor:
    steps = rows.abs().amax(1, keepdim=True) / 127
    return (rows / steps).round() * steps


def inputs_with_huge_ones(seed: int, tokens: int) -> Tensor:
    """Return (tokens, 96) normal random numbers, with three huge inputs in the first token."""
    x = torch.randn(tokens, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x[0, [5, 40, 77]] = torch.tensor([500.0, -700.0, 300.0], dtype=torch.float64)  # the same in every text
    return x


@pytest.mark.parametrize("seed", range(4))
def test_few_tokens_make_int8_gptq_compensate_huge_activations_alone(seed: int) -> None:
    """Its error for other inputs is close to rounding to nearest; the published GPTQ has a larger error."""
    weight, x, others = weight_of(seed, 48, 96), *(inputs_with_huge_ones(10 * seed + i, 40) for i in (0, 1))
    method = method_of("int8-gptq")

    def errors(found: QuantizedWeight) -> tuple[float, float]:
        """Return the error norms at the huge activations and at other tokens."""
        difference = others @ (found.expanded(torch.float64) - weight).T
        return float(difference[0].norm()), float(difference[1:].norm())

    statistics = InputStatistics(x.T @ x / 40, x.abs().mean(0), x.abs().amax(0), x, count=40)
    few = errors(method.rounded("m", weight, statistics))
    nearest = errors(method.grid.rounded(weight))
    published = errors(gptq(weight, statistics.hessian, method.grid))
    assert few[0] < 0.8 * nearest[0]
    assert few[1] < 1.1 * nearest[1]
    assert few[1] < published[1] + 1e-9
    many = replace(statistics, count=48)
    assert torch.equal(
        method.rounded("m", weight, many).values, gptq(weight, statistics.hessian, method.grid).values
    )
