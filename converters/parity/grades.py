"""Grades of quantised conversions: how far the predictions of a model may be from its source's.

Imports no torch: `check` and the arguments of `build-repo` need only these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Floor:
    """Limits of the divergence from the source. mean_kl: at most, in nats. agreement: at least, the share of
    steps with the source's token.
    """

    mean_kl: float = 0.5
    agreement: float = 0.5

    def is_reached(self, mean_kl: float, agreement: float) -> bool:
        return mean_kl <= self.mean_kl and agreement >= self.agreement


GOOD, FAIR, POOR = "good", "fair", "poor"
#: best grade first; a model that reaches none is POOR
LIMITS = {GOOD: Floor(0.01, 0.97), FAIR: Floor(0.1, 0.9)}
COLOURS = {GOOD: "green", FAIR: "yellow", POOR: "red"}

_TEXTS = "a --calibrate file with texts like those of the service"
#: (format of a directory's matrices, whether activations are rounded too) -> values of --quantize that
#: usually diverge less, the smallest change first
_BETTER = {
    ("int4", False): ("int4-awq-gptq", "int4-tuned", "int8"),
    ("int8", False): ("int8-gptq",),
    ("fp8", False): ("fp8-gptq", "int8-gptq"),
    ("int8", True): ("smoothquant-gptq", "int8-gptq"),
    ("fp8", True): ("w8a8-fp8-gptq", "int8-gptq"),
}


def grade(mean_kl: float, agreement: float) -> str:
    """GOOD, FAIR or POOR; a NaN is POOR."""
    return next((name for name, limit in LIMITS.items() if limit.is_reached(mean_kl, agreement)), POOR)


def lower(first: str, second: str) -> str:
    """Return the worse of two grades; "" counts as none."""
    return max(first, second, key=("", GOOD, FAIR, POOR).index)


def limits_of(name: str) -> str:
    """Describe the limits that a grade has met; for POOR, those that it has missed."""
    limit = LIMITS.get(name, LIMITS[FAIR])
    words = f"a mean KL of at most {limit.mean_kl:g} nats and {limit.agreement:.0%} equal tokens"
    return f"{FAIR} needs {words}" if name == POOR else words


def advice(weights: str, activations: str, method: str = "") -> str:
    """Suggest methods for a model graded POOR. weights, activations: fields of its Quantization. method: the
    --quantize value that made it, "" if unknown.
    """
    values = _BETTER.get((weights, bool(activations)), ())
    values = values[values.index(method) + 1 :] if method in values else values
    options = [f"--quantize {' or '.join(values)}"] if values else []
    options += ["a smaller --quantize-group"] if weights == "int4" else []
    return f"try {', '.join(options + [_TEXTS])}, or 16 bit"
