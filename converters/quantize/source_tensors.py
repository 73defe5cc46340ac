"""Reads and changes the tensors of transformers' model as those of a weight directory.

The rules of a family move elements (converters/rules.py); where each goes is found by applying them to
the numbers of the elements.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Module

from tridecode.backend.errors import UnsupportedError
from tridecode.backend.weight_layout import WeightSpec
from tridecode.converters.baichuan_reference import Reference as BaichuanReference
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.families import llama
from tridecode.converters.rules import Conversion, plan_conversions


class SourceTensors:
    """The tensors of a weight directory, in the parameters of transformers' model.

    Raises UnsupportedError if the model lacks a source of a tensor.
    """

    def __init__(self, model: Module, conversions: Iterable[Conversion]):
        self.model = model
        self._parameters = dict(model.named_parameters())
        self._conversions = {item.spec.name: item for item in conversions}
        for item in self._conversions.values():
            for name in item.sources:
                if name not in self._parameters:
                    raise UnsupportedError(
                        f"the model to calibrate has no {name}, which makes {item.spec.name}"
                    )

    def spec(self, name: str) -> WeightSpec:
        return self._conversions[name].spec

    def sources(self, name: str) -> tuple[str, ...]:
        return self._conversions[name].sources

    def read(self, name: str) -> Tensor:
        """A copy of the tensor, contiguous, in the dtype and on the device of the model."""
        made = self._made(name, [part.detach() for part in self._parts(name)])
        return made.clone(memory_format=torch.contiguous_format)

    def write(self, name: str, tensor: Tensor) -> None:
        """Change the model so that `read` gives this tensor, rounded to the model's dtype."""
        parts = self._parts(name)
        sizes = [part.numel() for part in parts]
        numbers = torch.arange(sum(sizes), device=parts[0].device).split(sizes)
        places = self._made(name, [number.reshape(part.shape) for number, part in zip(numbers, parts)])
        if tensor.ndim == 1:  # Gemma's norms: 1 + w
            added = self._made(name, [torch.zeros_like(part) for part in parts])
            places, tensor = (places - added).round(), tensor - added
        flat = torch.cat([part.detach().flatten() for part in parts])
        flat[places.long().flatten()] = tensor.to(flat).flatten()
        with torch.no_grad():
            for part, values in zip(parts, flat.split(sizes)):
                part.copy_(values.reshape(part.shape))

    def _parts(self, name: str) -> list[Tensor]:
        return [self._parameters[source] for source in self._conversions[name].sources]

    def _made(self, name: str, parts: list[Tensor]) -> Tensor:
        return self._conversions[name].transform(*parts)


def source_tensors(model: Module, planned: PlannedConversion) -> SourceTensors:
    """The layers' tensors, from the names of the model: transformers', but for Baichuan LLaMA's."""
    conversions = [item for item in planned.conversions if item.spec.layer is not None]
    if not isinstance(model, BaichuanReference):
        return SourceTensors(model, conversions)
    inner: Module = model.model
    shapes = {name: tuple(parameter.shape) for name, parameter in inner.named_parameters()}
    rules, specs = llama.rules(planned.config.num_heads), [item.spec for item in conversions]
    layers = planned.config.num_layers
    return SourceTensors(inner, plan_conversions(rules, specs, shapes, set(shapes), layers, "llama.py"))
