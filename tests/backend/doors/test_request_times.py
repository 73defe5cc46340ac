"""Times of a request, their way to the metrics page, and totals that several doors publish."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests import fake_triton
from tridecode.backend.doors.monitoring import request_times
from tridecode.backend.doors.monitoring.door_metrics import DoorMetrics
from tridecode.backend.doors.monitoring.metric_families import BucketCounters, Families, Totals, publishing
from tridecode.backend.doors.monitoring.request_times import GapCounts, RequestTimes
from tridecode.backend.service.monitoring.metric_table import BEAT_METRICS, BUCKETS, Metric
from tridecode.backend.service.open_requests import ResumeCounts
from tridecode.backend.wire.messages import BeamStep, EngineBeat, Event


@pytest.fixture()
def registry():
    fake_triton.MetricFamily.registry.clear()
    return fake_triton.MetricFamily.registry


@pytest.fixture()
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(request_times, "time", clock)
    return clock


def one_token(row: int = 0, **others) -> tuple[int, Event]:
    return row, Event(1, row, [7], **others)


def test_first_token_gaps_and_mean_follow_the_deliveries(clock):
    gaps = GapCounts()
    times = RequestTimes(gaps)
    for seconds, events in (
        (0.5, [one_token(queued_s=0.2)]),
        (0.51, [one_token(), one_token()]),  # two steps in one response: one gap
        (1.51, [one_token(finish="length")]),
    ):
        clock.now = 100.0 + seconds
        times.deliver(events)
    assert times.first_token_s == pytest.approx(0.5) and times.queued_s == 0.2
    assert times.per_token_s == pytest.approx(1.01 / 3)
    assert (sum(gaps.counts), gaps.sum) == (2, pytest.approx(1.01))
    assert (
        times.finish_reasons() == "length" and times.finish_reasons(["stop", "length", ""]) == "length,stop"
    )


def test_rows_have_gaps_of_their_own(clock):
    gaps = GapCounts()
    times = RequestTimes(gaps)
    times.deliver([one_token(0), one_token(1)])
    clock.now += 0.02
    times.deliver([one_token(0)])
    clock.now += 0.02
    times.deliver([one_token(0), one_token(1)])
    assert sum(gaps.counts) == 3 and gaps.sum == pytest.approx(0.08)
    assert times.per_token_s == pytest.approx(0.02)


def test_a_request_without_tokens_has_no_latencies(clock):
    times = RequestTimes(GapCounts())
    times.deliver([(0, Event(1, 0, finish="length"))])
    assert (times.first_token_s, times.per_token_s, times.queued_s) == (None, None, None)
    beams = RequestTimes(GapCounts())
    beams.deliver([(0, Event(1, 0, beams=BeamStep([0], [5], [-1.0])))])
    assert beams.first_token_s == 0.0 or beams.first_token == clock.now


def test_accounting_for_a_token_takes_microseconds():
    times, event = RequestTimes(GapCounts()), [one_token()]
    best = 1.0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(2000):
            times.deliver(event)
        best = min(best, (time.perf_counter() - began) / 2000)
    assert best < 10e-6  # a response costs the door 60 us and more


def counter(registry, name: str, **labels) -> float:
    return registry[name].metrics[tuple(sorted(labels.items()))].value()


def test_gaps_are_published_as_a_cumulative_histogram_in_few_calls(registry):
    row = Metric("g", BUCKETS, "help", ("model",), (0.1, 1.0))
    counters = BucketCounters(Families(), row, {"model": "m"})
    counters.publish([3, 2, 1], 4.5)
    counters.publish([3, 4, 1], 5.5)
    found = {bound: counter(registry, "g_bucket", model="m", le=bound) for bound in ("0.1", "1", "+Inf")}
    assert found == {"0.1": 3, "1": 7, "+Inf": 8}
    assert (counter(registry, "g_count", model="m"), counter(registry, "g_sum", model="m")) == (8, 5.5)


def test_an_engine_s_totals_are_counted_once_by_many_doors_and_over_its_restarts(registry):
    row, labels = BEAT_METRICS["steps"], {"engine": "e"}
    doors = [Totals(Families()) for _ in range(3)]

    def publish(door: Totals, epoch: int, total: float) -> float:
        door.begin(epoch)
        door.publish(row, row.name, labels, total)
        return counter(registry, row.name, **labels)

    assert [publish(door, 1, 10.0) for door in doors] == [10.0] * 3
    assert [publish(door, 1, total) for door, total in zip(doors, (25.0, 20.0, 25.0))] == [25.0] * 3
    assert publish(doors[0], 2, 3.0) == 28.0  # rebuilt: it counts from 0
    late = Totals(Families())  # a door that was loaded again
    assert publish(late, 2, 3.0) == 28.0
    assert [publish(door, 2, 5.0) for door in (late, *doors)] == [30.0] * 4


def test_doors_publish_one_after_the_other(tmp_path: Path):
    inside, most = 0, 0
    lock = threading.Lock()

    def enter() -> None:
        nonlocal inside, most
        for _ in range(20):
            with publishing(tmp_path):
                with lock:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.0005)
                with lock:
                    inside -= 1

    threads = [threading.Thread(daemon=True, target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    with publishing(tmp_path / "nowhere"):
        pass


class Link:
    def __init__(self) -> None:
        self.found: EngineBeat | None = None

    def beat(self) -> EngineBeat | None:
        return self.found

    def resumed(self) -> ResumeCounts:
        return ResumeCounts()


def test_values_wait_for_the_next_publication_and_are_bounded(registry, tmp_path, monkeypatch):
    metrics = DoorMetrics("m", "e", Link(), tmp_path, lambda: [GapCounts()])
    times = RequestTimes(GapCounts())
    times.prompt_tokens = 5
    times.deliver([one_token(queued_s=0.01)])
    for _ in range(10_000):
        metrics.count(times, "ok", 1)
    for _ in range(20):
        metrics.publish()
    whole = registry["tridecode_request_seconds"].metrics[(("model", "m"),)]
    assert 6000 < len(whole.values) <= 7000  # 20,000 values of three histograms
    assert counter(registry, "tridecode_requests_total", model="m", outcome="ok") == 10_000
    assert counter(registry, "tridecode_prompt_tokens_total", model="m") == 50_000


def test_unknown_values_of_a_heartbeat_and_repeated_ones_are_left_out(registry, tmp_path):
    link = Link()
    metrics = DoorMetrics("m", "e", link, tmp_path)
    link.found = EngineBeat(1, 0, 4, 0.0, metrics={"steps": 4.0, "newer": 1.0, "sequences_running": 2.0})
    metrics.publish()
    assert counter(registry, "tridecode_engine_steps_total", engine="e") == 4.0
    assert not [name for name in registry if "newer" in name or "sequences_running" in name]
