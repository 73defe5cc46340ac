"""Counters of all workers in shared memory, and the metrics page made from them.

Each worker writes to its own slot, so no lock is needed. A restarted worker continues from its predecessor's
values.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence

from tridecode.backend.base.histogram import Histogram, bound_labels, num_cells
from tridecode.backend.front.calls import Call
from tridecode.backend.front.process.beats import Beats
from tridecode.backend.service.monitoring.metric_table import (
    BEAT_METRICS,
    DOOR_METRICS,
    ENGINE_METRICS,
    READY,
    REPEATED,
    Metric,
)
from tridecode.backend.wire.messages import EngineBeat

OUTCOMES = ("ok", "invalid_arg", "unsupported", "unavailable", "cancelled", "not_found", "internal")
_MODEL = "openai"
_ROWS = {row.name: row for row in DOOR_METRICS}
_REQUESTS = _ROWS["tridecode_requests_total"]
_PROMPT = _ROWS["tridecode_prompt_tokens_total"]
_OUTPUT = _ROWS["tridecode_output_tokens_total"]
_HISTOGRAMS = tuple(
    _ROWS[f"tridecode_{name}_seconds"] for name in ("time_to_first_token", "time_per_output_token", "request")
)
_CHUNKS = Metric("tridecode_front_chunks_total", "counter", "Chunks of streamed answers", ())
_CONNECTIONS = Metric("tridecode_front_connections", "gauge", "Open connections of clients", ())


def _layout() -> dict[tuple[str, str], int]:
    """Return the index in a slot of each (metric, label)."""
    names = [(_REQUESTS.name, outcome) for outcome in OUTCOMES]
    names += [(row.name, "") for row in (_PROMPT, _OUTPUT, _CHUNKS, _CONNECTIONS)]
    return {name: place for place, name in enumerate(names)}


_PLACES = _layout()
_SIZE = len(_PLACES) + sum(num_cells(row.bounds) for row in _HISTOGRAMS)  # numbers in a slot
_BYTES = 8 * _SIZE


def _histograms(slot: memoryview[float]) -> list[Histogram]:
    """Return the histograms of a slot, one for each of _HISTOGRAMS, stored after the counters."""
    found, begin = [], len(_PLACES)
    for row in _HISTOGRAMS:
        end = begin + num_cells(row.bounds)
        found.append(Histogram(row.bounds, slot[begin:end]))
        begin = end
    return found


def shared_counts(workers: int) -> int:
    """Return a file descriptor of memory for this many workers, which inherit it."""
    with tempfile.TemporaryFile() as file:
        file.truncate((_BYTES + 8) * workers)
        return os.dup(file.fileno())


def shared_beats(fd: int, workers: int) -> Beats:
    """Return the signs of life that lie after the counters."""
    return Beats(fd, _BYTES * workers, workers)


class Counts:
    """The slots of all workers; this worker writes to slot `number`."""

    def __init__(self, fd: int, number: int, workers: int):
        memory = memoryview(mmap.mmap(fd, _BYTES * workers)).cast("d")
        self._slots = [memory[i * _SIZE : (i + 1) * _SIZE] for i in range(workers)]
        self._histograms = [_histograms(slot) for slot in self._slots]
        self._mine, self._own = self._slots[number], self._histograms[number]
        self.set(_CONNECTIONS, 0)

    def add(self, row: Metric, value: float = 1.0, label: str = "") -> None:
        self._mine[_PLACES[row.name, label]] += value

    def set(self, row: Metric, value: float) -> None:
        self._mine[_PLACES[row.name, ""]] = value

    def connections(self, value: int) -> None:
        self.set(_CONNECTIONS, value)

    def count(self, call: Call) -> None:
        """Count a request that has ended."""
        self.add(_REQUESTS, label=call.outcome if call.outcome in OUTCOMES else "internal")
        self.add(_PROMPT, call.prompt_tokens)
        self.add(_OUTPUT, call.output_tokens)
        self.add(_CHUNKS, call.chunks)
        whole_s = call.total_s if call.outcome == "ok" else None
        for histogram, seconds in zip(self._own, (call.first_token_s, call.per_token_s, whole_s)):
            if seconds is not None:
                histogram.add(seconds)

    def _sum(self, row: Metric, label: str = "") -> float:
        place = _PLACES[row.name, label]
        return sum(slot[place] for slot in self._slots)

    # ------------------------------------------------------------ the page

    def page(self, engines: Sequence[str], beats: Iterable[EngineBeat | None], ready: Iterable[bool]) -> str:
        """Return all workers' counters and the engines' heartbeats, in Prometheus' text format. engines:
        their names."""
        lines = list(self._counters())
        for row, workers in zip(_HISTOGRAMS, zip(*self._histograms)):
            lines += _histogram_lines(row, workers)
        lines += _engine_lines(engines, list(beats), list(ready))
        return "\n".join(lines) + "\n"

    def _counters(self) -> Iterator[str]:
        yield from _head(_REQUESTS)
        for outcome in OUTCOMES:
            labels = f'{{model="{_MODEL}",outcome="{outcome}"}}'
            yield f"{_REQUESTS.name}{labels} {_number(self._sum(_REQUESTS, outcome))}"
        for row in (_PROMPT, _OUTPUT):
            yield from _head(row)
            yield f'{row.name}{{model="{_MODEL}"}} {_number(self._sum(row))}'
        for row in (_CHUNKS, _CONNECTIONS):
            yield from _head(row)
            yield f"{row.name} {_number(self._sum(row))}"


def _head(row: Metric) -> tuple[str, str]:
    kind = "histogram" if row.kind == "buckets" else row.kind
    return f"# HELP {row.name} {row.help}", f"# TYPE {row.name} {kind}"


def _histogram_lines(row: Metric, workers: Sequence[Histogram]) -> Iterator[str]:
    """Yield the samples of a histogram that several workers share."""
    yield from _head(row)
    columns = zip(*(one.counts for one in workers))
    total = 0.0
    for label, column in zip(bound_labels(row.bounds), columns):
        total += sum(column)
        yield f'{row.name}_bucket{{model="{_MODEL}",le="{label}"}} {_number(total)}'
    yield f'{row.name}_sum{{model="{_MODEL}"}} {sum(one.sum for one in workers)!r}'
    yield f'{row.name}_count{{model="{_MODEL}"}} {_number(total)}'


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _engine_lines(engines: Sequence[str], beats: list[EngineBeat | None], ready: list[bool]) -> Iterator[str]:
    def samples(row: Metric, values: list[float | None]) -> Iterator[str]:
        if any(value is not None for value in values):
            yield from _head(row)
        for name, value in zip(engines, values):
            if value is not None:
                yield f'{row.name}{{engine="{name}"}} {_number(float(value))}'

    yield from samples(READY, [float(one) for one in ready])
    for name, row in BEAT_METRICS.items():
        yield from samples(row, [None if beat is None else getattr(beat, name) for beat in beats])
    for name, row in ENGINE_METRICS.items():
        if name not in REPEATED and row.labels == ("engine",) and row.kind in ("counter", "gauge"):
            yield from samples(row, [None if beat is None else beat.metrics.get(name) for beat in beats])
