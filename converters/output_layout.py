"""Placement of the sources' outputs by a conversion.

A rule's transform of a weight (out, in) reorders only outputs, so applying it to a matrix that contains the
index of each output shows where the outputs go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tridecode.converters.rules import Conversion

Runs = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class OutputLayout:
    """Placement of the outputs of a conversion's sources. runs: as in LoraTargets.layouts. conv1d: the
    sources are (in, out), as in transformers' Conv1D.
    """

    runs: Runs
    conv1d: bool


def output_layout(conversion: Conversion, shapes: list[tuple[int, ...]]) -> OutputLayout | None:
    """Return the layout of a conversion of matrices; None if it does more than reorder outputs."""
    for conv1d in (False, True):
        outputs = [shape[1] if conv1d else shape[0] for shape in shapes]
        if {shape[0] if conv1d else shape[1] for shape in shapes} != {conversion.spec.shape[0]}:
            continue
        starts = np.cumsum([1, *outputs])  # 0 stands for an output that no source makes
        try:
            places = _moved(conversion, starts, conv1d)
        except (ArithmeticError, IndexError, RuntimeError, ValueError):
            continue
        if places is not None and places.min() >= 0 and places.max() < starts[-1]:
            return OutputLayout(_runs(places, starts), conv1d)
    return None


def _moved(conversion: Conversion, starts: np.ndarray, conv1d: bool) -> np.ndarray | None:
    """Return the index of the source's output at each output of the target; None if inputs are moved or
    values changed.

    The transform is applied to whole matrices of single bytes of the indices, which need the least memory.
    """
    inputs, outputs = conversion.spec.shape
    places = np.zeros(outputs, np.int64)
    for byte in range(3):
        rows = [torch.arange(first, stop) >> 8 * byte & 255 for first, stop in zip(starts, starts[1:])]
        made = conversion.transform(*(_matrix(row, inputs, conv1d) for row in rows))
        if made.shape != (inputs, outputs) or not torch.equal(made, made[:1].expand_as(made)):
            return None
        places += made[0].numpy().astype(np.int64) << 8 * byte
    used = torch.from_numpy(places > 0)
    for byte in range(3 if inputs > 1 else 1):
        column = (torch.arange(inputs) + 1 >> 8 * byte & 255).to(torch.uint8)
        matrices = [_matrix(column, stop - first, not conv1d) for first, stop in zip(starts, starts[1:])]
        made = conversion.transform(*matrices)
        if not torch.equal(made, column[:, None] * used):
            return None
    return places


def _matrix(values: Tensor, count: int, along_columns: bool) -> Tensor:
    """`values`, as bytes, repeated: (n, count), or (count, n) if they run along columns."""
    values = values.to(torch.uint8)
    return values.expand(count, -1) if along_columns else values[:, None].expand(-1, count)


def _runs(places: np.ndarray, starts: np.ndarray) -> Runs:
    modules = np.searchsorted(starts, places, side="right") - 1
    firsts = np.where(modules < 0, 0, places - starts[np.maximum(modules, 0)])
    breaks = np.flatnonzero((np.diff(modules) != 0) | ((np.diff(firsts) != 1) & (modules[1:] >= 0))) + 1
    edges = [0, *breaks.tolist(), len(places)]
    return tuple((int(modules[low]), int(firsts[low]), high - low) for low, high in zip(edges, edges[1:]))
