"""The calibration methods by name: the scales that they fold, and how they round a matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.weights.quantization import BLOCK, Quantization
from tridecode.converters.quantize.awq import awq_scales, clipped
from tridecode.converters.quantize.gptq import gptq
from tridecode.converters.quantize.method_names import METHODS
from tridecode.converters.quantize.rounding import Grid
from tridecode.converters.quantize.search import best_ranges
from tridecode.converters.quantize.smoothquant import searched_smoothing_scales, smoothing_scales
from tridecode.converters.quantize.statistics import InputStatistics
from tridecode.converters.quantize.texts import TOTAL_TOKENS
from tridecode.converters.quantize.tune import Tuning
from tridecode.kernels.formats.quantized import QuantizedWeight

#: maps matrices (out, in) with the same input, and its statistics, to (in,) scales
Scales = Callable[[Sequence[Tensor], InputStatistics, Grid], Tensor]
#: maps name and matrix (out, in), and the statistics of its input, to the quantised weight
Round = Callable[[str, Tensor, InputStatistics, Grid], QuantizedWeight]


@dataclass(frozen=True)
class Method:
    """A calibration method.

    scales: one per input, folded if a preceding tensor can undo them; None: nothing is folded. activations:
    as in QuantizedWeight. tokens_per_input: with fewer calibration tokens per input of a matrix the result
    can be worse than rounding to nearest. tuning: training of each layer after rounding; None: none.
    most_tokens: number of calibration tokens that the method uses at most.
    """

    name: str
    grid: Grid
    round: Round
    scales: Scales | None = None
    activations: str = ""
    tokens_per_input: int = 0
    tuning: Tuning | None = None
    most_tokens: int = TOTAL_TOKENS

    @property
    def quantization(self) -> Quantization:
        """Return the Quantization of the weight directory."""
        grid = self.grid
        return Quantization(
            grid.format, grid.group_size, grid.block_rows, grid.has_zeros, activations=self.activations
        )

    @property
    def folds(self) -> bool:
        """Return whether scales are folded, which changes the inputs of matrices."""
        return self.scales is not None

    def rounded(self, name: str, weight: Tensor, statistics: InputStatistics) -> QuantizedWeight:
        """Return the rounded weight. weight: (out, in), with folded scales."""
        stored = self.round(name, weight, statistics, self.grid)
        return replace(stored, activations=self.activations)


#: SmolLM2-135M, 1,536 inputs: 860 tokens reduced KL by a fifth, 500 increased it by 5 % on other texts
_GPTQ_TOKENS = 4
#: int8-gptq with fewer tokens per input damps the Hessian by this share of its mean diagonal instead of 0.01.
#: A few inputs with huge activations dominate the mean: errors at these inputs are still compensated, but
#: weights do not adapt to random directions of the texts. With 100 tokens for 1,536 inputs, matrix outputs of
#: SmolLM2-135M on other texts have 0.98 to 1.04 times the error of rounding to nearest, and 1.06 to 1.16
#: times with 0.01
_INT8_TOKENS, _FEW_TOKENS_DAMPING = 0.5, 1.0
#: levels trained on a layer's output overfit the texts: tuning needs more tokens than GPTQ benefits from
_TUNED_TOKENS = 512 * 1024
#: grid and activation format by method
_GPTQ = {
    "fp8-gptq": (Grid("fp8", 0, symmetric=True), ""),
    "w8a8-int8-gptq": (Grid("int8", 0, symmetric=True), "int8"),
    "w8a8-fp8-gptq": (Grid("fp8", 0, symmetric=True), "fp8"),
    "w8a8-fp8-blocks-gptq": (Grid("fp8", BLOCK, symmetric=True, block_rows=BLOCK), "fp8"),
}


def method_of(name: str, group_size: int = 128, tuning: Tuning = Tuning()) -> Method:
    """Return the method. group_size: for int4 methods. tuning: for methods that tune.

    Raises ConfigError for an unknown name or a wrong size.
    """
    if group_size < 1:
        raise ConfigError(f"the group size is {group_size}; wanted 1 or more")
    groups, per_output = Grid("int4", group_size), Grid("int8", 0, symmetric=True)
    if name == "int8-gptq":
        return Method(name, per_output, _damped_gptq)
    if name in _GPTQ:
        grid, activations = _GPTQ[name]
        return Method(name, grid, _gptq, None, activations, _GPTQ_TOKENS)
    if name == "int4-gptq":
        return Method(name, groups, _clipped_gptq, None, tokens_per_input=_GPTQ_TOKENS)
    if name == "int4-awq":
        return Method(name, groups, _clipped, _awq_scales)
    if name == "int4-awq-gptq":
        return Method(name, groups, _clipped_gptq, _awq_scales, tokens_per_input=_GPTQ_TOKENS)
    if name == "int4-tuned":
        return replace(
            method_of("int4-awq-gptq", group_size),
            name=name,
            tuning=tuning,
            most_tokens=_TUNED_TOKENS,
        )
    if name == "smoothquant":
        return Method(name, per_output, _nearest, _smoothing_scales, "int8")
    if name == "smoothquant-gptq":
        return Method(name, per_output, _gptq, _searched_scales, "int8", _GPTQ_TOKENS)
    raise ConfigError(f"calibration by {name!r}; wanted one of {', '.join(METHODS)}")


def _gptq(name: str, weight: Tensor, statistics: InputStatistics, grid: Grid) -> QuantizedWeight:
    return gptq(weight, statistics.hessian, grid)


def _damped_gptq(name: str, weight: Tensor, statistics: InputStatistics, grid: Grid) -> QuantizedWeight:
    if statistics.count >= _INT8_TOKENS * weight.shape[1]:
        return gptq(weight, statistics.hessian, grid)
    return gptq(weight, statistics.hessian, grid, damping=_FEW_TOKENS_DAMPING)


def _clipped_gptq(name: str, weight: Tensor, statistics: InputStatistics, grid: Grid) -> QuantizedWeight:
    shrink = best_ranges(weight, statistics.hessian, grid)
    return gptq(weight, statistics.hessian, grid, shrink=shrink)


def _awq_scales(weights: Sequence[Tensor], statistics: InputStatistics, grid: Grid) -> Tensor:
    return awq_scales(weights, statistics.hessian, statistics.mean_abs, grid)


def _clipped(name: str, weight: Tensor, statistics: InputStatistics, grid: Grid) -> QuantizedWeight:
    """Clip, except queries and keys, as in AWQ: the loss does not model the product of these two."""
    if ".query_key_value." in name:
        return grid.rounded(weight)
    return clipped(weight, statistics.hessian, grid)


def _smoothing_scales(weights: Sequence[Tensor], statistics: InputStatistics, grid: Grid) -> Tensor:
    return smoothing_scales(weights, statistics.max_abs)


def _searched_scales(weights: Sequence[Tensor], statistics: InputStatistics, grid: Grid) -> Tensor:
    return searched_smoothing_scales(weights, statistics.max_abs, statistics.sample, grid, "int8")


def _nearest(name: str, weight: Tensor, statistics: InputStatistics, grid: Grid) -> QuantizedWeight:
    return grid.rounded(weight)
