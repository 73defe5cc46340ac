"""Comparisons of two measurements that alternate on one engine, for studies of decode steps."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.measure import steady_gaps


def study_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that the studies share. description: the study's docstring."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama-3-8b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser


def steady_ms(runner: LoopRunner, rows: int) -> float:
    """Return the median milliseconds between two steps of the last run in which `rows` rows decode."""
    return 1000 * statistics.median(steady_gaps(runner.take_run().steps, rows))


class Pairs:
    """Measures, prints and collects comparisons. repeats: measurements of each side."""

    def __init__(self, repeats: int):
        self.found: list[dict[str, Any]] = []
        self._repeats = repeats

    def compare(
        self,
        labels: dict[str, str],
        plain: Callable[[], float],
        special: Callable[[], float],
        width: int = 28,
    ) -> None:
        """Alternate two measurements, in milliseconds, and print their medians and the median ratio.

        labels: names of the case, as in the results; the last one is printed in `width` columns.
        """
        pairs = [(plain(), special()) for _ in range(self._repeats)]
        ratio = statistics.median(changed / usual for usual, changed in pairs)
        usual, changed = (statistics.median(column) for column in zip(*pairs))
        self.found.append({**labels, "plain_ms": usual, "ms": changed, "ratio": ratio})
        *titles, name = labels.values()
        text = "".join(f"{title:8} " for title in titles) + f"{name:{width}}"
        print(f"{text} {usual:8.3f} ms {changed:8.3f} ms  x {ratio:.4f}", flush=True)

    def write(self, output: Path | None) -> None:
        """Write the comparisons as JSON, if there is an output file."""
        if output:
            output.write_text(json.dumps(self.found, indent=1) + "\n")
