"""`build-repo --quantize` with calibration: from checkpoint and texts to a repository; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoints import FAMILIES, TEXTS, save
from tridecode.backend.base.errors import CheckpointError, ConfigError, UnsupportedError
from tridecode.backend.models import read_model_config
from tridecode.backend.weights.lora import TARGETS_FILE
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity import reference as parity_reference
from tridecode.converters.quantize.methods import METHODS, method_of
from tridecode.tools.build_repo import calibration, calibration_time
from tridecode.tools.build_repo import commands as repo_commands
from tridecode.tools.build_repo.calibration_time import long_time

FOLDED = ("int4-awq", "int4-awq-gptq", "int4-tuned", "smoothquant", "smoothquant-gptq")
WEIGHTS = Path("fastertransformer/1/1-gpu")


def build(tmp_path: Path, method: str, **options) -> Path:
    """The command, with a floor that a tiny random model reaches."""
    tmp_path.mkdir(exist_ok=True)
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


# ---------------------------------------------------------------- int8


def test_int8_is_calibrated_by_gptq_and_needs_no_texts(tmp_path: Path, capsys) -> None:
    models = {name: build(tmp_path / name, name, parity=False) for name in ("int8", "int8-gptq")}
    text = capsys.readouterr().out
    assert text.count("calibrated by int8-gptq") == 2 and "rounded to nearest" not in text
    assert _files(models["int8"]) == _files(models["int8-gptq"])
    alone = build(tmp_path / "alone", "int8", calibrate=None, parity=False)
    assert "warning: calibrated with a built-in text" not in capsys.readouterr().out
    nearest = build(tmp_path / "nearest", "int8-nearest", calibrate=None, parity=False)
    assert "int8, rounded to nearest" in capsys.readouterr().out
    values = [_files(one) for one in (models["int8"], alone, nearest)]
    assert len({tuple(sorted(one.items())) for one in values}) == 3  # other texts, other levels
    for one in (models["int8"], alone, nearest):
        assert read_model_config(one / WEIGHTS).quantization == Quantization("int8")


def test_int8_of_what_cannot_be_calibrated_is_rounded_to_nearest(tmp_path: Path, capsys) -> None:
    """A weight directory, a checkpoint without a tokenizer, and a machine without the memory."""
    source = save(FAMILIES["gpt2"](), tmp_path / "source")
    options = {"dtype": "fp32", "parity": False, "quantize": "int8"}
    repo_commands.build_repo(str(source), tmp_path / "dense", **{**options, "quantize": None})
    directory = tmp_path / "dense" / WEIGHTS
    repo_commands.build_repo(str(directory), tmp_path / "again", **options)
    assert "rounded to nearest" in (text := capsys.readouterr().out) and "is a weight directory" in text
    repo_commands.build_repo(str(source), tmp_path / "nearest", **{**options, "quantize": "int8-nearest"})
    assert _files(tmp_path / "again") == _files(tmp_path / "nearest")
    for file in source.glob("*token*"):
        file.unlink()
    capsys.readouterr()
    repo_commands.build_repo(str(source), tmp_path / "without", **options)
    assert "has no tokenizer; calibration needs one" in capsys.readouterr().out
    assert _files(tmp_path / "without") == _files(tmp_path / "nearest")
    with pytest.raises(UnsupportedError, match="weight directory; calibration needs the checkpoint"):
        repo_commands.build_repo(str(directory), tmp_path / "no", **{**options, "quantize": "int8-gptq"})


def test_int8_needs_memory_for_the_model_or_is_rounded_to_nearest(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(FAMILIES["gpt2"](), tmp_path / "source")
    monkeypatch.setattr(parity_reference, "free_memory", lambda place: 1000)
    repo_commands.build_repo(str(source), tmp_path / "models", quantize="int8", dtype="fp32", parity=False)
    text = capsys.readouterr().out
    assert "rounded to nearest: calibration needs" in text and "GiB are available" in text


def test_int8_of_a_model_that_calibration_does_not_know_is_rounded_to_nearest(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*arguments: object) -> None:
        raise UnsupportedError("the model to calibrate has no list of layers")

    monkeypatch.setattr(calibration, "calibrate", unknown)
    build(tmp_path, "int8", parity=False)
    assert "rounded to nearest: the model to calibrate has no list" in capsys.readouterr().out
    assert read_model_config(tmp_path / "models" / WEIGHTS).quantization == Quantization("int8")
    with pytest.raises(UnsupportedError, match="no list of layers"):
        build(tmp_path / "gptq", "int8-gptq", parity=False)


def _files(models: Path) -> dict[str, bytes]:
    """Return the files of the matrices' values and scales by name."""
    return {path.name: path.read_bytes() for path in (models / WEIGHTS).glob("*.weight.*")}


def test_a_slow_calibration_on_a_cpu_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_conversion(open_checkpoint(save(FAMILIES["gpt2"](), tmp_path / "m")), "fp32")
    (note,) = long_time(planned, method_of("int4-tuned", 16))
    assert "trains each of 2 layers for 300 steps and all together for 200, which is slow" in note
    assert long_time(planned, method_of("int8-gptq")) == []
    monkeypatch.setattr(calibration_time, "_CPU_OPERATIONS_PER_S", 1e5)  # like a large model on a CPU
    (note,) = long_time(planned, method_of("int8-gptq"))
    assert "minutes without a GPU" in note and "--quantize int8-nearest needs no calibration" in note
    (note,) = long_time(planned, method_of("int4-awq", 16))
    assert "instead" not in note and "nearest" not in note
    monkeypatch.setattr(calibration_time, "choose_device", lambda config: torch.device("cuda"))
    for name in ("int4-tuned", "int8-gptq"):
        assert long_time(planned, method_of(name, 16)) == []


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "method, options, complaint",
    [
        (
            "int8-nearest",
            {},
            "--calibrate .* with --quantize int8-nearest; wanted one of int8, int8-gptq, fp8-gptq",
        ),
        (
            "gptq",
            {"calibrate": None},
            "--quantize gptq: wanted one of int8, int8-nearest, fp8, int4, w8a8",
        ),
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
