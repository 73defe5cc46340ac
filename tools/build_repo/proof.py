"""Compares a new repository with its source: writes PARITY.json and reports the result."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.parity.comparison import check_parity, without_reference
from tridecode.converters.parity.grades import COLOURS, POOR, Floor, advice, limits_of
from tridecode.converters.parity.reference import too_large
from tridecode.converters.parity.report import Parity
from tridecode.converters.quantize.texts import GivenText
from tridecode.converters.sources import Checkpoint
from tridecode.tools.checks.parity import PARITY_FILE


def prove(
    planned: PlannedConversion,
    checkpoint: Checkpoint,
    weights: Path,
    staging: Path,
    file: Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
    console: Console,
    floor: Floor,
    text: GivenText | None,
) -> Parity:
    """Compare, and write PARITY.json.

    file: the repository's tokenizer.json; tokenizer: the source's; None: the repository has none. floor:
    minimum quality of a quantised model. text: compared in addition to the fixed prompts.
    """
    quantized = None if planned.config.quantization is None else (planned, floor)
    with console.status("comparing the converted model with transformers"):
        parity = check_parity(checkpoint, weights, planned.config, file, tokenizer, quantized, text)
    summary = parity.summary()
    quality = parity.quantization
    if quality is not None and not parity.passed_floor:
        raise CheckpointError(
            f"the quantised model is too far from {checkpoint.path}: {summary}; choose another format, or "
            "another floor (--quantize-floor)"
        )
    if not parity.passed:
        raise CheckpointError(
            f"the converted model is not transformers' model of {checkpoint.path}: {summary}"
        )
    (staging / PARITY_FILE).write_text(
        json.dumps(parity.as_dict(), indent=1, ensure_ascii=False), encoding="utf-8"
    )
    console.print(f"parity with {parity.compared_with}: {summary}", markup=False)
    return parity


def say_grade(parity: Parity, method: str, console: Console) -> None:
    """Print the grade of a quantised model, with advice for a poor one. method: the calibration method."""
    quality, grade = parity.quantization, parity.grade
    if quality is None:
        return
    console.print(f"quality: [{COLOURS[grade]}]{grade}[/] ({limits_of(grade)}; docs/guides/quantization.md)")
    if grade == POOR:
        console.print("[yellow]warning[/]: ", end="")
        console.print(
            f"its answers will often differ from the source's; "
            f"{advice(quality.weights, quality.activations, method)}",
            markup=False,
        )


def no_comparison(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """Return why the result cannot be compared with another model of the checkpoint; "" if it can."""
    if checkpoint.has_reference:
        return too_large(config)
    return (
        f"transformers has no class for {checkpoint.config.model_type or config.family} with these settings"
    )


def say_unproven(
    why: str,
    planned: PlannedConversion,
    checkpoint: Checkpoint,
    weights: Path,
    staging: Path,
    file: Path | None,
    console: Console,
) -> None:
    """Report, and write into PARITY.json, that nothing was compared, and why."""
    result = without_reference(why, checkpoint.path.name, weights, planned.config, file)
    (staging / PARITY_FILE).write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")
    console.print(f"[yellow]warning[/]: the result is not compared: {why}")
