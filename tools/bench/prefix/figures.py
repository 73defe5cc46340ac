"""The figures of one run of a load, and those of alternating runs with the prefix cache and without it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class PlayedStep(NamedTuple):
    """A step that ended at `time` (seconds). ins, outs: blocks that its plan copied from and to the host
    tier.
    """

    time: float
    decodes: int
    prompt_tokens: int
    ins: int
    outs: int


@dataclass
class Played:
    """One run. first_ms: for each request, whether its prompt had cached tokens, and the milliseconds to its
    first token. computed, cached, host: prompt tokens; cached ones include those from the host tier. steps:
    in order; empty for a server.
    """

    seconds: float = 0.0
    output_tokens: int = 0
    computed: int = 0
    cached: int = 0
    host: int = 0
    first_ms: list[tuple[bool, float]] = field(default_factory=list)
    steps: list[PlayedStep] = field(default_factory=list)

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
            **self._meanwhile(),
        }

    def _meanwhile(self) -> dict[str, Any]:
        """Return the time of decode steps with and without copies from and to the host tier.

        Counts steps that only decode the most frequent number of rows and follow such a step: median and mean
        milliseconds without copies in the plan and the previous one, and with copies.
        """
        steps = [step for step in self.steps if not step.prompt_tokens]
        if not steps:
            return {}
        usual = statistics.mode(step.decodes for step in steps)
        kinds: dict[str, list[float]] = {"plain": [], "ins": [], "outs": []}
        for before, step in zip(self.steps, self.steps[1:]):
            if before.prompt_tokens or step.prompt_tokens or {before.decodes, step.decodes} != {usual}:
                continue
            ins, outs = before.ins + step.ins, before.outs + step.outs
            if not (ins and outs):
                kind = "ins" if ins else "outs" if outs else "plain"
                kinds[kind].append(1000 * (step.time - before.time))
        found: dict[str, Any] = {"decodes": usual}
        for kind, values in kinds.items():
            found[f"{kind}_steps"] = len(values)
            found[f"{kind}_ms"] = round(statistics.median(values), 3) if values else None
            found[f"{kind}_mean_ms"] = round(statistics.mean(values), 3) if values else None
        return found


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
