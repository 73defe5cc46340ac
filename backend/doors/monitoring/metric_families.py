"""Metrics in the registry of tritonserver, which all python stubs of the server share.

Two stubs that create a family of the same name, or a metric with the same labels, get the same series: the
registry merges them (Triton 2.51). Counters and histograms of several stubs therefore add up, and a stub that
is loaded again continues from the old values. A family of another kind under a taken name is refused.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from tridecode.backend.base.histogram import bound_labels
from tridecode.backend.service.monitoring.metric_table import BUCKETS, COUNTER, GAUGE, HISTOGRAM, Metric

Labels = dict[str, str]
_LOCK_S = 0.1  # longest wait for another door that is publishing the same engine


class Families:
    """Creates families and metrics on first use. Each call is a round trip to the server, about 20 us."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple, Any] = {}
        kinds = pb_utils.MetricFamily
        self._kinds = {COUNTER: kinds.COUNTER, GAUGE: kinds.GAUGE, HISTOGRAM: kinds.HISTOGRAM}

    def add(self, row: Metric, labels: Labels, value: float) -> None:
        """Increment a counter."""
        self._metric(row.name, COUNTER, row, labels).increment(value)

    def set(self, row: Metric, labels: Labels, value: float) -> None:
        """Set a gauge."""
        self._metric(row.name, GAUGE, row, labels).set(value)

    def value(self, row: Metric, labels: Labels, name: str = "") -> float:
        """Return a counter's value in the server: the sum over all stubs. name: a family of BUCKETS."""
        return self._metric(name or row.name, COUNTER, row, labels).value()

    def observe(self, row: Metric, labels: Labels, value: float) -> None:
        """Add a value to a histogram."""
        self._metric(row.name, HISTOGRAM, row, labels).observe(value)

    def add_part(self, row: Metric, name: str, labels: Labels, value: float) -> None:
        """Increment a counter of the family `name` of a histogram of kind BUCKETS."""
        self._metric(name, COUNTER, row, labels).increment(value)

    def create(self, row: Metric, labels: Labels) -> None:
        """Create the metric with the value 0 before it has one."""
        if row.kind != BUCKETS:
            self._metric(row.name, row.kind, row, labels)
            return
        bucket, *others = row.families
        for bound in bound_labels(row.bounds):
            self._metric(bucket, COUNTER, row, {**labels, "le": bound})
        for name in others:
            self._metric(name, COUNTER, row, labels)

    def _metric(self, name: str, kind: str, row: Metric, labels: Labels) -> Any:
        key = (name, *sorted(labels.items()))
        if key not in self._metrics:
            if name not in self._families:
                family = pb_utils.MetricFamily(name=name, description=row.help, kind=self._kinds[kind])
                self._families[name] = _immortal(family)
            more = {"buckets": list(row.bounds)} if kind == HISTOGRAM else {}
            self._metrics[key] = _immortal(self._families[name].Metric(labels=labels, **more))
        return self._metrics[key]


def _immortal(thing: Any) -> Any:
    """Never destroy `thing`.

    A metric's destructor can crash the stub or the server at exit (seen on Triton 2.51), and removes the
    series from the page even for the other stubs that share it.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


class BucketCounters:
    """Publishes a histogram of kind BUCKETS from counts that are accumulated elsewhere.

    Costs a fixed number of round trips per publication, however many values there were.
    """

    def __init__(self, families: Families, row: Metric, labels: Labels):
        self._families, self._row, self._labels = families, row, labels
        self._bounds = bound_labels(row.bounds)
        self._published: list[float] = [0] * len(self._bounds)
        self._published_sum = 0.0
        families.create(row, labels)

    def publish(self, counts: Sequence[float], total: float) -> None:
        """counts: per bucket, not cumulative, since the start. total: sum of all values."""
        new = [now - before for now, before in zip(counts, self._published)]
        if not any(new):
            return
        bucket, sum_, count = self._row.families
        add = self._families.add_part
        added = sum(new)
        add(self._row, count, self._labels, added)
        if total > self._published_sum:
            add(self._row, sum_, self._labels, total - self._published_sum)
        for bound, number in zip(reversed(self._bounds), reversed(new)):  # wide buckets first: a page that
            if added:  # is read meanwhile never shows a bucket smaller than one that it contains
                add(self._row, bucket, {**self._labels, "le": bound}, added)
            added -= number
        self._published, self._published_sum = list(counts), total


class Totals:
    """Publishes totals that restart from 0 with each engine as counters of the server, which never restart.

    Several doors publish the same engine. Each compares the server's value with the total that it knows and
    adds what is missing, so the number of doors does not matter.
    """

    def __init__(self, families: Families):
        self._families = families
        self._epoch = -1
        self._base: dict[tuple, float] = {}  # series -> total of earlier engines
        self._last: dict[tuple, float] = {}

    def begin(self, epoch: int) -> None:
        """Take the following totals as those of the engine of this epoch."""
        if epoch != self._epoch:
            for key, last in self._last.items():
                self._base[key] += last
            self._last.clear()
            self._epoch = epoch

    def publish(self, row: Metric, name: str, labels: Labels, total: float) -> None:
        key = (name, *sorted(labels.items()))
        value = self._families.value(row, labels, name)
        if key not in self._base:  # the server's value may already include totals of earlier engines
            self._base[key] = max(0.0, value - total)
        self._last[key] = total
        missing = self._base[key] + total - value
        if missing > 0.0:
            self._families.add_part(row, name, labels, missing)


@contextmanager
def publishing(engine_dir: Path) -> Iterator[None]:
    """Hold the lock of the doors that publish the engine of `engine_dir`, so that no two add the same count.

    If the folder cannot be locked in time, the doors continue without the lock: a count may then be added
    twice, which the next publications correct.
    """
    fd = -1
    try:
        fd = os.open(engine_dir, os.O_RDONLY | os.O_CLOEXEC)
        deadline = time.monotonic() + _LOCK_S
        while not _locked(fd) and time.monotonic() < deadline:
            time.sleep(0.002)
    except OSError:
        pass
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
