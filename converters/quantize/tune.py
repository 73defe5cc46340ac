"""Tunes the rounded tensors of a layer so that its output approximates the exact layer's.

Reconstruction of a block (BRECQ: Li et al. 2021, https://arxiv.org/abs/2102.05426) by training the scales
and the levels of its matrices together (EfficientQAT: Chen et al. 2024, https://arxiv.org/abs/2407.11062),
and the weights of its norms. The level of a weight minimises the block's error rather than its own
(AdaRound: Nagel et al. 2020, https://arxiv.org/abs/2004.10568).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence

from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.quantize.layers import LayerRun
from tridecode.converters.quantize.rounding import Grid
from tridecode.converters.quantize.source_tensors import SourceTensors
from tridecode.kernels.formats.quantized import QuantizedWeight, unpacked

_LEVELS = 15  # the highest of int4
#: distance of a level's start from its rounding limits, so that the first step does not change all levels
_FROM_THE_LIMIT = 0.05
_BETAS = (0.9, 0.99)
_LENGTHS = 64  # batches are padded to a multiple
_CHECK_STEPS = 25  # a check waits for the GPU
#: share of a GPU's free memory that the hidden states of one layer may take
_HELD_SHARE = 0.25


@dataclass(frozen=True)
class Tuning:
    """Adam with learning rates that rise for the first `warmup` of the steps and then fall linearly to 0.

    steps: per layer. tokens: maximum per step, in sequences drawn with `seed`, but at least one sequence.
    rate: relative learning rate of the scales and the norms' weights. level_rate: that of the levels.
    together_steps, together_rate: of all layers together, after that, without the levels.
    """

    steps: int = 300
    tokens: int = 4096
    warmup: float = 0.1
    rate: float = 2e-3
    level_rate: float = 5e-3
    together_steps: int = 200
    together_rate: float = 1e-3
    seed: int = 0

    def sequences(self, longest: int) -> int:
        """Return the number of sequences per step. longest: tokens of the longest sequence."""
        return max(1, self.tokens // longest)

    def share(self, step: int, steps: int) -> float:
        """Return the factor of the learning rates in a step, counted from 0: warm-up, then linear decay."""
        return min(1 - step / steps, (step + 1) / (self.warmup * steps + 1))


@dataclass(frozen=True)
class Rounded:
    """A matrix (out, in) in the dtype of the arithmetic, and what it was rounded to: int4 in consecutive
    groups.
    """

    exact: Tensor
    stored: QuantizedWeight


def output_error(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Return (n, T): for outputs (n, T, C), each token's squared error relative to its squared target, or to
    1 if that is 0.
    """
    size = wanted.square().sum(-1)
    return (outputs - wanted).square().sum(-1) / torch.where(size > 0, size, 1.0)


def tune(
    run: LayerRun,
    layer: Module,
    index: int,
    tensors: SourceTensors,
    matrices: Mapping[str, Rounded],
    wanted: Sequence[Tensor],
    grid: Grid,
    tuning: Tuning,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, QuantizedWeight | Tensor]:
    """Return the tuned matrices and norms of the layer by name; the model is not changed.

    layer: on the run's device. wanted: its exact output (1, T, C) for each sequence of the run, whose states
    are the inputs. The error is `output_error`, its mean over the tokens. progress: gets the share of the
    steps that are done. Raises CheckpointError if the error is not finite.

    On one device the result depends on the arguments only.
    """
    trained = Trained(tensors, matrices, norms_of(tensors, index), grid)
    parameters = _Parameters(layer, tensors, list(trained.tensors()))
    optimizer = optimizer_of(trained, tuning.rate, tuning.level_rate)
    batches = _Batches(run, wanted, tuning)
    losses = Losses(f"layer {index}: the error of its output", tuning.steps, run.device, progress)
    with training_arithmetic(run.device):
        for step in range(tuning.steps):
            states, targets, lengths = batches.draw()
            set_rates(optimizer, tuning.share(step, tuning.steps))
            outputs = run.call(layer, index, states, parameters.of(trained.tensors()))
            counts = torch.arange(states.shape[1], device=run.device) < lengths[:, None]
            loss = (output_error(outputs, targets) * counts).sum() / counts.sum()
            optimizer.zero_grad()
            loss.backward(inputs=trained.relative + trained.levels)
            optimizer.step()
            losses.add(step, loss)
    return trained.stored()


class Losses:
    """Losses of the steps of a tuning: checked, and reported as progress, after every _CHECK_STEPS steps and

    after the last one. what: names the minimised quantity.
    """

    def __init__(self, what: str, steps: int, device: torch.device, progress: Callable[[float], None]):
        self._what, self._steps, self._progress = what, steps, progress
        self._total = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, step: int, loss: Tensor) -> None:
        """Add a loss. Raises CheckpointError if one of them is not finite."""
        self._total += loss.detach()
        done = step + 1
        if done % _CHECK_STEPS and done != self._steps:
            return
        if not math.isfinite(self._total):
            raise CheckpointError(f"tuning {self._what} is not finite")
        self._progress(done / self._steps)


def optimizer_of(trained: Trained, rate: float, level_rate: float = 0.0) -> torch.optim.Adam:
    """Return Adam over the trained tensors; its rates are 0 until `set_rates`."""
    groups = [{"params": trained.relative, "base": rate}, {"params": trained.levels, "base": level_rate}]
    fused = trained.relative[0].device.type == "cuda"
    return torch.optim.Adam(groups, lr=0.0, betas=_BETAS, fused=fused)


def set_rates(optimizer: torch.optim.Adam, share: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["base"] * share


def norms_of(tensors: SourceTensors, index: int) -> list[str]:
    """Weights and biases of the norms within a layer, those of heads included."""
    names = [name for name in tensors.names() if tensors.spec(name).layer == index]
    return [name for name in names if _module(name).endswith("norm") or _module(name).startswith("ln_")]


def _module(name: str) -> str:
    """model.layers.0.ln_mlp.weight -> ln_mlp"""
    return name.split(".")[-2]


class _Matrix:
    """A rounded matrix whose scales, and levels if `exact` is given, are trained.

    levels: (out, G, size), real numbers, rounded in the forward pass with a straight-through gradient. They
    start between the rounded level and the exact weight's position. changes: (out, G, 1) relative, of the
    scales.
    """

    def __init__(self, stored: QuantizedWeight, grid: Grid, dtype: torch.dtype, exact: Tensor | None = None):
        assert stored.format == "int4" and stored.groups is None
        self._grid, self._columns = grid, stored.columns
        self._scales = stored.scales.to(dtype)[..., None]
        zeros = torch.full_like(stored.scales, 8) if stored.zeros is None else stored.zeros
        self._zeros = zeros.to(dtype)[..., None]
        self.levels = grid.grouped(unpacked(stored.values, stored.columns).to(dtype))
        if exact is not None:
            away = grid.grouped(exact) / self._scales + self._zeros - self.levels
            most = 0.5 - _FROM_THE_LIMIT
            self.levels = (self.levels + away.clamp(-most, most)).requires_grad_()
        self.changes = torch.zeros_like(self._scales).requires_grad_()

    def weight(self) -> Tensor:
        """(out, in)."""
        rounded = self.levels + (self.levels.round() - self.levels).detach()
        weight = (rounded.clamp(0, _LEVELS) - self._zeros) * (self._scales * (1 + self.changes))
        return weight.flatten(1)[:, : self._columns]

    @torch.no_grad()
    def stored(self) -> QuantizedWeight:
        levels = self.levels.round().clamp(0, _LEVELS).flatten(1)[:, : self._columns]
        scales = (self._scales * (1 + self.changes)).squeeze(-1)
        return self._grid.stored(levels, scales, self._zeros.squeeze(-1))


def _matrix(matrix: Rounded | QuantizedWeight, grid: Grid, tensors: SourceTensors) -> _Matrix:
    if isinstance(matrix, QuantizedWeight):
        return _Matrix(matrix, grid, tensors.dtype)
    return _Matrix(matrix.stored, grid, matrix.exact.dtype, matrix.exact)


class _Norm:
    """A weight or a bias of a norm. changes: of it, in units of the weight, or of its root mean square for a
    bias, which may be 0.
    """

    def __init__(self, tensor: Tensor, unit: Tensor):
        self._tensor, self._unit = tensor, unit
        self.changes = torch.zeros_like(tensor).requires_grad_()

    def value(self) -> Tensor:
        return self._tensor + self._unit * self.changes


class Trained:
    """Trainable tensors of layers by name. matrices: QuantizedWeight if its levels are not trained."""

    def __init__(
        self,
        tensors: SourceTensors,
        matrices: Mapping[str, Rounded] | Mapping[str, QuantizedWeight],
        norms: Sequence[str],
        grid: Grid,
    ):
        self._matrices = {name: _matrix(matrix, grid, tensors) for name, matrix in matrices.items()}
        self._norms = {}
        for name in norms:
            weight = tensors.read(f"{name.removesuffix('.bias')}.weight" if name.endswith(".bias") else name)
            unit = weight.square().mean().sqrt() if name.endswith(".bias") else weight
            self._norms[name] = _Norm(tensors.read(name), unit)
        levels = [matrix.levels for matrix in self._matrices.values()]
        self.levels = [level for level in levels if level.requires_grad]
        self.relative = [matrix.changes for matrix in self._matrices.values()]
        self.relative += [norm.changes for norm in self._norms.values()]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors in the layout of a weight directory: matrices (in, out)."""
        made = {name: matrix.weight().t() for name, matrix in self._matrices.items()}
        return made | {name: norm.value() for name, norm in self._norms.items()}

    def stored(self) -> dict[str, QuantizedWeight | Tensor]:
        made: dict[str, QuantizedWeight | Tensor] = {
            name: matrix.stored() for name, matrix in self._matrices.items()
        }
        return made | {name: norm.value().detach() for name, norm in self._norms.items()}


class _Parameters:
    """Tensors of a weight directory as parameters of the layer, by the layer's names."""

    def __init__(self, layer: Module, tensors: SourceTensors, names: Sequence[str]):
        self._tensors, self._others = tensors, tensors.others(names)
        own = {id(parameter): name for name, parameter in layer.named_parameters()}
        self._names = {
            source: own[id(parameter)]
            for name in names
            for source, parameter in tensors.parameters(name).items()
            if id(parameter) in own
        }

    def of(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(self._others)
        for name, tensor in made.items():
            for source, part in self._tensors.parts(name, tensor).items():
                found[source] = found[source] + part if source in found else part
        return {self._names[source]: part for source, part in found.items()}


class _Batches:
    """Sequences drawn at random with the exact layer's outputs, padded at the end to one length: in a causal
    model earlier tokens do not depend on padding.
    """

    def __init__(self, run: LayerRun, wanted: Sequence[Tensor], tuning: Tuning):
        self._device, self._dtype = run.device, run.dtype
        self._random = torch.Generator().manual_seed(tuning.seed)
        self._longest = max(state.shape[1] for state in run.states)
        self._count = tuning.sequences(self._longest)
        self._states, self._wanted = list(run.states), list(wanted)
        if self._fit_on_the_device():
            self._states, self._wanted = (
                [self._placed(part) for part in parts] for parts in (self._states, self._wanted)
            )

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """States and targets (n, T, C), and lengths (n,)."""
        at = torch.randint(len(self._states), (self._count,), generator=self._random).tolist()
        lengths = [self._states[number].shape[1] for number in at]
        whole = min(-(-max(lengths) // _LENGTHS) * _LENGTHS, self._longest)
        states, wanted = (self._joined([parts[number] for number in at], whole) for parts in self._parts())
        return states, wanted, torch.tensor(lengths, device=self._device)

    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        return self._states, self._wanted

    def _joined(self, parts: list[Tensor], length: int) -> Tensor:
        """(1, T, C) each -> (n, length, C)."""
        joined = pad_sequence([part[0] for part in parts], batch_first=True)
        joined = torch.nn.functional.pad(joined, (0, 0, 0, length - joined.shape[1]))
        return self._placed(joined)

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype)

    def _fit_on_the_device(self) -> bool:
        if self._device.type != "cuda":
            return False
        wanted = sum(part.numel() for parts in self._parts() for part in parts) * self._dtype.itemsize
        return wanted < _HELD_SHARE * torch.cuda.mem_get_info(self._device)[0]


@contextmanager
def training_arithmetic(device: torch.device) -> Iterator[None]:
    """Use TF32 GEMMs, whose rounding is far below int4's, and deterministic gradients."""
    if device.type != "cuda":
        yield
        return
    matmul, options = torch.backends.cuda.matmul, cast(Any, torch.utils.deterministic)
    before = (
        matmul.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        options.fill_uninitialized_memory,
    )
    matmul.allow_tf32 = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    options.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            # warnings about operations that are deterministic only in practice
            warnings.simplefilter("ignore")
            yield
    finally:
        matmul.allow_tf32, deterministic, only_warns, options.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)
