"""Generates the tables of docs/reference/metrics.md from the table of metrics that doors publish.

    python -m tridecode.tools.generated_docs.metrics --write

Without --write the exit code is 1 if a table of the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tridecode.backend.service.monitoring.metric_table import (
    BEAT_METRICS,
    BUCKETS,
    DOOR_METRICS,
    ENGINE_METRICS,
    READY,
    Metric,
)
from tridecode.tools.generated_docs.tables import DOCS, markdown, write_or_compare

PAGE = DOCS / "reference" / "metrics.md"
COMMAND = "python -m tridecode.tools.generated_docs.metrics"
_HEAD = ("metric", "type", "labels", "meaning")


def _row(row: Metric) -> tuple[str, str, str, str]:
    name = f"`{row.name}`" if row.kind != BUCKETS else f"`{row.name}_bucket`, `_sum`, `_count`"
    kind = "histogram of counters" if row.kind == BUCKETS else row.kind
    return name, kind, ", ".join(f"`{label}`" for label in row.labels), row.help


def _bounds(rows: Iterable[Metric]) -> str:
    named = [(f"`{row.name}`", ", ".join(f"{bound:g}" for bound in row.bounds)) for row in rows if row.bounds]
    return markdown(("metric", "upper bounds of its buckets, in seconds"), named)


def tables() -> dict[str, str]:
    engine = [READY, *BEAT_METRICS.values(), *ENGINE_METRICS.values()]
    return {
        "models": markdown(_HEAD, map(_row, DOOR_METRICS)),
        "engines": markdown(_HEAD, map(_row, engine)),
        "bounds": _bounds(DOOR_METRICS),
    }


def main(arguments: list[str]) -> int:
    return write_or_compare({PAGE: tables()}, "--write" in arguments, COMMAND)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
