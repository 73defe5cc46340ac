"""The grade of a quantised model in PARITY.json, which is not trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tridecode.converters.parity.grades import FAIR, POOR, advice, grade, limits_of


def grade_faults(parity: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(found, wanted, advice) for each comparison of a quantised model whose grade is poor.

    The figures decide, so that repositories without a grade are judged too.
    """
    quality = parity.get("quantization")
    if not isinstance(quality, dict):
        return
    for where, figures in (("fixed prompts", quality), ("given texts", parity.get("text"))):
        if not isinstance(figures, dict):
            continue
        mean_kl, agreement = figures.get("mean_kl"), figures.get("agreement")
        if not (isinstance(mean_kl, (int, float)) and isinstance(agreement, (int, float))):
            continue
        if grade(mean_kl, agreement) == POOR:
            weights, activations = (str(quality.get(key) or "") for key in ("weights", "activations"))
            found = f"{weights} is poor on {where}: mean KL {mean_kl:.3g} nats, {agreement:.1%} equal tokens"
            yield found, limits_of(FAIR), f"Build it again: {advice(weights, activations)}."
