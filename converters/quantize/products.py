"""Measures the error that each quantised GEMM adds, on a model's inputs for given token ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.models import read_model_config
from tridecode.backend.models.quantized_parts import read_quantized
from tridecode.backend.weights.reader import WeightReader
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.quantize.layers import LayerRun, find_layers
from tridecode.converters.quantize.source_tensors import SourceTensors, source_tensors
from tridecode.converters.quantize.structure import SharedInput, shared_inputs
from tridecode.kernels.formats.quantized import QuantizedWeight, as_rounded

MEASURED_TOKENS = 4096  # of a calibration set: two more products of each matrix


@dataclass
class _Product:
    exact: Tensor  # (out, in)
    stored: Tensor  # (out, in), expanded
    activations: str
    activation_group: int
    error: float = 0.0  # sums of squares over the tokens
    whole: float = 0.0

    def add(self, x: Tensor) -> None:
        """x: (T, in)."""
        rounded = as_rounded(x, self.activations, self.activation_group) if self.activations else x
        wanted = x @ self.exact.t()
        error = rounded @ self.stored.t() - wanted
        self.error += float(error.double().square().sum())
        self.whole += float(wanted.double().square().sum())


class ProductErrors:
    """||Wq q(x) - W x|| / ||W x|| of the matrices of one layer, over its first `most` tokens.

    W, Wq: before and after quantisation. q: rounds x where the format rounds activations, else nothing.
    """

    def __init__(self, most: int = MEASURED_TOKENS):
        self._products: dict[Module, dict[str, _Product]] = {}
        self._most = most

    def expect(self, module: Module, name: str, exact: Tensor, stored: QuantizedWeight) -> None:
        """module: the module that receives x. name: the matrix's name. exact: (out, in), in the dtype of
        x.
        """
        expanded = stored.expanded().to(exact)
        self._products.setdefault(module, {})[name] = _Product(
            exact, expanded, stored.activations, stored.activation_group
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure while the block runs the modules."""
        with ExitStack() as stack:
            for module, products in self._products.items():
                handle = module.register_forward_pre_hook(self._hook(list(products.values())))
                stack.callback(handle.remove)
            yield

    def _hook(self, products: Sequence[_Product]) -> Callable[[Module, tuple], None]:
        left = self._most

        def measure(_module: Module, args: tuple) -> None:
            nonlocal left
            x = args[0].detach().flatten(0, -2)[:left]
            left -= x.shape[0]
            if x.shape[0]:
                for product in products:
                    product.add(x)

        return measure

    def relative(self) -> dict[str, float]:
        """Return the relative error of the products by matrix name. Raises CheckpointError for products that
        are not finite.
        """
        found = {}
        for products in self._products.values():
            for name, product in products.items():
                if not math.isfinite(product.error) or not math.isfinite(product.whole):
                    shape = tuple(product.exact.shape)
                    raise CheckpointError(f"{name} {shape} gives products that are not finite")
                found[name] = math.sqrt(product.error / product.whole) if product.whole > 0 else 0.0
        return found


def layer_run(
    model: Module, planned: PlannedConversion, sequences: list[list[int]], device: torch.device
) -> tuple[LayerRun, SourceTensors, list[Module]]:
    """A run over a model's layers, its tensors by the names of `planned`, and the layers.

    Raises UnsupportedError if the model has other tensors than the conversion.
    """
    config = planned.config
    tensors = source_tensors(model, planned)
    specs = [item.spec for item in planned.conversions if item.spec.layer == 0]
    first = [source for spec in specs for source in tensors.sources(spec.name)]
    layers = find_layers(tensors.model, config.num_layers, first)
    held = next(model.parameters()).dtype
    dtype = torch.float64 if held == torch.float64 else torch.float32
    return LayerRun(model, layers, sequences, device, dtype), tensors, layers


def input_module(tensors: SourceTensors, shared: SharedInput) -> str:
    """The name of a module that gets the input."""
    return tensors.sources(shared.matrices[0])[0].removesuffix(".weight")


@torch.no_grad()
def directory_errors(
    model: Module,
    planned: PlannedConversion,
    directory: Path,
    sequences: list[list[int]],
    device: torch.device,
) -> Mapping[str, float]:
    """The errors of all matrices of a quantised directory whose conversion folds nothing, on the inputs that
    the source has.

    model: the source on the CPU, which is not changed. Layers run on `device`, one at a time. Raises
    UnsupportedError as layer_run does.
    """
    quantization = planned.config.quantization
    assert quantization is not None
    run, tensors, layers = layer_run(model, planned, sequences, device)
    reader = WeightReader(directory, read_model_config(directory))
    specs = [item.spec for item in planned.conversions if item.spec.layer is not None]
    found: dict[str, float] = {}
    for index, layer in enumerate(layers):
        with run.placed(layer):
            errors = ProductErrors()
            for shared in shared_inputs(planned.config, specs, index):
                module = tensors.model.get_submodule(input_module(tensors, shared))
                for name in shared.matrices:
                    spec = tensors.spec(name)
                    if quantization.covers(spec):
                        stored = read_quantized(
                            spec, quantization, lambda part: reader.read(reader.specs[part]), 0, 1
                        )
                        errors.expect(module, name, tensors.read(name).t(), stored)
            with errors.watching():
                run.advance(layer, index)
        found.update(errors.relative())
    return found
