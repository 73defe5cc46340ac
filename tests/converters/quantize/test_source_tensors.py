"""Tensors of a weight directory in transformers' parameters: reading, writing, and what a gradient sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import save, variants
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.quantize.source_tensors import SourceTensors, source_tensors


def tensors_of(case: str, directory: Path) -> SourceTensors:
    planned = plan_conversion(open_checkpoint(save(variants()[case](), directory, tokenizer=False)), "fp32")
    return source_tensors(planned.checkpoint.reference_model(torch.float32), planned)


def names_of(tensors: SourceTensors, layer: int = 0) -> list[str]:
    return [name for name in tensors.names() if tensors.spec(name).layer == layer]


@pytest.mark.parametrize("case", variants())
def test_what_is_written_is_read_and_other_tensors_stay(case: str, tmp_path: Path) -> None:
    """This also holds if several tensors share one parameter, as in Phi-3's gate_up_proj."""
    tensors = tensors_of(case, tmp_path / "m")
    wanted = {name: tensors.read(name) for name in tensors.names()}
    generator = torch.Generator().manual_seed(2)
    for name in names_of(tensors):
        wanted[name] = torch.randn(wanted[name].shape, generator=generator)
        tensors.write(name, wanted[name])
        for other, value in wanted.items():
            torch.testing.assert_close(tensors.read(other), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", ["gpt2", "bloom", "llama", "gpt_neox", "falcon-40b", "phi3", "gemma"])
def test_parts_and_others_make_the_parameters(case: str, tmp_path: Path) -> None:
    """The derivative of a sum over the parameters, each with its own factors, is these factors, as read."""
    tensors = tensors_of(case, tmp_path / "m")
    names, generator = names_of(tensors), torch.Generator().manual_seed(2)
    given = {name: tensors.read(name).requires_grad_() for name in names[:-1]}  # the last one stays
    found = tensors.others(given)
    for name, tensor in given.items():
        for source, part in tensors.parts(name, tensor).items():
            found[source] = found[source] + part if source in found else part
    held = dict(tensors.model.named_parameters())
    factors = {source: torch.randn(held[source].shape, generator=generator) for source in found}
    for source, parameter in found.items():
        torch.testing.assert_close(parameter, held[source])
    sum((found[source] * factors[source]).sum() for source in found).backward()
    with torch.no_grad():
        for source, values in factors.items():
            held[source].copy_(values)
    for name, tensor in given.items():
        added = 1.0 if case == "gemma" and "norm" in name else 0.0
        torch.testing.assert_close(tensor.grad, tensors.read(name) - added)
