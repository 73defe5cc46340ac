"""The figures of one run of a load, and those of alternating runs with the prefix cache and without it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Played:
    """One run. first_ms: of each request, whether its prompt had cached tokens and the time to its first
    token, milliseconds. computed, cached, host: prompt tokens; cached ones include those of the host tier.
    """

    seconds: float = 0.0
    output_tokens: int = 0
    computed: int = 0
    cached: int = 0
    host: int = 0
    first_ms: list[tuple[bool, float]] = field(default_factory=list)

    def times(self, hit: bool) -> list[float]:
        return [ms for was_hit, ms in self.first_ms if was_hit == hit]

    def figures(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 4),
            "tokens_per_s": round(self.output_tokens / self.seconds, 2),
            "computed": self.computed,
            "cached": self.cached,
            "host": self.host,
            **_percentiles("hit", "hits", self.times(True)),
            **_percentiles("miss", "misses", self.times(False)),
        }


def _percentiles(name: str, plural: str, values: Sequence[float]) -> dict[str, Any]:
    p50 = p99 = None
    if values:
        p50, p99 = (round(float(value), 3) for value in np.percentile(values, [50, 99]))
    return {plural: len(values), f"{name}_p50_ms": p50, f"{name}_p99_ms": p99}


def compared(on: Sequence[Played], off: Sequence[Played], least: int) -> dict[str, Any]:
    """Return the report of alternating runs. least: Traffic.least_computed of each run."""
    rates = [a.output_tokens / a.seconds * b.seconds / b.output_tokens for a, b in zip(on, off)]
    return {
        "on": [one.figures() for one in on],
        "off": [one.figures() for one in off],
        "least_computed": least,
        "computed_over_least": round(statistics.median(one.computed for one in on) / least, 4),
        "tokens_per_s_over_off": round(statistics.median(rates), 4),
        "tokens_per_s_over_off_each": [round(rate, 4) for rate in rates],
    }
