"""Warns before a calibration that takes long, because there is no GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.resolved_settings import choose_device
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.quantize.built_in_texts import BUILT_IN
from tridecode.converters.quantize.method_names import NEAREST
from tridecode.converters.quantize.methods import Method
from tridecode.converters.quantize.texts import SEQUENCE_TOKENS

_CPU_OPERATIONS_PER_S = 1e11  # float32, two to four cores
_LONG_MINUTES = 5.0  # longer calibrations are announced
_LETTERS = 4  # per token, about


def long_time(planned: PlannedConversion, method: Method, texts: list[str] | None = None) -> list[str]:
    """Return a warning if the method trains on a CPU, or calibrates on it for more than _LONG_MINUTES."""
    tuning, config = method.tuning, planned.config
    if choose_device(EngineConfig()).type != "cpu":
        return []
    covered = [item.spec for item in planned.conversions if method.quantization.covers(item.spec)]
    if tuning is None:
        return _long_calibration(method, [spec.shape for spec in covered], texts or BUILT_IN)
    weights = sum(math.prod(spec.shape) for spec in covered) // config.num_layers
    longest = min(SEQUENCE_TOKENS, config.max_positions)
    steps = tuning.steps + tuning.together_steps
    tokens = steps * tuning.sequences(longest) * longest
    operations = 6 * weights * tokens  # forward GEMMs, and gradients of inputs and weights
    minutes = operations / _CPU_OPERATIONS_PER_S / 60
    return [
        f"{method.name} trains each of {config.num_layers} layers for {tuning.steps:,} steps and all "
        f"together for {tuning.together_steps:,}, which is slow without a GPU: up to {minutes:,.1f} minutes "
        f"per layer at {_CPU_OPERATIONS_PER_S:.0e} operations/s"
    ]


def _long_calibration(method: Method, shapes: Sequence[tuple[int, ...]], texts: list[str]) -> list[str]:
    tokens = min(sum(map(len, texts)) // _LETTERS, method.most_tokens)
    operations = sum(4 * tokens * inputs * outputs for inputs, outputs in shapes)
    if "gptq" in method.name:  # updates of later inputs, and the inverse in float64
        operations += sum(inputs**2 * (outputs + 3 * inputs) for inputs, outputs in shapes)
    minutes = operations / _CPU_OPERATIONS_PER_S / 60
    if minutes < _LONG_MINUTES:
        return []
    nearest = NEAREST.get(method.quantization.weights, "")
    instead = f"; --quantize {nearest} needs no calibration but loses quality" if nearest else ""
    found = f"{method.name} takes about {minutes:,.0f} minutes without a GPU"
    return [f"{found}, at {_CPU_OPERATIONS_PER_S:.0e} operations/s{instead}"]
