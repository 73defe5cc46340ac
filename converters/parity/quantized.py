"""Compares a quantised directory with its source: divergence of predictions, and error of each matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.nn import Module

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.resolved_settings import choose_device
from tridecode.backend.models import read_model_config
from tridecode.backend.models.quantized_parts import read_quantized
from tridecode.backend.weights.reader import WeightReader
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.parity.grades import Floor, grade
from tridecode.converters.quantize.products import directory_errors


@dataclass(frozen=True)
class QuantizationParity:
    """A quantised directory against its source in the source's precision.

    steps: compared predictions of greedy decoding after the fixed prompts, up to and including the first that
    differs. mean_kl, largest_kl: divergence of the source's distribution from ours, in nats. agreement: share
    of these steps with the same token. grade: of both (converters/parity/grades.py). weight_errors: for each
    matrix, the Frobenius norm of its error divided by the norm of the matrix; {} if the values are not the
    nearest to the source's. product_errors: ||Wq q(x) - W x|| / ||W x|| of each matrix on the network's
    inputs x, with the quantisation q of activations if the format has one. product_errors_on: the source of
    the inputs, or why there are none.
    """

    weights: str
    activations: str
    steps: int
    mean_kl: float
    largest_kl: float
    agreement: float
    grade: str
    floor: Floor
    weight_errors: dict[str, float] = field(default_factory=dict)
    product_errors: dict[str, float] = field(default_factory=dict)
    product_errors_on: str = ""

    @property
    def passed(self) -> bool:
        return self.floor.is_reached(self.mean_kl, self.agreement)

    def summary(self) -> str:
        """Describe the result, with the floor."""
        return (
            f"{self.weights}: mean KL {self.mean_kl:.3g} nats (floor {self.floor.mean_kl:g}), largest "
            f"{self.largest_kl:.3g}, greedy tokens equal on {self.agreement:.1%} of {self.steps} steps "
            f"(floor {self.floor.agreement:.0%})"
        )


def divergence(source: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Return (n,) float64, KL(softmax(source) || softmax(ours)) of each row of logits (n, V), in nats."""
    rows = [torch.from_numpy(logits).double().log_softmax(-1) for logits in (source, ours)]
    return (rows[0].exp() * (rows[0] - rows[1])).sum(-1).clamp(min=0).numpy()


def compare_quantized(
    planned: PlannedConversion,
    directory: Path,
    ours: tuple[list[list[int]], list[np.ndarray]],
    source: tuple[list[list[int]], list[np.ndarray]],
    floor: Floor,
    products: ProductsOf,
) -> QuantizationParity:
    """Compare. ours, source: greedy tokens and logits (steps, V) of each prompt. products: after
    `measure`."""
    quantization = planned.config.quantization
    assert quantization is not None
    found, equal = [], 0
    for mine, my_logits, theirs, their_logits in zip(*ours, *source):
        same = [one == other for one, other in zip(mine, theirs)]
        steps = len(same) if all(same) else same.index(False) + 1
        equal += sum(same[:steps])
        found.append(divergence(their_logits[:steps], my_logits[:steps]))
    every = np.concatenate(found)
    mean_kl, agreement = float(every.mean()), equal / len(every)
    return QuantizationParity(
        quantization.weights,
        quantization.activations,
        len(every),
        mean_kl,
        float(every.max()),
        agreement,
        grade(mean_kl, agreement),
        floor,
        weight_errors(planned, directory),
        products.errors,
        products.on,
    )


class ProductsOf:
    """Measures the errors of a quantised directory's GEMMs: call `measure`, then read `errors` and `on`."""

    def __init__(self, planned: PlannedConversion, directory: Path, prompts: list[list[int]]):
        self._planned, self._directory, self._prompts = planned, directory, prompts
        self.errors: dict[str, float] = {}
        self.on = ""

    def measure(self, model: Module) -> None:
        """Measure. model: the source, on the CPU; unused if calibration has already measured."""
        planned, found = self._planned, self._planned.product_errors
        self.on = "calibration texts"
        if found is None:
            self.on = "fixed prompts"
            try:
                device = choose_device(EngineConfig())
                found = directory_errors(model, planned, self._directory, self._prompts, device)
            except UnsupportedError as error:  # the result is still compared as a whole
                found, self.on = {}, f"not measured: {error}"
        self.errors = {name: float(f"{error:.3g}") for name, error in found.items()}


def weight_errors(planned: PlannedConversion, directory: Path) -> dict[str, float]:
    """Return the relative error of each quantised matrix of `directory`, in float32."""
    quantization = planned.config.quantization
    if quantization is None or planned.replaced is not None:
        return {}
    reader = WeightReader(directory, read_model_config(directory))
    errors = {}
    for item in planned.conversions:
        if quantization.covers(item.spec):
            weight = item.make(planned.read).t().float()
            held = read_quantized(item.spec, quantization, lambda name: reader.read(reader.specs[name]), 0, 1)
            error = (held.expanded() - weight).norm() / weight.norm().clamp(min=1e-30)
            errors[item.spec.name] = float(f"{error.item():.3g}")
    return errors
