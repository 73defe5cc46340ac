"""A door's metrics on Triton's /metrics page: its requests and their latencies, and its engine's heartbeat.

metric_table.py lists them. Values that doors measure have one series per model; values that the engine
reports have one per engine, whatever the number of doors.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import triton_python_backend_utils as pb_utils

from tridecode.backend.doors.monitoring.metric_families import (
    BucketCounters,
    Families,
    Labels,
    Totals,
    publishing,
)
from tridecode.backend.doors.monitoring.request_times import GapCounts, RequestTimes
from tridecode.backend.service.engine_link import EngineLink
from tridecode.backend.service.monitoring.metric_table import (
    BEAT_METRICS,
    BUCKETS,
    DOOR_METRICS,
    ENGINE_METRICS,
    GAUGE,
    READY,
    REPEATED,
    Metric,
)
from tridecode.backend.service.open_requests import ResumeCounts
from tridecode.backend.wire.messages import EngineBeat

_EVERY_S = 1.0  # a publication costs several round trips to the server; a request only adds to a list
#: histogram values that are buffered at most until a publication, and sent at most by one publication
_MAX_VALUES = 20_000
_VALUES_AT_ONCE = 4_000

_BY_NAME = {row.name: row for row in DOOR_METRICS}
_REQUESTS = _BY_NAME["tridecode_requests_total"]
_PROMPT_TOKENS = _BY_NAME["tridecode_prompt_tokens_total"]
_OUTPUT_TOKENS = _BY_NAME["tridecode_output_tokens_total"]
_RESUMED = _BY_NAME["tridecode_resumed_requests_total"]
_RESUME_WAIT = _BY_NAME["tridecode_resume_wait_seconds_total"]
_FIRST = _BY_NAME["tridecode_time_to_first_token_seconds"]
_GAPS = _BY_NAME["tridecode_inter_token_seconds"]
_PER_TOKEN = _BY_NAME["tridecode_time_per_output_token_seconds"]
_WHOLE = _BY_NAME["tridecode_request_seconds"]
_QUEUE = _BY_NAME["tridecode_queue_seconds"]

_log = logging.getLogger("tridecode.door")


class DoorMetrics:
    """Counts ended requests and publishes once a second, on a thread of its own.

    If this Triton has no custom metrics, or runs with --allow-metrics=false, it only counts.
    """

    def __init__(
        self,
        door: str,
        engine: str,
        link: EngineLink,
        engine_dir: Path,
        gaps: Callable[[], Sequence[GapCounts]] | None = None,
    ):
        """door, engine: their names on the page. engine_dir: folder of the engine's model. gaps: one per
        sender thread; None: this door has no requests of its own.
        """
        self._link, self._engine_dir, self._gaps = link, engine_dir, gaps
        self._model: Labels = {"model": door}
        self._engine: Labels = {"engine": engine}
        self._lock = threading.Lock()
        # (metric, outcome) -> count that is not yet published
        self._counts: Counter[tuple[str, str]] = Counter()
        self._resumed = ResumeCounts()  # totals that were already published
        self._values: list[tuple[Metric, float]] = []
        self._families: Families | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        if hasattr(pb_utils, "MetricFamily"):
            self._thread.start()

    def count(self, times: RequestTimes, outcome: str, tokens: int) -> None:
        """Count a request that has ended.

        outcome: "ok" or an error's code in lower case. tokens: generated.
        """
        values = [(_FIRST, times.first_token_s), (_PER_TOKEN, times.per_token_s), (_QUEUE, times.queued_s)]
        if outcome == "ok" and times.prompt_tokens:
            values.append((_WHOLE, times.total_s))
        with self._lock:
            self._counts[_REQUESTS.name, outcome] += 1
            self._counts[_PROMPT_TOKENS.name, ""] += times.prompt_tokens
            self._counts[_OUTPUT_TOKENS.name, ""] += tokens
            if len(self._values) < _MAX_VALUES:
                self._values += [(row, value) for row, value in values if value is not None]

    def count_request(self, outcome: str) -> None:
        """Count a request that ended without an engine."""
        with self._lock:
            self._counts[_REQUESTS.name, outcome] += 1

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(2 * _EVERY_S)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(_EVERY_S)  # publishes what came since the last publication, too
            try:
                self.publish()
            except Exception:
                _log.exception("metrics are switched off: the server refuses them")
                return

    def publish(self) -> None:
        """Send new values to the server."""
        if self._families is None:
            self._begin()
        families = self._families
        assert families is not None
        with self._lock:
            counts, self._counts = self._counts, Counter()
            values = self._values[:_VALUES_AT_ONCE]
            del self._values[:_VALUES_AT_ONCE]
        for (name, outcome), value in counts.items():
            labels = {**self._model, **({"outcome": outcome} if outcome else {})}
            families.add(_BY_NAME[name], labels, value)
        for row, seconds in values:
            families.observe(row, self._model, seconds)
        if self._gaps is not None:
            threads = self._gaps()
            columns = zip(*(one.counts for one in threads))
            self._gap_counters.publish([sum(column) for column in columns], sum(one.sum for one in threads))
            self._publish_resumed(families)
        self._publish_engine(families)

    def _begin(self) -> None:
        """Create the metrics that need an initial 0 on the page, such as counters whose rate is computed."""
        families = Families()
        families.add(_REQUESTS, {**self._model, "outcome": "ok"}, 0.0)
        if self._gaps is not None:
            for row in DOOR_METRICS:
                if row.labels == ("model",):
                    families.create(row, self._model)
            self._gap_counters = BucketCounters(families, _GAPS, self._model)
        self._totals = Totals(families)
        self._families = families

    def _publish_resumed(self, families: Families) -> None:
        resumed, before = replace(self._link.resumed()), self._resumed
        self._resumed = resumed
        if resumed != before:
            families.add(_RESUMED, self._model, resumed.requests - before.requests)
            families.add(_RESUME_WAIT, self._model, resumed.wait_s - before.wait_s)

    def _publish_engine(self, families: Families) -> None:
        beat = self._link.beat()
        families.set(READY, self._engine, 0.0 if beat is None else 1.0)
        if beat is None:
            return
        with publishing(self._engine_dir):
            self._totals.begin(beat.epoch)
            for row, name, labels, value in _engine_values(beat):
                labels = {**self._engine, **labels}
                if row.kind == GAUGE:
                    families.set(row, labels, value)
                else:
                    self._totals.publish(row, name, labels, value)


def _engine_values(beat: EngineBeat) -> Iterator[tuple[Metric, str, Labels, float]]:
    """Yield row, family name, labels and value of each metric in a heartbeat."""
    for field, metric in BEAT_METRICS.items():
        yield metric, metric.name, {}, float(getattr(beat, field))
    for spelt, value in beat.metrics.items():
        name, labels = _labels(spelt)
        base, _, part = name.rpartition("_")
        row = ENGINE_METRICS.get(name) or ENGINE_METRICS.get(base)
        if row is None or name in REPEATED:
            continue
        if row.kind == BUCKETS:
            yield row, f"{row.name}_{part}", labels, float(value)
        elif name in ENGINE_METRICS:
            yield row, row.name, labels, float(value)


def _labels(name: str) -> tuple[str, Labels]:
    """Split a name of EngineBeat.metrics from its label, if it has one, as in `waits_bucket{le="1"}`."""
    name, has_label, label = name.partition("{")
    if not has_label:
        return name, {}
    key, _, value = label.removesuffix("}").partition("=")
    return name, {key: value.strip('"')}
