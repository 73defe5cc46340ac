"""Plots as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from tridecode.tools.bench.load.summary import first_token_seconds, token_gaps
from tridecode.tools.bench.load.worker import Record

matplotlib.use("Agg")  # before pyplot, which else looks for a display
from matplotlib import pyplot, ticker

_SIZE = (11, 4.2)
_DPI = 110
_SHORTEST_MS = 0.01


def plot_batches(path: Path, title: str, engines: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """Milliseconds per step and tokens per second over the batch size. engines: name -> Timings as dicts."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=_SIZE)
    for name, rows in engines.items():
        batches = [row["batch"] for row in rows]
        left.plot(batches, [row["step_ms"] for row in rows], marker="o", label=name)
        right.plot(batches, [row["tokens_per_s"] for row in rows], marker="o", label=name)
    for axes, label in ((left, "ms per step"), (right, "tokens/s, decoding")):
        batches = sorted({row["batch"] for rows in engines.values() for row in rows})
        axes.set(xlabel="sequences", ylabel=label, xscale="log")
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_ylim(bottom=0)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return _save(figure, title, path)


def plot_load(path: Path, title: str, runs: Mapping[str, Sequence[Record]]) -> Path:
    """Cumulative distributions, on logarithmic time axes: time to the first token over requests, time between
    tokens over tokens. runs: label -> records."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=_SIZE)
    for name, records in runs.items():
        answered = [record for record in records if record.responses and not record.error]
        _shares(left, [first_token_seconds(record) for record in answered], name)
        gaps = [np.repeat(*token_gaps(record)) for record in answered]
        _shares(right, np.concatenate(gaps) if gaps else [], name)
    left.set(xlabel="ms to the first token", ylabel="share of requests")
    right.set(xlabel="ms between tokens", ylabel="share of tokens")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _position: f"{value:g}"))
        axes.xaxis.set_minor_formatter(ticker.FuncFormatter(_minor_label))
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    return _save(figure, title, path)


def _minor_label(value: float, _position: int) -> str:
    """Labels at 2 and 5 of each decade: a distribution seldom spans several powers of ten."""
    digit = f"{value:e}"[0]
    return f"{value:g}" if digit in "25" else ""


def _shares(axes: Any, seconds: Sequence[float] | np.ndarray, name: str) -> None:
    # merged responses have gaps of 0 ms, which a logarithmic axis cannot show
    values = np.sort(np.maximum(np.asarray(seconds) * 1000.0, _SHORTEST_MS))
    axes.step(values, np.arange(1, len(values) + 1) / max(len(values), 1), where="post", label=name)


def _save(figure: Any, title: str, path: Path) -> Path:
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
    return path
