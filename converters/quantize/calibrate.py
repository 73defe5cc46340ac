"""Quantises the layers' matrices of a checkpoint with statistics of texts, layer by layer.

Each layer runs over the texts twice: unquantised, for the statistics of its inputs, and quantised, for the
inputs of the next layer. Memory holds transformers' model, the hidden states of the texts, and one layer's
statistics, matrices and quantised matrices. Finished tensors are stored in files (store.TensorStore).

A tuning method runs each layer twice more: over the hidden states of the exact model, which are also held,
and rounded, for the error before tuning. Then all layers are tuned together (together.py), with the whole
model on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedTokenizerBase

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.base.host_memory import available_memory
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.resolved_settings import choose_device
from tridecode.backend.weights.reader import TORCH_DTYPES
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.progress import work_progress
from tridecode.converters.quantize.built_in_texts import BUILT_IN
from tridecode.converters.quantize.calibrated import Calibrated
from tridecode.converters.quantize.layers import LayerRun
from tridecode.converters.quantize.methods import Method
from tridecode.converters.quantize.products import ProductErrors, input_module, layer_run
from tridecode.converters.quantize.quantized_layer import QuantizedLayer, quantize_layer
from tridecode.converters.quantize.source_tensors import SourceTensors
from tridecode.converters.quantize.statistics import Collector, InputStatistics
from tridecode.converters.quantize.store import TensorStore
from tridecode.converters.quantize.structure import SharedInput, shared_inputs
from tridecode.converters.quantize.texts import (
    BUILT_IN_NOTE,
    check_texts,
    token_sequences,
)
from tridecode.converters.quantize.together import FirstStates, Together, free_memory, wanted_bytes, write
from tridecode.converters.quantize.tune import norms_of, output_error, tune
from tridecode.converters.tokenizers.files import load_tokenizer
from tridecode.kernels.formats.quantized import QuantizedWeight

_TUNING_SHARE = 0.9  # shares of a layer's time, for the progress
_TOGETHER_SHARE = 0.3  # share of the total time


def calibrate(
    planned: PlannedConversion,
    texts: list[str] | None,
    method: Method,
    tokenizer: PreTrainedTokenizerBase | None = None,
    folder: Path | None = None,
) -> Calibrated:
    """Quantise a checkpoint that plan_conversion accepted. texts: None: a built-in one, and a note that
    says so. tokenizer: None: the checkpoint's. folder: for finished tensors, as large as the quantised
    directory; None: the system's folder for temporary files.

    Raises UnsupportedError for pruned layers and for a weight directory, CheckpointError for inputs or
    weights that are not finite, or a layer that cannot be tuned, ConfigError for texts beyond the limits.
    """
    checkpoint, config = planned.checkpoint, planned.config
    if why := obstacle(planned):
        raise UnsupportedError(why)
    notes = [] if texts is not None else [BUILT_IN_NOTE]
    texts = BUILT_IN if texts is None else texts
    check_texts(texts, "calibration texts")
    sequences = token_sequences(
        texts,
        tokenizer or load_tokenizer(checkpoint),
        config.vocab_size,
        config.max_positions,
        method.most_tokens,
    )
    notes += _few_tokens(planned, method, sum(map(len, sequences)))
    model = checkpoint.reference_model(_dtype_that_fits(planned))
    matrices = sum(math.prod(item.spec.shape) for item in planned.conversions if item.spec.layer is not None)
    total = matrices * TORCH_DTYPES[config.weight_dtype].itemsize
    with work_progress(f"calibrating {method.name}", total) as progress:
        result = calibrate_model(model, planned, sequences, method, progress, folder=folder)
    result.notes += notes
    return result


def obstacle(planned: PlannedConversion) -> str:
    """Return the reason why the checkpoint cannot be calibrated; "" if none is known."""
    checkpoint = planned.checkpoint
    if checkpoint.plan is not None:
        wanted = "calibration needs the checkpoint that it was converted from"
        return f"{checkpoint.path} is a weight directory; {wanted}"
    if planned.config.layer_sizes:
        return f"{checkpoint.path} is pruned; calibration needs layers of equal sizes"
    return ""


def calibrate_model(
    model: Module,
    planned: PlannedConversion,
    sequences: list[list[int]],
    method: Method,
    progress: Callable[[int], None] = lambda done: None,
    device: torch.device | None = None,
    folder: Path | None = None,
) -> Calibrated:
    """Calibrate a model in memory, whose layers are quantised in place; see `calibrate`. sequences: token
    ids.

    Arithmetic is in float32, or float64 for a model in float64. device: runs the layers; None: a CUDA device
    if there is one.
    """
    config = planned.config
    specs = [item.spec for item in planned.conversions if item.spec.layer is not None]
    run, tensors, layers = layer_run(model, planned, sequences, device or choose_device(EngineConfig()))
    result = Calibrated(planned, method, sequences, TensorStore(folder))
    together = (
        FirstStates(run, folder) if method.tuning is not None and method.tuning.together_steps else None
    )
    rest = 0  # bytes to report while layers are tuned together
    itemsize = TORCH_DTYPES[config.weight_dtype].itemsize
    exact = list(run.states) if method.tuning is not None else None
    for index, layer in enumerate(layers):
        size = itemsize * sum(math.prod(spec.shape) for spec in specs if spec.layer == index)
        later = int(_TOGETHER_SHARE * size) if together is not None else 0
        done, rest = _Share(progress, size - later), rest + later
        with run.placed(layer):
            if exact is not None:
                exact = [output.cpu() for output in run.run(layer, index, exact)]
            inputs = shared_inputs(config, specs, index)
            # no variable keeps the statistics while those of the next layer are collected
            quantized = quantize_layer(
                method, tensors, inputs, _statistics(run, layer, index, inputs, tensors)
            )
            if exact is None:
                errors = quantized.errors()
                with errors.watching():
                    run.advance(layer, index)
            else:
                errors = _tune_layer(result, run, layer, index, quantized, exact, done, together)
            quantized.store(result.changed)
        result.errors.update(errors.relative())
        done(1.0)
    worse = [str(index) for index, (before, after) in enumerate(result.output_errors) if not after < before]
    if worse:
        result.notes.append(
            f"tuning made the error of the output no smaller in layers {', '.join(worse)}: they keep their "
            f"rounded values"
        )
    if together is not None and exact is not None:
        done = _Share(progress, rest)
        _tune_together(result, model, run, tensors, layers, exact, together, done)
        done(1.0)
    return result


def _statistics(
    run: LayerRun,
    layer: Module,
    index: int,
    inputs: Sequence[SharedInput],
    tensors: SourceTensors,
) -> list[InputStatistics]:
    """Run the layer and return the statistics of each of its inputs."""
    names = [input_module(tensors, shared) for shared in inputs]
    collector = Collector()
    with collector.watching({name: tensors.model.get_submodule(name) for name in names}):
        for _output in run.run(layer, index):
            pass
    return [collector.taken(name) for name in names]


class _Share:
    """Report the finished share of a part as bytes of progress."""

    def __init__(self, progress: Callable[[int], None], size: int):
        self._progress, self._size, self._reported = progress, size, 0

    def __call__(self, share: float) -> None:
        done = int(share * self._size)
        self._progress(done - self._reported)
        self._reported = done


def _tune_layer(
    result: Calibrated,
    run: LayerRun,
    layer: Module,
    index: int,
    quantized: QuantizedLayer,
    exact: list[Tensor],
    done: _Share,
    together: FirstStates | None,
) -> ProductErrors:
    """Tune a rounded layer and run it; undo the tuning if its output's error does not decrease.

    exact: its exact outputs. Returns the errors of its GEMMs.
    """
    method, tensors = result.method, quantized.tensors
    assert method.tuning is not None
    before = _output_error(run.run(layer, index), exact)
    rounded = {name: matrix.stored for name, matrix in quantized.matrices.items()}
    norms, dense = {name: tensors.read(name) for name in norms_of(tensors, index)}, set(quantized.dense)
    tuned = tune(
        run,
        layer,
        index,
        tensors,
        quantized.matrices,
        exact,
        method.grid,
        method.tuning,
        lambda share: done(_TUNING_SHARE * share),
    )
    quantized.replace(tuned)
    errors, outputs = _measured_run(run, layer, index, quantized)
    after = _output_error(outputs, exact)
    result.output_errors.append((before, after))
    if not after < before:
        quantized.replace({**rounded, **norms})
        quantized.dense = dense
        errors, outputs = _measured_run(run, layer, index, quantized)
    if together is not None:
        together.add(quantized)
    run.states = outputs
    return errors


def _tune_together(
    result: Calibrated,
    model: Module,
    run: LayerRun,
    tensors: SourceTensors,
    layers: Sequence[Module],
    exact: Sequence[Tensor],
    first: FirstStates,
    done: _Share,
) -> None:
    """Tune all layers, unless memory is short; undo the tuning if the divergence does not decrease.

    exact: the last layer's outputs.
    """
    method, config = result.method, result.planned.config
    assert method.tuning is not None
    longest = max(map(len, result.sequences))
    weights = sum(math.prod(tensors.spec(name).shape) for name in first.exact)
    wanted = wanted_bytes(
        model,
        weights,
        method.tuning.sequences(longest) * longest,
        config.hidden_size,
        config.num_layers,
        config.vocab_size,
    )
    free = free_memory(run.device)
    if wanted > free:
        found = f"{wanted / 2**30:,.1f} GiB of {run.device.type} memory, and {free / 2**30:,.1f} are free"
        result.notes.append(f"the layers were only tuned one by one: tuning them together needs {found}")
        return
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    model.to(run.device, run.dtype)
    rounded = {name: stored for name, stored in result.changed.items() if isinstance(stored, QuantizedWeight)}
    norms = {name: tensors.read(name) for index in range(len(layers)) for name in norms_of(tensors, index)}
    together = Together(model, run, tensors, result.sequences, exact)
    before = together.divergence()
    tuned = together.tune(rounded, list(norms), method.grid, method.tuning, done)
    write(tensors, tuned)
    after = together.divergence()
    result.divergences = before, after
    if after < before:
        for name, value in tuned.items():
            result.changed[name] = value.float().cpu() if isinstance(value, Tensor) else value
    else:
        result.notes.append(
            f"tuning the layers together made the divergence of {before:.3g} nats no smaller: "
            "they stay as before"
        )
        write(tensors, {**rounded, **norms})
    model.to(device, dtype)
    result.errors.update(first.errors(run, layers, tensors, result.changed))


def _measured_run(
    run: LayerRun, layer: Module, index: int, quantized: QuantizedLayer
) -> tuple[ProductErrors, list[Tensor]]:
    """Return the errors of the layer's GEMMs and its outputs, without advancing the run."""
    errors = quantized.errors()
    with errors.watching():
        outputs = [output.cpu() for output in run.run(layer, index)]
    return errors, outputs


def _output_error(outputs: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """The mean of tune.output_error over all tokens."""
    total, count = 0.0, 0
    for output, wanted in zip(outputs, exact):
        found = output_error(output, wanted.to(output.device))
        total, count = total + float(found.double().sum()), count + found.numel()
    return total / count


def _few_tokens(planned: PlannedConversion, method: Method, num_tokens: int) -> list[str]:
    """Return a warning if there are too few tokens for the method."""
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
