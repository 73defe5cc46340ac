"""`build-repo` keeps a quantised checkpoint's format if weight directories support it, else dequantises."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.checkpoints import FAMILIES, greedy
from tests.converters.sources.quantized_checkpoints import METHODS, save_quantized
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.models import read_model_config
from tridecode.backend.weights.quantization import Quantization
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.checks.repository import check_repo

PROMPT = [7, 9, 11]


def built(method: str, directory: Path, **options) -> tuple[Path, str, list[int]]:
    """Return weight directory, output, and transformers' greedy tokens with the dequantised matrices."""
    model = FAMILIES["llama"]()
    source = save_quantized(model, directory / "hf", METHODS[method])
    said = io.StringIO()
    repository = build_repo(source, directory / "repo", console=Console(file=said, soft_wrap=True), **options)
    assert check_repo(repository, checksums=True) == []
    parity = json.loads((repository / "PARITY.json").read_text())
    assert parity["passed"]
    return repository / "fastertransformer/1/1-gpu", said.getvalue(), greedy(model, PROMPT, 4)[0]


def test_a_quantised_checkpoint_is_kept_and_proved(tmp_path: Path) -> None:
    weights, said, tokens = built("gptq 4 bit v2 asymmetric act-order", tmp_path)
    wanted = Quantization("int4", 8, zeros=True, act_order=True)
    assert read_model_config(weights).quantization == wanted
    assert "matrices of layers: int4, as the checkpoint has them" in said
    assert run_greedy(weights, [PROMPT], 4)[0] == [tokens]


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("nf4 nested", {}, "dequantised to fp32: bitsandbytes, nf4: weight directories have no such format"),
        ("awq", {"keep_quantization": False}, "quantised: awq, 4 bit, groups of 8; 14 matrices"),
    ],
)
def test_others_are_expanded_and_the_reason_is_said(method, options, reason, tmp_path: Path) -> None:
    weights, said, tokens = built(method, tmp_path, **options)
    assert read_model_config(weights).quantization is None
    assert reason in said
    assert run_greedy(weights, [PROMPT], 4)[0] == [tokens]
