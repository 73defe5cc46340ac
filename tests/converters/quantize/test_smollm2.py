"""A real model, SmolLM2-135M: what calibration gains on a text that it has not seen."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion
from tridecode.converters.quantize.built_in_texts import BUILT_IN
from tridecode.converters.quantize.calibrate import calibrate_model
from tridecode.converters.quantize.gptq import gptq
from tridecode.converters.quantize.methods import Method, method_of
from tridecode.converters.quantize.rounding import Grid
from tridecode.converters.quantize.statistics import InputStatistics
from tridecode.converters.tokenizers.files import load_tokenizer
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.tools.demo import packaged_model

DOCS = Path(__file__).parents[3] / "docs"
GRIDS = Grid("int4", 128), Grid("int8", 0, symmetric=True), Grid("fp8", 0, symmetric=True)
#: texts that are unlike those of the calibration
PAGES = "guides/adapters", "design/adding_a_family", "design/adding_an_operation", "design/architecture"


def log_probs(model: Module, sequences: list[list[int]]) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in sequences])


@dataclass
class SmolLM2:
    """The model, the calibration set, and a set that no method has seen, with the model's answers to it."""

    planned: PlannedConversion
    model: Module
    seen: list[list[int]]
    unseen: list[list[int]]
    exact: Tensor

    def divergence(self, model: Module) -> float:
        """Mean KL divergence in nats per token."""
        return float((self.exact.exp() * (self.exact - log_probs(model, self.unseen))).sum(-1).mean())

    def calibrated(self, method: Method) -> float:
        """The divergence of a copy that the method has rounded."""
        model = copy.deepcopy(self.model)
        calibrate_model(model, self.planned, self.seen, method, device=torch.device("cpu"))
        return self.divergence(model)

    def rounded(self, grid: Grid) -> float:
        """The divergence of a copy whose matrices are rounded to nearest, one by one."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("_proj.weight"):
                    parameter.copy_(grid.rounded(parameter).expanded())
        return self.divergence(model)


@pytest.fixture(scope="module")
def smollm2() -> SmolLM2:
    checkpoint = open_checkpoint(packaged_model())
    tokenizer = load_tokenizer(checkpoint)
    seen = [tokenizer.encode(text) for text in BUILT_IN]
    pages = [(DOCS / f"{name}.md").read_text(encoding="utf-8") for name in PAGES]
    unseen = [tokenizer.encode(page[:1500])[:160] for page in pages]
    model = checkpoint.reference_model(torch.float32)
    return SmolLM2(plan_conversion(checkpoint, "fp32"), model, seen, unseen, log_probs(model, unseen))


@pytest.fixture(scope="module")
def rounded(smollm2: SmolLM2) -> dict[str, float]:
    """Return the divergence of the model with matrices rounded to nearest, by format."""
    return {grid.format: smollm2.rounded(grid) for grid in GRIDS}


@pytest.mark.nightly  # a minute each; the methods are compared on tiny models too
@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8-gptq", "fp8-gptq", "int4-gptq", "int4-awq", "int4-awq-gptq"])
def test_calibrated_smollm2_is_nearer_than_a_rounded_one(
    name: str, smollm2: SmolLM2, rounded: dict[str, float]
) -> None:
    assert smollm2.calibrated(method_of(name)) < 0.9 * rounded[name.partition("-")[0]]


@pytest.mark.nightly
@pytest.mark.slow
def test_gptq_of_clipped_groups_is_nearer_than_of_whole_ones(smollm2: SmolLM2) -> None:
    def whole(name: str, weight: Tensor, statistics: InputStatistics, grid: Grid) -> QuantizedWeight:
        return gptq(weight, statistics.hessian, grid)

    of_whole_groups = smollm2.calibrated(Method("whole", Grid("int4", 128), whole))
    assert smollm2.calibrated(method_of("int4-gptq")) < 0.95 * of_whole_groups
