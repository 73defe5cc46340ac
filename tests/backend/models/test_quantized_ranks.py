"""Quantised directories on tensor and pipeline ranks: the tokens of one rank, whatever the files' degree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backend.engine.thread_ranks import generate_on_ranks
from tests.checkpoints import CORE, FAMILIES, save
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion

NEW = 6
PROMPTS = [[5], [7, 9, 11], list(range(20, 60))]
FORMATS = {
    "int8": Quantization("int8"),
    "int4": Quantization("int4", group=16, zeros=True),
    "fp8": Quantization("fp8"),
}


def planned(folder: Path, quantization: Quantization) -> PlannedConversion:
    return plan_conversion(open_checkpoint(str(folder)), "fp32", None, quantization)


@pytest.mark.parametrize("family", CORE)
def test_ranks_of_any_degree_answer_alike(family: str, tmp_path: Path) -> None:
    """12 heads of 4: 4 ranks cut the rows of dense in the middle of int4's groups of 16."""
    inner = {"n_inner": 64} if family == "gpt2" else {}
    save(FAMILIES[family](**{**FAMILIES[family].shared, **inner}), tmp_path / "hf", tokenizer=False)
    for name, quantization in FORMATS.items():
        for stored in (1, 2):
            planned(tmp_path / "hf", quantization).write(tmp_path / f"{name}{stored}", stored)
        wanted, _ = generate_on_ranks(tmp_path / f"{name}1", 1, 1, PROMPTS, NEW)
        for stored, tensor, stages in ((2, 1, 1), (1, 2, 1), (1, 4, 1), (2, 4, 1), (1, 1, 2), (2, 2, 2)):
            found, _ = generate_on_ranks(tmp_path / f"{name}{stored}", tensor, stages, PROMPTS, NEW)
            assert found == wanted, (name, stored, tensor, stages)


def test_an_odd_number_of_columns_a_rank_is_refused(tmp_path: Path) -> None:
    save(FAMILIES["gpt2"](**FAMILIES["gpt2"].shared), tmp_path / "hf", tokenizer=False)
    with pytest.raises(ConfigError, match="odd number of its 60 columns; a byte holds two"):
        planned(tmp_path / "hf", FORMATS["int4"]).write(tmp_path / "w", 4)
