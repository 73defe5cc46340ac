"""`build-repo --quantize int8|int8-gptq|...|smoothquant`: rounding with statistics of calibration texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from tridecode.backend.base.errors import UnsupportedError
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.parity.reference import too_large
from tridecode.converters.quantize.calibrate import calibrate, obstacle
from tridecode.converters.quantize.method_names import DEFAULT_METHODS, METHODS
from tridecode.converters.quantize.methods import Method, method_of
from tridecode.converters.quantize.texts import BUILT_IN_NOTE
from tridecode.converters.quantize.tune import Tuning
from tridecode.tools.build_repo.calibration_time import long_time


@dataclass(frozen=True)
class Calibration:
    """texts: None: the built-in ones. optional: round to nearest in the method's format if the method cannot
    run.
    """

    method: Method
    texts: list[str] | None = None
    optional: bool = False


def calibration_by(name: str | None, group: int, steps: int, texts: list[str] | None) -> Calibration | None:
    """The calibration of --quantize; None for a name that needs none. steps: of int4-tuned, a layer."""
    chosen = DEFAULT_METHODS.get(name or "", name)
    if chosen not in METHODS:
        return None
    tuning = Tuning(steps, together_steps=-(-2 * steps // 3))
    return Calibration(method_of(str(chosen), group, tuning), texts, optional=name in DEFAULT_METHODS)


def usable(
    calibration: Calibration | None,
    planned: PlannedConversion,
    tokenizer: PreTrainedTokenizerBase | None,
    console: Console,
) -> Calibration | None:
    """Print how the matrices are rounded, and return the calibration; None for an optional calibration that
    cannot run with this checkpoint or on this machine.
    """
    if calibration is None:
        return None
    if calibration.optional and (why := _obstacle(planned, tokenizer)):
        _say_nearest(console, calibration, why)
        return None
    method = calibration.method
    console.print(
        f"matrices of layers: {method.quantization.weights}, calibrated by {method.name}", markup=False
    )
    return calibration


def _obstacle(planned: PlannedConversion, tokenizer: PreTrainedTokenizerBase | None) -> str:
    checkpoint = planned.checkpoint
    if found := obstacle(planned):
        return found
    if tokenizer is None:
        return f"{checkpoint.path} has no tokenizer; calibration needs one for its texts"
    if not checkpoint.has_reference:
        return f"transformers has no class for {checkpoint.path}, and calibration runs its model"
    return too_large(planned.config).replace("the comparison", "calibration")


def _say_nearest(console: Console, calibration: Calibration, why: str) -> None:
    weights = calibration.method.quantization.weights
    console.print(f"matrices of layers: {weights}, rounded to nearest: {why}", markup=False)


def calibrated(
    planned: PlannedConversion,
    calibration: Calibration,
    tokenizer: PreTrainedTokenizerBase | None,
    console: Console,
    folder: Path,
) -> PlannedConversion:
    """Calibrate, print the errors, and return the conversion that writes the result.

    tokenizer: None: the source's. folder: for temporary files, until the conversion has been written. Returns
    `planned` if the calibration is optional and the model does not support it.
    """
    _warn(console, long_time(planned, calibration.method, calibration.texts))
    try:
        result = calibrate(planned, calibration.texts, calibration.method, tokenizer, folder)
    except UnsupportedError as error:
        if not calibration.optional:
            raise
        _say_nearest(console, calibration, str(error))
        return planned
    _warn(console, [note for note in result.notes if not (calibration.optional and note == BUILT_IN_NOTE)])
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
