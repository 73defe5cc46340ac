"""Reads and changes the tensors of transformers' model in the layout of a weight directory.

The rules of a family move elements (converters/rules.py), so the derivative of a rule moves them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Module

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.weights.layout import WeightSpec
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.families import llama
from tridecode.converters.references.baichuan import Reference as BaichuanReference
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

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's parameters."""
        return next(iter(self._parameters.values())).dtype

    def names(self) -> list[str]:
        return list(self._conversions)

    def spec(self, name: str) -> WeightSpec:
        return self._conversions[name].spec

    def sources(self, name: str) -> tuple[str, ...]:
        return self._conversions[name].sources

    def parameters(self, name: str) -> dict[str, Tensor]:
        """Map each source to the parameter that the model holds."""
        return dict(zip(self.sources(name), self._parts(name)))

    def of_sources(self, sources: Iterable[str]) -> list[Tensor]:
        return [self._parameters[source] for source in sources]

    def gradient(self, name: str, gradients: Mapping[str, Tensor]) -> Tensor:
        """The derivative with respect to the tensor. gradients: by source, those of its parameters."""
        found = self._made(name, [gradients[source] for source in self.sources(name)])
        if found.ndim == 1:  # Gemma's norms: 1 + w
            found = found - self._made(name, [torch.zeros_like(part) for part in self._parts(name)])
        return found

    def read(self, name: str) -> Tensor:
        """A copy of the tensor, contiguous, in the dtype and on the device of the model."""
        made = self._made(name, [part.detach() for part in self._parts(name)])
        return made.clone(memory_format=torch.contiguous_format)

    def write(self, name: str, tensor: Tensor) -> None:
        """Change the model so that `read` gives this tensor, rounded to the model's dtype."""
        own = self._owned(name)
        with torch.no_grad():
            for source, values in self.parts(name, tensor).items():
                held = self._parameters[source]
                held.copy_(torch.where(own[source], values, held) if source in own else values)

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Map each source to the parameter values from which `read` makes this tensor; 0 instead of other
        tensors. Differentiable; views of the tensor if the rule returns views.
        """
        if tensor.ndim == 1:  # Gemma's norms: 1 + w
            tensor = tensor - self._made(name, [torch.zeros_like(part) for part in self._parts(name)])
        return self._moved_back(name, tensor)

    def others(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Map each source that contributes to other tensors too to its values; 0 in the place of `names`."""
        found: dict[str, Tensor] = {}
        for name in names:
            for source, own in self._owned(name).items():
                found[source] = found.get(source, self._parameters[source].detach()).masked_fill(own, 0)
        return found

    def _owned(self, name: str) -> dict[str, Tensor]:
        """Map each source to a mask of the elements that make the tensor; empty if it does not share its
        sources with other tensors.
        """
        ones = torch.ones(self.spec(name).shape, device=self._parts(name)[0].device)
        found = self._moved_back(name, ones)
        whole = sum(part.numel() for part in found.values()) == ones.numel()
        return {} if whole else {source: part != 0 for source, part in found.items()}

    def _moved_back(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        held = [part.detach().requires_grad_() for part in self._parts(name)]
        with torch.enable_grad():
            made = self._made(name, held)
        found = torch.autograd.grad(
            made, held, tensor.to(made), create_graph=tensor.requires_grad, allow_unused=True
        )
        return {source: part for source, part in zip(self.sources(name), found) if part is not None}

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
