"""Writes a quantised checkpoint without requantising: its matrices are only reordered by the family's
rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.output_layout import OutputLayout, output_layout
from tridecode.converters.quantized_rules import joined, keeps_blocks
from tridecode.converters.rules import Conversion
from tridecode.converters.sources.quantized import QuantizedSource
from tridecode.kernels.formats.quantized import QuantizedWeight


def keep_quantized(planned: PlannedConversion) -> PlannedConversion:
    """Return a plan that writes the layers' matrices in the checkpoint's own quantisation; nothing is written
    yet.

    Raises UnsupportedError with the reason for a checkpoint that can only be written in 16 or 32 bit: it is
    not quantised, its method has no format in the weight directory, some of its matrices are not quantised or
    their groups cannot be joined, or a conversion rule changes values.
    """
    source = planned.checkpoint.tensors
    if not isinstance(source, QuantizedSource):
        raise UnsupportedError(f"{planned.checkpoint.path} is not quantised")
    quantization = source.method.kept
    if quantization is None:
        raise UnsupportedError(f"{source.method.title}: weight directories have no such format")
    kept = _Kept(planned, source, quantization).checked()
    config = replace(planned.config, quantization=kept.quantization)
    return replace(planned, config=config, replaced=kept.written)


def kept_or_dense(planned: PlannedConversion) -> tuple[PlannedConversion, str]:
    """Return `keep_quantized`'s plan if possible, else the plan unchanged, and a sentence that explains which
    and why.
    """
    try:
        kept = keep_quantized(planned)
    except UnsupportedError as error:
        return planned, f"quantised matrices are dequantised to {planned.config.weight_dtype}: {error}"
    quantization = kept.config.quantization
    assert quantization is not None
    rounded = f"; activations are quantised to {quantization.activations}" if quantization.activations else ""
    return kept, f"matrices of layers: {quantization.weights}, as the checkpoint has them{rounded}"


@dataclass(frozen=True)
class _Item:
    """One matrix to write: its sources by the checkpoint's names, and the placement of their outputs."""

    sources: list[str]
    layout: OutputLayout
    shape: tuple[int, int]  # (in, out)


class _Kept:
    def __init__(self, planned: PlannedConversion, source: QuantizedSource, quantization: Quantization):
        self._planned, self._source, self.quantization = planned, source, quantization
        self._items: Mapping[str, _Item] = {}

    def checked(self) -> _Kept:
        covered = [item for item in self._planned.conversions if self.quantization.covers(item.spec)]
        self._items = {item.spec.name: self._item(item) for item in covered}
        if not self._items:
            raise UnsupportedError(f"{self._planned.checkpoint.path} has no matrix that can be quantised")
        ordered = [self._has_act_order(item) for item in self._items.values()]
        rows = self.quantization.block_rows
        if not all(self._keeps_blocks(item, rows) for item in self._items.values()):
            rows = 1
        self.quantization = replace(self.quantization, act_order=any(ordered), block_rows=rows)
        return self

    def _item(self, item: Conversion) -> _Item:
        own = [self._planned.names[name] for name in item.sources]
        dense = [name for name in own if not self._source.is_quantized(name)]
        if dense:
            raise UnsupportedError(f"{dense[0]} is not quantised, and others are")
        layout = output_layout(item, [self._source.shapes[name] for name in own])
        if layout is None or any(module < 0 for module, _, _ in layout.runs):
            raise UnsupportedError(
                f"{item.spec.name} is more than outputs of {', '.join(own)} in another order"
            )
        inputs, outputs = item.spec.shape
        return _Item(own, layout, (inputs, outputs))

    def _has_act_order(self, item: _Item) -> bool:
        groups = [self._source.groups(name) for name in item.sources]
        first = groups[0]
        for name, other in zip(item.sources, groups):
            alike = other is None if first is None else other is not None and torch.equal(first, other)
            if not alike:
                raise UnsupportedError(
                    f"{item.sources[0]} and {name} become one matrix, but have other groups"
                )
        return first is not None

    def _keeps_blocks(self, item: _Item, rows: int) -> bool:
        axis = 1 if item.layout.conv1d else 0
        outputs = [self._source.shapes[name][axis] for name in item.sources]
        return keeps_blocks(item.layout, outputs, rows)

    def written(self, name: str, dense: Callable[[], Tensor]) -> Tensor | QuantizedWeight:
        """Return the value to write for the target `name`, as PlannedConversion.replaced does."""
        item = self._items.get(name)
        if item is None:
            return dense()
        held = [self._source.quantized(source) for source in item.sources]
        weight = joined(item.layout, [part for part in held if part is not None])
        assert weight is not None and weight.shape == item.shape[::-1], name
        return self._in_format(weight, item)

    def _in_format(self, weight: QuantizedWeight, item: _Item) -> QuantizedWeight:
        """Return `weight` with the parts that all matrices of the directory have."""
        wanted, (inputs, outputs) = self.quantization, item.shape
        zeros, groups, scales = weight.zeros, weight.groups, weight.scales
        if zeros is not None and not wanted.zeros:
            where = self._planned.checkpoint.path
            raise CheckpointError(f"{where}: {item.sources[0]} has zeros; its config.json says symmetric")
        if wanted.zeros and zeros is None:
            zeros = torch.full((outputs, scales.shape[1]), 8.0)
        if wanted.act_order and groups is None:
            groups = torch.arange(inputs, dtype=torch.int32) // (wanted.group or inputs)
        if wanted.block_rows < weight.block_rows:
            scales = scales.repeat_interleave(weight.block_rows, 0)[:outputs]
        return replace(weight, zeros=zeros, groups=groups, scales=scales, block_rows=wanted.block_rows)
