"""Quantises the layers' matrices of a checkpoint with statistics of texts, layer by layer.

Each layer runs over the texts twice: as it is, for the statistics of its inputs, and quantised, for the
inputs of the next layer. Memory holds transformers' model, the hidden states of the texts, and of one layer
the statistics, the matrices and the quantised ones. What is finished lies in files (store.TensorStore).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedTokenizerBase

from tridecode.backend.config import EngineConfig
from tridecode.backend.engine.settings import choose_device
from tridecode.backend.errors import UnsupportedError
from tridecode.backend.host_memory import available_memory
from tridecode.backend.weights import TORCH_DTYPES
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.progress import byte_progress
from tridecode.converters.quantize.built_in_texts import BUILT_IN
from tridecode.converters.quantize.layers import LayerRun
from tridecode.converters.quantize.methods import Method
from tridecode.converters.quantize.products import ProductErrors, input_module, layer_run
from tridecode.converters.quantize.source_tensors import SourceTensors
from tridecode.converters.quantize.statistics import Collector, InputStatistics
from tridecode.converters.quantize.store import TensorStore
from tridecode.converters.quantize.structure import SharedInput, shared_inputs
from tridecode.converters.quantize.texts import BUILT_IN_NOTE, check_texts, token_sequences
from tridecode.converters.tokenizer import load_tokenizer
from tridecode.kernels.quantized import QuantizedWeight


@dataclass
class Calibrated:
    """The tensors of a quantised weight directory.

    changed: by target name, QuantizedWeight for the matrices that method.quantization covers, and other
    tensors with folded scales, float32. errors: of each quantised matrix, those of its products over the
    calibration set (products.ProductErrors), whose token ids are `sequences`.
    """

    planned: PlannedConversion
    method: Method
    sequences: list[list[int]]
    changed: TensorStore = field(default_factory=TensorStore)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    def conversion(self) -> PlannedConversion:
        """What writes the quantised directory."""
        config = replace(self.planned.config, quantization=self.method.quantization)
        return replace(
            self.planned,
            config=config,
            replaced=self.replaced,
            replaced_by=self._digest(),
            product_errors=dict(self.errors),
        )

    def replaced(self, name: str, dense: Callable[[], Tensor]) -> Tensor | QuantizedWeight:
        """A tensor of the directory; dense: makes what the checkpoint has."""
        return self.changed[name] if name in self.changed else dense()

    def _digest(self) -> str:
        """Of the method, the texts, and what tells one run's folding and grids from another's."""
        texts = f"{self.method.name} {self.sequences} {self.changed.digest()}"
        return hashlib.sha256(texts.encode()).hexdigest()


def calibrate(
    planned: PlannedConversion,
    texts: list[str] | None,
    method: Method,
    tokenizer: PreTrainedTokenizerBase | None = None,
    folder: Path | None = None,
) -> Calibrated:
    """Quantise a checkpoint that plan_conversion accepted. texts: None: a built-in one, and a note that
    says so. tokenizer: None: the checkpoint's. folder: for the files of what is finished, as large as the
    quantised directory; None: the system's for temporary files.

    Raises UnsupportedError for pruned layers and for a weight directory, CheckpointError for inputs or
    weights that are not finite, ConfigError for texts beyond the limits.
    """
    checkpoint, config = planned.checkpoint, planned.config
    if checkpoint.plan is not None:
        wanted = "calibration wants the checkpoint it was made from"
        raise UnsupportedError(f"{checkpoint.path} is a weight directory; {wanted}")
    if config.layer_sizes:
        raise UnsupportedError(f"{checkpoint.path} is pruned; calibration wants layers of equal sizes")
    notes = [] if texts is not None else [BUILT_IN_NOTE]
    texts = BUILT_IN if texts is None else texts
    check_texts(texts, "calibration texts")
    sequences = token_sequences(
        texts, tokenizer or load_tokenizer(checkpoint), config.vocab_size, config.max_positions
    )
    notes += _few_tokens(planned, method, sum(map(len, sequences)))
    model = checkpoint.reference_model(_dtype_that_fits(planned))
    matrices = sum(math.prod(item.spec.shape) for item in planned.conversions if item.spec.layer is not None)
    total = matrices * TORCH_DTYPES[config.weight_dtype].itemsize
    with byte_progress(f"calibrating {method.name}", total) as progress:
        result = calibrate_model(model, planned, sequences, method, progress, folder=folder)
    result.notes += notes
    return result


def calibrate_model(
    model: Module,
    planned: PlannedConversion,
    sequences: list[list[int]],
    method: Method,
    progress: Callable[[int], None] = lambda done: None,
    device: torch.device | None = None,
    folder: Path | None = None,
) -> Calibrated:
    """As `calibrate`, of a model in memory, whose layers are quantised in place. sequences: token ids.

    Arithmetic is in float32, or float64 for a model in float64. device: that layers run on; None: a CUDA
    device if there is one.
    """
    config = planned.config
    specs = [item.spec for item in planned.conversions if item.spec.layer is not None]
    run, tensors, layers = layer_run(model, planned, sequences, device or choose_device(EngineConfig()))
    result = Calibrated(planned, method, sequences, TensorStore(folder))
    itemsize = TORCH_DTYPES[config.weight_dtype].itemsize
    for index, layer in enumerate(layers):
        with run.placed(layer):
            inputs = shared_inputs(config, specs, index)
            # no name keeps the statistics while those of the next layer are collected
            errors = _quantize_layer(result, tensors, inputs, _statistics(run, layer, index, inputs, tensors))
            with errors.watching():
                run.advance(layer, index)
        result.errors.update(errors.relative())
        progress(itemsize * sum(math.prod(spec.shape) for spec in specs if spec.layer == index))
    return result


def _statistics(
    run: LayerRun,
    layer: Module,
    index: int,
    inputs: Sequence[SharedInput],
    tensors: SourceTensors,
) -> list[InputStatistics]:
    """Of each input of the layer."""
    names = [input_module(tensors, shared) for shared in inputs]
    collector = Collector()
    with collector.watching({name: tensors.model.get_submodule(name) for name in names}):
        for _output in run.run(layer, index):
            pass
    return [collector.taken(name) for name in names]


def _quantize_layer(
    result: Calibrated,
    tensors: SourceTensors,
    inputs: Sequence[SharedInput],
    statistics: list[InputStatistics],
) -> ProductErrors:
    """Fold all scales of a layer before rounding: a matrix can consume one scale and take back another.

    Returns what measures the products of the next run of the layer.
    """
    method, touched, errors = result.method, set[str](), ProductErrors()
    for number, shared in enumerate(inputs):
        if method.scales is not None and shared.makers:
            weights = [tensors.read(name).t() for name in shared.matrices]
            scales = method.scales(weights, statistics[number], method.grid)
            fold(tensors, shared, scales)
            statistics[number] = statistics[number].divided(scales)
            touched.update(shared.makers, shared.matrices)
    quantized = set()
    for shared, seen in zip(inputs, statistics):
        module = tensors.model.get_submodule(input_module(tensors, shared))
        for name in shared.matrices:
            if not method.quantization.covers(tensors.spec(name)):
                continue
            weight = tensors.read(name).t().contiguous()  # (out, in)
            stored = method.rounded(name, weight, seen)
            errors.expect(module, name, weight, stored)
            result.changed[name] = stored
            tensors.write(name, stored.expanded().to(weight.dtype).t())
            quantized.add(name)
    for name in touched - quantized:
        result.changed[name] = tensors.read(name).float().cpu()
    return errors


def fold(tensors: SourceTensors, shared: SharedInput, scales: Tensor) -> None:
    """Multiply the weights of each input by its scale (in,), and divide what makes the input."""
    for name in shared.matrices:
        tensors.write(name, tensors.read(name) * scales[:, None])
    for name in shared.makers:
        maker = tensors.read(name)
        maker[..., shared.first : shared.stop] /= scales
        tensors.write(name, maker)


def _few_tokens(planned: PlannedConversion, method: Method, num_tokens: int) -> list[str]:
    """A warning, if there are too few for the method."""
    covered = [item.spec for item in planned.conversions if method.quantization.covers(item.spec)]
    inputs = max((spec.shape[0] for spec in covered), default=0)
    wanted = method.tokens_per_input * inputs
    if num_tokens >= wanted:
        return []
    found = f"{num_tokens:,} calibration tokens are few for matrices of {inputs:,} inputs"
    return [f"{found}: {method.name} wants {wanted:,} or more, or loses on other texts"]


def _dtype_that_fits(planned: PlannedConversion) -> torch.dtype:
    """float32 if a model of it takes at most half the free memory, else the dtype of the files."""
    parameters = sum(math.prod(item.spec.shape) for item in planned.conversions)
    fits = 2 * 4 * parameters < available_memory()
    return torch.float32 if fits else TORCH_DTYPES[planned.config.weight_dtype]
