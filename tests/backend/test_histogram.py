"""The histogram of doors, front and shadow runs equals prometheus_client's."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram

from tridecode.backend.base.histogram import Histogram, bound_labels, num_cells

_BOUNDS = (0.001, 0.02, 1.0, 30.0)


@pytest.mark.parametrize("shared", [False, True])
def test_buckets_and_sum_are_those_of_prometheus_client(shared: bool) -> None:
    drawn = random.Random(5)
    values = [*_BOUNDS, 0.0, *(drawn.expovariate(2.0) for _ in range(200)), 99.0]
    cells = memoryview(bytearray(8 * num_cells(_BOUNDS))).cast("d") if shared else None
    ours = Histogram(_BOUNDS, cells)
    registry = CollectorRegistry()
    theirs = TheirHistogram("h", "help", buckets=_BOUNDS, registry=registry)
    for value in values:
        ours.add(value)
        theirs.observe(value)
    samples = [sample for family in registry.collect() for sample in family.samples]
    wanted = {float(one.labels["le"]): one.value for one in samples if one.name == "h_bucket"}
    assert {float(label): count for label, count in ours.buckets().items()} == wanted
    assert ours.sum == pytest.approx(next(one.value for one in samples if one.name == "h_sum"))
    assert sum(ours.counts) == len(values)


def test_labels_of_bounds_are_as_short_as_tritonserver_s() -> None:
    assert bound_labels(_BOUNDS) == ["0.001", "0.02", "1", "30", "+Inf"]
