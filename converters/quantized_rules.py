"""Applies a family's rules to quantised matrices: outputs are reordered and joined, with their scales and
zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tridecode.converters.output_layout import OutputLayout
from tridecode.kernels.formats.quantized import QuantizedWeight


def joined(layout: OutputLayout, weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Return the matrix (out, in) that a conversion makes of its sources (out, in), without rounding.

    None if they cannot be joined: different formats, groups or inputs, or outputs without a source. Blocks of
    rows that the layout splits get a scale for each row.
    """
    first = weights[0]
    if not all(_alike(first, weight) for weight in weights) or any(run[0] < 0 for run in layout.runs):
        return None
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        zeros = _rows(layout, [_zeros(weight) for weight in weights])
    block = first.block_rows if keeps_blocks(layout, [w.shape[0] for w in weights], first.block_rows) else 1
    if block == first.block_rows:
        scales = _rows(layout, [weight.scales for weight in weights], block)
    else:
        scales = _rows(layout, [_scale_of_each_row(weight) for weight in weights])
    return QuantizedWeight(
        first.format,
        first.columns,
        _rows(layout, [weight.values for weight in weights]),
        scales,
        zeros,
        first.group_size,
        first.groups,
        block,
        first.activations,
    )


def keeps_blocks(layout: OutputLayout, outputs: Sequence[int], block: int) -> bool:
    """Return whether blocks of `block` rows stay whole. outputs: number of outputs of each source."""
    end = 0
    for number, (module, start, count) in enumerate(layout.runs):
        last = number == len(layout.runs) - 1 and start + count == outputs[module]
        if start % block or end % block or (count % block and not last):
            return False
        end += count
    return True


def _alike(first: QuantizedWeight, other: QuantizedWeight) -> bool:
    def traits(weight: QuantizedWeight) -> tuple:
        return weight.format, weight.columns, weight.group_size, weight.block_rows, weight.activations

    if traits(first) != traits(other) or (first.groups is None) != (other.groups is None):
        return False
    return first.groups is None or other.groups is None or torch.equal(first.groups, other.groups)


def _rows(layout: OutputLayout, sources: Sequence[Tensor], block: int = 1) -> Tensor:
    """The rows of `sources`, or of their blocks, in the order of the layout."""
    runs = layout.runs
    parts = [sources[module][start // block : -(-(start + count) // block)] for module, start, count in runs]
    return torch.cat(parts)


def _zeros(weight: QuantizedWeight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    middle = 8.0 if weight.format == "int4" else 0.0
    return torch.full((weight.shape[0], weight.scales.shape[1]), middle)


def _scale_of_each_row(weight: QuantizedWeight) -> Tensor:
    return weight.scales.repeat_interleave(weight.block_rows, 0)[: weight.shape[0]]
