"""Trains the rounded layers of a model together so that its next tokens are distributed as the exact model's.

The second phase of EfficientQAT (Chen et al. 2024, https://arxiv.org/abs/2407.11062), which trains scales but
not levels, with the exact model's distribution instead of the text (Hinton et al. 2015,
https://arxiv.org/abs/1503.02531), and norms too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence

from tridecode.backend.base.host_memory import available_memory
from tridecode.converters.quantize.layers import LayerRun
from tridecode.converters.quantize.products import MEASURED_TOKENS, ProductErrors
from tridecode.converters.quantize.quantized_layer import QuantizedLayer
from tridecode.converters.quantize.rounding import Grid
from tridecode.converters.quantize.source_tensors import SourceTensors
from tridecode.converters.quantize.store import TensorStore
from tridecode.converters.quantize.tune import (
    Losses,
    Trained,
    Tuning,
    optimizer_of,
    set_rates,
    training_arithmetic,
)
from tridecode.kernels.formats.quantized import QuantizedWeight

_COMPARED = 32  # sequences, before and after
#: bytes of a rounded weight in float32: the model's value, its level, and both once more with gradients
_WEIGHT_BYTES = 28
#: float32 values of a token: the logits of both models, their logarithms, gradients
_LOGITS = 8
#: activations kept for gradients, per token and layer, in units of hidden states
_STATES = 40


def divergences(exact: Tensor, logits: Tensor) -> Tensor:
    """Return (..., V) -> (...), the KL divergence of the exact distribution from the other, in nats."""
    wanted, found = exact.log_softmax(-1), logits.log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1)


def wanted_bytes(model: Module, matrices: int, tokens: int, hidden: int, layers: int, vocabulary: int) -> int:
    """matrices: rounded weights in all. tokens: of a step."""
    others = 4 * sum(parameter.numel() for parameter in model.parameters()) - 4 * matrices
    return others + _WEIGHT_BYTES * matrices + 4 * tokens * (_LOGITS * vocabulary + _STATES * hidden * layers)


class Together:
    """A model whose layers are rounded, on the device of the run.

    sequences: token ids. exact: the exact model's last-layer outputs, (1, T, C).
    """

    def __init__(
        self,
        model: Module,
        run: LayerRun,
        tensors: SourceTensors,
        sequences: Sequence[list[int]],
        exact: Sequence[Tensor],
    ):
        self._model, self._run, self._tensors = model, run, tensors
        self._sequences, self._exact = sequences, exact

    def divergence(self) -> float:
        """Return the mean divergence over the tokens of evenly spread sequences."""
        count = min(_COMPARED, len(self._sequences))
        total, tokens = 0.0, 0
        with torch.no_grad():
            for number in range(count):
                found = self._divergences([number * len(self._sequences) // count])
                total, tokens = total + float(found.double().sum()), tokens + found.numel()
        return total / tokens

    def tune(
        self,
        matrices: Mapping[str, QuantizedWeight],
        norms: Sequence[str],
        grid: Grid,
        tuning: Tuning,
        progress: Callable[[float], None] = lambda share: None,
    ) -> dict[str, QuantizedWeight | Tensor]:
        """Train and return the matrices and norms by name. The model's own tensors are changed during the
        training.

        Raises CheckpointError if the divergence is not finite. On one device the result depends only on the
        arguments.
        """
        placed = {name: _on(self._run.device, matrix) for name, matrix in matrices.items()}
        trained = Trained(self._tensors, placed, norms, grid)
        optimizer = optimizer_of(trained, tuning.together_rate)
        count = tuning.sequences(max(map(len, self._sequences)))
        sources = sorted({source for name in trained.tensors() for source in self._tensors.sources(name)})
        parameters = self._tensors.of_sources(sources)
        random = torch.Generator().manual_seed(tuning.seed)
        steps = tuning.together_steps
        losses = Losses("all layers: the divergence", steps, self._run.device, progress)
        wants = [parameter.requires_grad for parameter in self._model.parameters()]
        self._model.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_()
        with training_arithmetic(self._run.device):
            for step in range(steps):
                at = torch.randint(len(self._sequences), (count,), generator=random).tolist()
                made = trained.tensors()
                for name, tensor in made.items():
                    self._tensors.write(name, tensor.detach())
                loss = self._divergences(at).mean()
                found = dict(zip(sources, torch.autograd.grad(loss, parameters)))
                gradients = [self._tensors.gradient(name, found) for name in made]
                set_rates(optimizer, tuning.share(step, steps))
                optimizer.zero_grad()
                torch.autograd.backward(list(made.values()), gradients)
                optimizer.step()
                losses.add(step, loss)
        for parameter, wanted in zip(self._model.parameters(), wants):
            parameter.requires_grad_(wanted)
        return trained.stored()

    def _divergences(self, at: Sequence[int]) -> Tensor:
        """Return the divergence of each token of these sequences, concatenated. Padding comes after the
        tokens, where a causal model does not attend to it.
        """
        device = self._run.device
        chosen = [self._sequences[number] for number in at]
        ids = pad_sequence([torch.tensor(each) for each in chosen], batch_first=True).to(device)
        counted = torch.zeros(ids.shape, dtype=torch.bool)
        for row, each in enumerate(chosen):
            counted[row, : len(each)] = True
        counted = counted.to(device)
        states = pad_sequence([self._exact[number][0] for number in at], batch_first=True)
        with torch.no_grad():
            exact = self._run.head(states.to(device, self._run.dtype), ids)[counted]
        return divergences(exact, self._model(ids, use_cache=False).logits[counted])


class FirstStates:
    """Data for measuring the products again after the layers were tuned together: the exact matrices (out,
    in) by name, the modules that receive their inputs, and the states before the first layer.

    folder: for the matrices, in files.
    """

    def __init__(self, run: LayerRun, folder: Path | None):
        self.exact = TensorStore(folder)
        self._modules: dict[str, Module] = {}
        self._states: list[Tensor] = []
        for state in run.states:
            if sum(each.shape[1] for each in self._states) < MEASURED_TOKENS:
                self._states.append(state)

    def add(self, quantized: QuantizedLayer) -> None:
        for name, matrix in quantized.matrices.items():
            self.exact[name] = matrix.exact
            self._modules[name] = quantized.module(name)

    def errors(
        self,
        run: LayerRun,
        layers: Sequence[Module],
        tensors: SourceTensors,
        changed: Mapping[str, Tensor | QuantizedWeight],
    ) -> dict[str, float]:
        """Return the relative errors of all products (ProductErrors) of the model in its present state.
        changed: the tensors that it holds.
        """
        run.states, found = list(self._states), dict[str, float]()
        for index, layer in enumerate(layers):
            errors = ProductErrors()
            with run.placed(layer):
                for name, exact in self.exact.items():
                    stored = changed[name]
                    if tensors.spec(name).layer == index:
                        assert isinstance(exact, Tensor) and isinstance(stored, QuantizedWeight)
                        weight = exact.to(run.device, run.dtype)
                        errors.expect(self._modules[name], name, weight, _on(run.device, stored))
                with errors.watching():
                    run.advance(layer, index)
            found.update(errors.relative())
        return found


def write(tensors: SourceTensors, values: Mapping[str, Tensor | QuantizedWeight]) -> None:
    """values: matrices as stored, or dense."""
    for name, value in values.items():
        dense = value.expanded().t() if isinstance(value, QuantizedWeight) else value
        tensors.write(name, dense.to(tensors.read(name)))


def free_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return available_memory()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _on(device: torch.device, stored: QuantizedWeight) -> QuantizedWeight:
    zeros = None if stored.zeros is None else stored.zeros.to(device)
    return replace(stored, values=stored.values.to(device), scales=stored.scales.to(device), zeros=zeros)
