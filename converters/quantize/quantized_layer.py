"""A layer while it is quantised: scales folded, matrices rounded, perhaps replaced by tuned ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import Module

from tridecode.converters.quantize.methods import Method
from tridecode.converters.quantize.products import ProductErrors, input_module
from tridecode.converters.quantize.source_tensors import SourceTensors
from tridecode.converters.quantize.statistics import InputStatistics
from tridecode.converters.quantize.store import TensorStore
from tridecode.converters.quantize.structure import SharedInput
from tridecode.converters.quantize.tune import Rounded
from tridecode.kernels.formats.quantized import QuantizedWeight


class QuantizedLayer:
    """The changed tensors of a layer; the model holds the same tensors."""

    def __init__(self, tensors: SourceTensors) -> None:
        self.tensors = tensors
        self.matrices: dict[str, Rounded] = {}
        self.dense: set[str] = set()  # names of tensors that are not quantised
        self._modules: dict[str, Module] = {}  # modules that receive the matrices' inputs

    def round(self, name: str, module: Module, exact: Tensor, stored: QuantizedWeight) -> None:
        """exact: (out, in)."""
        self.matrices[name], self._modules[name] = Rounded(exact, stored), module
        self.tensors.write(name, stored.expanded().to(exact.dtype).t())

    def replace(self, tuned: Mapping[str, QuantizedWeight | Tensor]) -> None:
        """Replace levels and scales of matrices, and dense tensors."""
        for name, value in tuned.items():
            if isinstance(value, QuantizedWeight):
                self.round(name, self._modules[name], self.matrices[name].exact, value)
            else:
                self.tensors.write(name, value)
                self.dense.add(name)

    def module(self, name: str) -> Module:
        """Return the module that receives the matrix's input."""
        return self._modules[name]

    def errors(self) -> ProductErrors:
        """Return a recorder of the product errors in the layer's next run."""
        errors = ProductErrors()
        for name, matrix in self.matrices.items():
            errors.expect(self._modules[name], name, matrix.exact, matrix.stored)
        return errors

    def store(self, changed: TensorStore) -> None:
        for name, matrix in self.matrices.items():
            changed[name] = matrix.stored
        for name in sorted(self.dense - set(self.matrices)):
            changed[name] = self.tensors.read(name).float().cpu()


def quantize_layer(
    method: Method,
    tensors: SourceTensors,
    inputs: Sequence[SharedInput],
    statistics: list[InputStatistics],
) -> QuantizedLayer:
    """Fold all scales of a layer before rounding: a matrix can consume one scale and take back another."""
    result = QuantizedLayer(tensors)
    for number, shared in enumerate(inputs):
        if method.scales is not None and shared.makers:
            weights = [tensors.read(name).t() for name in shared.matrices]
            scales = method.scales(weights, statistics[number], method.grid)
            fold(tensors, shared, scales)
            statistics[number] = statistics[number].divided(scales)
            result.dense.update(shared.makers, shared.matrices)
    for shared, seen in zip(inputs, statistics):
        module = tensors.model.get_submodule(input_module(tensors, shared))
        for name in shared.matrices:
            if method.quantization.covers(tensors.spec(name)):
                weight = tensors.read(name).t().contiguous()  # (out, in)
                result.round(name, module, weight, method.rounded(name, weight, seen))
    return result


def fold(tensors: SourceTensors, shared: SharedInput, scales: Tensor) -> None:
    """Multiply the weights of each input by its scale (in,), and divide the tensors that produce the
    input.
    """
    for name in shared.matrices:
        tensors.write(name, tensors.read(name) * scales[:, None])
    for name in shared.makers:
        maker = tensors.read(name)
        maker[..., shared.first : shared.stop] /= scales
        tensors.write(name, maker)
