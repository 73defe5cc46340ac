"""Statistics of the inputs of a layer's matrices over the calibration set, collected while the layer runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tridecode.backend.base.errors import CheckpointError

SAMPLE = 1024  # inputs


@dataclass
class InputStatistics:
    """Statistics of the input vectors x of one matrix, in their dtype: float32 or float64.

    hessian: (in, in), mean of x x^T. mean_abs, max_abs: (in,), mean and maximum of |x|. sample: (R, in), at
    most SAMPLE random vectors x. count: number of vectors.
    """

    hessian: Tensor
    mean_abs: Tensor
    max_abs: Tensor
    sample: Tensor
    count: int = 0

    def divided(self, scales: Tensor) -> InputStatistics:
        """Return the statistics of the inputs x / scales; scales: (in,)."""
        return InputStatistics(
            self.hessian / (scales[:, None] * scales),
            self.mean_abs / scales,
            self.max_abs / scales,
            self.sample / scales,
            self.count,
        )


class _Sums:
    """Sums over the tokens seen so far."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: InputStatistics | None = None
        self._random = torch.Generator().manual_seed(0)

    def add(self, x: Tensor) -> None:
        """x: (..., in)."""
        x = x.detach().flatten(0, -2)
        magnitudes = x.abs()
        if self.sums is None:
            size = x.shape[1]
            self.sums = InputStatistics(x.new_zeros(size, size), x.new_zeros(size), x.new_zeros(size), x[:0])
        self.sums.hessian.addmm_(x.t(), x)
        self.sums.mean_abs += magnitudes.sum(0)
        self.sums.max_abs = torch.maximum(self.sums.max_abs, magnitudes.amax(0))
        self.sums.sample = self._sampled(self.sums.sample, x)
        self.count += x.shape[0]

    def _sampled(self, sample: Tensor, x: Tensor) -> Tensor:
        """Update sample with some of the new inputs x, so that each input so far has the same probability of
        being in it.

        A full sample is changed in place.
        """
        missing = SAMPLE - sample.shape[0]
        if missing:
            sample = torch.cat([sample, x[:missing]])
        first = self.count + len(x[:missing])
        rest = x[missing:]
        seen = torch.arange(first + 1, first + 1 + rest.shape[0])
        draw = torch.rand(rest.shape[0], generator=self._random, dtype=torch.float64)
        places = (draw * seen).long().tolist()
        chosen = {place: token for token, place in enumerate(places) if place < SAMPLE}
        sample[list(chosen)] = rest[list(chosen.values())]
        return sample

    def mean(self, name: str) -> InputStatistics:
        if self.sums is None:
            raise CheckpointError(f"the model did not run the module that {name} belongs to")
        if not torch.isfinite(self.sums.mean_abs).all():
            raise CheckpointError(f"the calibration texts give inputs of {name} that are not finite")
        sums = self.sums
        return InputStatistics(
            sums.hessian.div_(self.count),
            sums.mean_abs.div_(self.count),
            sums.max_abs,
            sums.sample,
            self.count,
        )


class Collector:
    """The statistics of several modules' inputs, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    @contextmanager
    def watching(self, modules: Mapping[str, Module]) -> Iterator[None]:
        """Collect while the block runs the modules."""

        def watch(name: str, module: Module) -> Any:
            sums = self._sums.setdefault(name, _Sums())
            return module.register_forward_pre_hook(lambda _module, args: sums.add(args[0]))

        handles = [watch(name, module) for name, module in modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def taken(self, name: str) -> InputStatistics:
        """Return the statistics of a module, and free them here. CheckpointError if it did not run, or its
        inputs are not finite.
        """
        return self._sums.pop(name).mean(name)
