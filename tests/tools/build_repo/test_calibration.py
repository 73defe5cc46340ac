"""`build-repo --quantize` with calibration: from checkpoint and texts to a repository; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import FAMILIES, TEXTS, save
from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.backend.models import read_model_config
from tridecode.backend.weights.lora import TARGETS_FILE
from tridecode.converters.quantize.methods import METHODS
from tridecode.tools.build_repo import commands as repo_commands

FOLDED = ("int4-awq", "int4-awq-gptq", "int4-tuned", "smoothquant", "smoothquant-gptq")
WEIGHTS = Path("fastertransformer/1/1-gpu")


def build(tmp_path: Path, method: str, **options) -> Path:
    """The command, with a floor that a tiny random model reaches."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    source = save(FAMILIES["llama"](), tmp_path / "source")
    settings = {
        "calibrate": texts,
        "quantize_group": 8,
        "quantize_floor": "5,0",
        "dtype": "fp32",
        "tune_steps": 20,
        **options,
    }
    repo_commands.build_repo(str(source), tmp_path / "models", quantize=method, **settings)
    return tmp_path / "models"


@pytest.mark.parametrize("method", METHODS)
def test_a_calibrated_repository_is_built_and_compared(method: str, tmp_path: Path, capsys) -> None:
    models = build(tmp_path, method)
    quantization = read_model_config(models / WEIGHTS).quantization
    assert quantization is not None
    in_8_bit = method.startswith(("smoothquant", "w8a8"))
    weights = "int8" if method.startswith("smoothquant") else method.removeprefix("w8a8-").partition("-")[0]
    assert (quantization.weights, quantization.activations) == (weights, weights if in_8_bit else "")
    assert (quantization.block_rows == quantization.group == 128) == (method == "w8a8-fp8-blocks-gptq")
    parity = json.loads((models / "PARITY.json").read_text())
    assert parity["passed"] and 0 < parity["quantization"]["mean_kl"] < 5
    told = capsys.readouterr().out
    assert f"calibrated by {method}" in told and "relative error of a product" in told
    # adapters are trained on the inputs of the checkpoint's matrices
    assert (models / WEIGHTS / TARGETS_FILE).exists() == (method not in FOLDED)


def test_without_texts_a_warning_is_printed(tmp_path: Path, capsys) -> None:
    build(tmp_path, "int4-gptq", calibrate=None, parity=False)
    assert "warning: calibrated with a built-in text" in capsys.readouterr().out


@pytest.mark.parametrize(
    "method, options, complaint",
    [
        (
            "int8",
            {},
            "--calibrate .* with --quantize int8; wanted one of int8-gptq, fp8-gptq, w8a8-int8-gptq",
        ),
        ("gptq", {"calibrate": None}, "--quantize gptq: wanted one of int8, fp8, int4, w8a8-int8"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    method: str, options: dict, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build(tmp_path, method, **options)
    assert not (tmp_path / "models").exists()


def test_texts_that_are_missing_are_refused_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none.jsonl cannot be read"):
        build(tmp_path, "int4-awq", calibrate=tmp_path / "none.jsonl")
