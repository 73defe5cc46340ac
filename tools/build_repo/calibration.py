"""`build-repo --quantize int8-gptq|...|smoothquant`: rounding with statistics of calibration texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from tridecode.converters.convert import PlannedConversion
from tridecode.converters.quantize.calibrate import calibrate, long_time
from tridecode.converters.quantize.methods import METHODS, Method, method_of
from tridecode.converters.quantize.tune import Tuning


@dataclass(frozen=True)
class Calibration:
    """texts: None: the built-in ones."""

    method: Method
    texts: list[str] | None = None


def calibration_by(name: str | None, group: int, steps: int, texts: list[str] | None) -> Calibration | None:
    """The calibration of --quantize; None for a name that needs none. steps: of int4-tuned, a layer."""
    if name not in METHODS:
        return None
    tuning = Tuning(steps, together_steps=-(-2 * steps // 3))
    return Calibration(method_of(str(name), group, tuning), texts)


def calibrated(
    planned: PlannedConversion,
    calibration: Calibration,
    tokenizer: PreTrainedTokenizerBase | None,
    console: Console,
    folder: Path,
) -> PlannedConversion:
    """Calibrate, print the errors, and return the conversion that writes the result.

    tokenizer: None: the source's. folder: for temporary files, until the conversion has been written.
    """
    _warn(console, long_time(planned, calibration.method))
    result = calibrate(planned, calibration.texts, calibration.method, tokenizer, folder)
    _warn(console, result.notes)
    worst = max(result.errors, key=lambda name: result.errors[name])
    mean = sum(result.errors.values()) / len(result.errors)
    console.print(
        f"{calibration.method.name} with {result.num_tokens:,} tokens: relative error of a product "
        f"{mean:.3g} on average, {result.errors[worst]:.3g} at most ({worst})",
        markup=False,
    )
    if result.output_errors:
        before, after = (sum(errors) / len(result.output_errors) for errors in zip(*result.output_errors))
        console.print(
            f"relative squared error of a layer's output: {before:.3g} on average as rounded, "
            f"{after:.3g} tuned",
            markup=False,
        )
    if result.divergences is not None:
        before, after = result.divergences
        console.print(
            f"divergence from the exact model on calibration texts: {before:.3g} nats with the layers tuned "
            f"one by one, {after:.3g} together",
            markup=False,
        )
    return result.conversion()


def _warn(console: Console, notes: list[str]) -> None:
    for note in notes:
        console.print("[yellow]warning[/]: ", end="")
        console.print(note, markup=False)
