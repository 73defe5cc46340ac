"""Runs the decoder layers of transformers' model one by one over the calibration set.

Each layer gets the model's own arguments (masks, positions): all layers are called once without computing,
and their arguments are recorded. They depend only on the number and the length of the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module, ModuleList

from tridecode.backend.base.errors import UnsupportedError

_HEADS = ("lm_head", "embed_out")
# tokens of sequences that run in one call: enough for a GPU, and small compared with a layer
_TOKENS_TOGETHER = 4096


class LayerRun:
    """The hidden states of the calibration set before the next layer, (1, T, C) for each sequence, stored on
    the CPU. Layers run on `device` in `dtype`, over several sequences of one length at a time.
    """

    def __init__(
        self,
        model: Module,
        layers: Sequence[Module],
        sequences: list[list[int]],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.device, self.dtype = device, dtype
        self.states: list[Tensor] = []
        self._model, self._layers, self._recorder = model, layers, _Recorder()
        # by number and length of the sequences: of each layer; of one layer, on the device
        self._arguments: dict[tuple[int, int], list[_Arguments]] = {}
        self._placed: tuple[int, dict[tuple[int, int], _Arguments]] = (-1, {})
        for ids in sequences:
            self.states.append(self._record(torch.tensor([ids])).clone())

    @contextmanager
    def placed(self, layer: Module) -> Iterator[None]:
        """Move the layer to the device, in the run's dtype, while the block runs; restore it afterwards."""
        held = next(layer.parameters())
        device, dtype = held.device, held.dtype
        layer.to(self.device, self.dtype)
        yield
        layer.to(device, dtype)

    def run(self, layer: Module, index: int, states: Sequence[Tensor] | None = None) -> Iterator[Tensor]:
        """The layer's output for each sequence. states: None: those of the run."""
        for together in _of_one_length(self.states if states is None else states):
            with torch.no_grad():
                outputs = self.call(layer, index, torch.cat(together).to(self.device, self.dtype))
            yield from outputs.split(1)

    def call(
        self, layer: Module, index: int, states: Tensor, parameters: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """The layer's output for states (n, T, C), on the device.

        parameters: replace the layer's, by its names.
        """
        args, kwargs = self._arguments_of(index, *states.shape[:2])
        if parameters is None:
            output = layer(states, *args, **kwargs)
        else:
            output = functional_call(layer, dict(parameters), (states, *args), kwargs)
        return output[0] if isinstance(output, tuple) else output

    def advance(self, layer: Module, index: int) -> None:
        """Replace the hidden states by the layer's outputs."""
        for number, output in enumerate(self.run(layer, index)):
            self.states[number] = output.cpu()

    def head(self, states: Tensor, ids: Tensor) -> Tensor:
        """The logits (n, T, V) of the last layer's outputs (n, T, C), where the model is. ids: (n, T)."""
        with ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(_forward(layer, partial(self._recorder.pass_on, states)))
            return self._model(ids, use_cache=False).logits

    def _arguments_of(self, index: int, count: int, length: int) -> _Arguments:
        """Return a layer's arguments on the device, where those of one layer stay."""
        if self._placed[0] != index:
            self._placed = index, {}
        held, shape = self._placed[1], (count, length)
        if shape not in held:
            if shape not in self._arguments:
                self._record(torch.zeros(shape, dtype=torch.int64))
            held[shape] = _placed(self._arguments[shape][index], self.device, self.dtype)
        return held[shape]

    def _record(self, ids: Tensor) -> Tensor:
        """ids: (n, T). Keeps the layers' arguments; returns the first layer's input (n, T, C)."""
        calls = self._recorder.calls
        with torch.no_grad(), self._recorder.in_place_of(self._model, self._layers):
            calls.clear()
            self._model(ids, use_cache=False)
        if len(calls) != len(self._layers):
            raise UnsupportedError(f"{len(calls)} of {len(self._layers)} layers ran")
        self._arguments.setdefault((ids.shape[0], ids.shape[1]), [rest for _, *rest in calls])
        return calls[0][0]


_Arguments = list[Any]  # [positional arguments after the hidden states, keyword arguments]


class _Recorder:
    """Keeps the arguments of each layer's call and passes the hidden states on unchanged."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = []
        self._gives_tuple: bool | None = None

    @contextmanager
    def in_place_of(self, model: Module, layers: Sequence[Module]) -> Iterator[None]:
        """Make layers record, and the head compute nothing, while the block runs."""
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
        return self.pass_on(args[0])

    def pass_on(self, states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """Return the states in the form of a layer's output: a tuple or the tensor itself."""
        return (states,) if self._gives_tuple else states


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


def _of_one_length(states: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group neighbours of equal length, up to _TOKENS_TOGETHER tokens."""
    together: list[Tensor] = []
    for state in states:
        length = state.shape[1]
        full = (len(together) + 1) * length > _TOKENS_TOGETHER
        if together and (full or together[0].shape[1] != length):
            yield together
            together = []
        together.append(state)
    if together:
        yield together


def _placed(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Tensors, also those in tuples, lists and dicts, on `device`; floating ones in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {key: _placed(inner, device, dtype) for key, inner in value.items()}
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_placed(inner, device, dtype) for inner in value)
    return value
