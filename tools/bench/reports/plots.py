"""Plots as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from tridecode.tools.bench.load.summary import first_token_seconds, summarise, token_gaps
from tridecode.tools.bench.load.worker import Record
from tridecode.tools.bench.prefix.figures import Played

matplotlib.use("Agg")  # before pyplot, which else looks for a display
from matplotlib import pyplot, ticker

_SIZE = (11, 4.2)
_LOAD_SIZE = (13, 4.8)
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
    """Output tokens/s of each run, and cumulative distributions on logarithmic time axes, with p50 and p99
    marked: time to the first token over requests, time between tokens over tokens. runs: label -> records."""
    figure, (rates, left, right) = pyplot.subplots(1, 3, figsize=_LOAD_SIZE, width_ratios=(0.7, 1, 1))
    for number, (name, records) in enumerate(runs.items()):
        report = summarise(list(records))
        answered = [record for record in records if record.responses and not record.error]
        gaps = [np.repeat(*token_gaps(record)) for record in answered]
        _bar(rates, number, report.tokens_per_s)
        _shares(left, [first_token_seconds(record) for record in answered], name)
        _shares(right, np.concatenate(gaps) if gaps else [], name)
    rates.set_xticks(range(len(runs)), list(runs), fontsize=8, rotation=20 if len(runs) > 4 else 0)
    rates.set(ylabel="output tokens/s")
    rates.margins(y=0.12)
    rates.yaxis.set_major_locator(ticker.MaxNLocator(5))
    left.set(xlabel="ms to the first token", ylabel="share of requests")
    right.set(xlabel="ms between tokens", ylabel="share of tokens")
    for axes in (left, right):
        _time_axis(axes)
        axes.set_ylim(0, 1.03)
        axes.set_yticks([0, 0.5, 0.99], ["0", "p50", "p99"])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False)
    return _save(figure, title, path)


def plot_prefix(path: Path, title: str, runs: Mapping[str, Sequence[Played]]) -> Path:
    """Output tokens/s of each run, and the distribution of times to the first token of prompts with cached
    tokens and without. runs: "on", "off" -> runs."""
    figure, (rates, times) = pyplot.subplots(1, 2, figsize=_SIZE, width_ratios=(0.5, 1))
    for number, (name, played) in enumerate(runs.items()):
        _bar(rates, number, float(np.median([one.output_tokens / one.seconds for one in played])))
        for hit, label in ((True, "hits"), (False, "misses")):
            seconds = [ms / 1000 for one in played for ms in one.times(hit)]
            if seconds:
                _shares(times, seconds, f"{name}, {label}")
    rates.set_xticks(range(len(runs)), [f"cache {name}" for name in runs])
    rates.set(ylabel="output tokens/s")
    rates.margins(y=0.12)
    times.set(xlabel="ms to the first token", ylabel="share of requests", ylim=(0, 1.03))
    _time_axis(times)
    times.grid(alpha=0.3)
    times.legend(fontsize=8)
    return _save(figure, title, path)


def plot_ratios(path: Path, title: str, ratios: Mapping[str, Sequence[tuple[int, float]]]) -> Path:
    """Ratios by number of sequences, a line for each label; 1 is marked."""
    figure, axes = pyplot.subplots(figsize=_SIZE)
    for name, points in ratios.items():
        axes.plot(*zip(*points), marker="o", label=name)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set(xlabel="sequences", ylabel="x plain", xscale="log")
    batches = sorted({batch for points in ratios.values() for batch, _ in points})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _save(figure, title, path)


def _number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bar(axes: Any, number: int, rate: float) -> None:
    axes.bar(number, rate, width=0.6)
    axes.annotate(_number(rate), (number, rate), ha="center", va="bottom", fontsize=8)


def _time_axis(axes: Any) -> None:
    """Logarithmic, with labels at 1, 2 and 5 of each power of ten, or at the powers alone where the data
    span more than two."""
    values = np.concatenate([line.get_xdata() for line in axes.lines] or [np.ones(1)])
    first, last = (values.min(), values.max()) if len(values) else (1.0, 1.0)
    subs = (1.0, 2.0, 5.0) if last < 100 * first else (1.0,)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=9))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _position: f"{value:g}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def _shares(axes: Any, seconds: Sequence[float] | np.ndarray, name: str) -> None:
    # merged responses have gaps of 0 ms, which a logarithmic axis cannot show
    values = np.sort(np.maximum(np.asarray(seconds) * 1000.0, _SHORTEST_MS))
    if not len(values):
        axes.plot([], [], label=f"{name}: nothing measured")
        return
    median, last = np.percentile(values, [50, 99])
    label = f"{name}: p50 {_number(median)}, p99 {_number(last)} ms"
    (line,) = axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=label)
    axes.plot([median], [0.5], "o", color=line.get_color())
    axes.plot([last], [0.99], "D", color=line.get_color())


def _save(figure: Any, title: str, path: Path) -> Path:
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
    return path
