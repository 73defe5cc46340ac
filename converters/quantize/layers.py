"""Runs the decoder layers of transformers' model one by one over the calibration set.

Each layer gets what the model gives it (masks, positions): all layers are called once with their real
arguments, but compute nothing, and the arguments are kept. They depend on the length of a sequence only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from tridecode.backend.errors import UnsupportedError

_HEADS = ("lm_head", "embed_out")


class LayerRun:
    """The hidden states of the calibration set, (1, T, C) for each sequence, in front of the next layer.

    They are kept on the CPU. Layers run on `device` in `dtype`.
    """

    def __init__(
        self,
        model: Module,
        layers: Sequence[Module],
        sequences: list[list[int]],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._device, self._dtype = device, dtype
        self.states: list[Tensor] = []
        self._arguments: dict[int, list[_Arguments]] = {}  # by length of the sequence, of each layer
        recorder = _Recorder()
        with torch.inference_mode(), recorder.in_place_of(model, layers):
            for ids in sequences:
                recorder.calls.clear()
                model(torch.tensor([ids]), use_cache=False)
                if len(recorder.calls) != len(layers):
                    raise UnsupportedError(f"{len(recorder.calls)} of {len(layers)} layers ran")
                self.states.append(recorder.calls[0][0].clone())
                self._arguments.setdefault(len(ids), [rest for _, *rest in recorder.calls])

    @contextmanager
    def placed(self, layer: Module) -> Iterator[None]:
        """The layer on the device in the run's dtype while the block runs, then where and as it was."""
        held = next(layer.parameters())
        device, dtype = held.device, held.dtype
        layer.to(self._device, self._dtype)
        yield
        layer.to(device, dtype)

    def run(self, layer: Module, index: int) -> Iterator[Tensor]:
        """The layer's output for each sequence."""
        for state in self.states:
            args, kwargs = _placed(self._arguments[state.shape[1]][index], self._device, self._dtype)
            with torch.no_grad():
                output = layer(state.to(self._device, self._dtype), *args, **kwargs)
            yield output[0] if isinstance(output, tuple) else output

    def advance(self, layer: Module, index: int) -> None:
        """Replace the hidden states by the layer's outputs."""
        for number, output in enumerate(self.run(layer, index)):
            self.states[number] = output.cpu()


_Arguments = list[Any]  # [positional arguments after the hidden states, keyword arguments]


class _Recorder:
    """Keeps the arguments of each layer's call and passes the hidden states on unchanged."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = []
        self._gives_tuple: bool | None = None

    @contextmanager
    def in_place_of(self, model: Module, layers: Sequence[Module]) -> Iterator[None]:
        """Layers record, and the head computes nothing, while the block runs."""
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(_forward(layer, partial(self._call, layer.forward)))
            for name, module in model.named_modules():
                if name.rpartition(".")[2] in _HEADS:
                    stack.enter_context(_forward(module, lambda x, *args, **kwargs: x[..., :1]))
            yield

    def _call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not args:
            args = (kwargs.pop("hidden_states"),)
        if self._gives_tuple is None:
            self._gives_tuple = isinstance(forward(*args, **kwargs), tuple)
        self.calls.append((args[0], args[1:], kwargs))
        return (args[0],) if self._gives_tuple else args[0]


@contextmanager
def _forward(module: Module, replacement: Callable[..., Any]) -> Iterator[None]:
    module.__dict__["forward"] = replacement  # before the method of the class
    try:
        yield
    finally:
        del module.__dict__["forward"]


def find_layers(model: Module, num_layers: int, names: Sequence[str]) -> list[Module]:
    """The list of decoder layers. names: of tensors of layer 0.

    Raises UnsupportedError if the model has no such list.
    """
    for name, module in model.named_modules():
        if not isinstance(module, ModuleList) or len(module) != num_layers:
            continue
        if all(tensor.startswith(f"{name}.0.") for tensor in names):
            return list(module)
    raise UnsupportedError(f"the model to calibrate has no list of {num_layers} layers with {names[0]}")


def _placed(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Tensors, also those in tuples, lists and dicts, on `device`; floating ones in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {key: _placed(inner, device, dtype) for key, inner in value.items()}
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_placed(inner, device, dtype) for inner in value)
    return value
